"""What a worker takes over from its controller's process, beside what each child inherits."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from asyncpipe.errors import OptionError
from asyncpipe.runtime.workers.main_module import MainModule

__all__ = ["HandedDown"]


@dataclass(frozen=True, slots=True)
class HandedDown:
    """Travels as JSON, before anything is imported that ``sys.path`` decides about."""

    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    main: MainModule
    log_levels: Mapping[str, int]
    versions: Mapping[str, str]
    """Of what must be the same: pickles of one are not those of another."""

    @classmethod
    def of_this_process(cls, path: Sequence[str] = ()) -> HandedDown:
        """The folders of ``path`` come before those of ``sys.path``."""
        return cls(
            tuple([os.path.abspath(entry) for entry in (*path, *sys.path)]),
            tuple(sys.argv),
            MainModule.of_this_process(),
            {name: logging.getLogger(name).getEffectiveLevel() for name in ("", "asyncpipe")},
            {
                "asyncpipe": import_module("asyncpipe").__version__,
                "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
            },
        )

    def line(self, **values: object) -> bytes:
        """What ``asyncpipe/worker`` reads: these, with more ``values``."""
        return json.dumps(self.to_json() | values).encode() + b"\n"

    def to_json(self) -> dict[str, Any]:
        """In the types of JSON. Read by ``asyncpipe/worker/__main__.py`` first."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HandedDown:
        """What ``to_json`` was called on; ``values`` may have others beside."""
        return cls(
            tuple(values["sys_path"]),
            tuple(values["argv"]),
            MainModule(**values["main"]),
            values["log_levels"],
            values["versions"],
        )

    def check_versions(self) -> None:
        """Raise ``OptionError`` where this process has other versions than the controller."""
        here = HandedDown.of_this_process().versions
        if wrong := [name for name, version in self.versions.items() if here.get(name) != version]:
            listed = ", ".join(f"{name} {self.versions[name]} and here {here.get(name)}" for name in wrong)
            raise OptionError(f"a worker needs the versions of its controller, which has {listed}; {sys.executable}")
