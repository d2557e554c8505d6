"""The content of an entry's code, by which a job knows whether it has changed since it was submitted.

::

    3f2a91c0…                      the hash of all that follows
    77ab03d4e1f2 charlm.py         the entry's module, and each module that it imports from the folder where it is
    1b4f0e98c2aa charlm_data.py

The modules are found without running them, as ``modulefinder`` does. Of an installed package there is its version
instead. What an entry imports from elsewhere, or reads, is not part of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from itertools import accumulate
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import asyncpipe

__all__ = ["EntryCode", "changed_files"]

_imported: WeakKeyDictionary[ModuleType, str | None] = WeakKeyDictionary()


class EntryCode:
    """The code of the entry whose module is ``module``, which has a file. Blocks; any thread may use it."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._stamps: dict[Path, tuple[int, ...]] | None = None
        self._code: str | None = None
        self.imported = _imported.setdefault(module, self.now())
        """Its content when the module was first seen, which is what this process runs; ``None`` if nobody knows."""

    def now(self) -> str | None:
        """The content that another process would import now."""
        if self._stamps is None or self._stamps != {path: _stamp(path) for path in self._stamps}:
            name, file = self._module.__name__, Path(self._module.__file__ or "")
            top = sys.modules.get(name.partition(".")[0], self._module)
            root = file.parents[name.count(".") + hasattr(self._module, "__path__")]
            if top is asyncpipe or not {"site-packages", "dist-packages"}.isdisjoint(root.parts):
                self._stamps, hashes = {}, _version(top.__name__)
            else:
                files = {file, *_imported_by(name, [str(root), str(file.parent)])}
                self._stamps = {path: _stamp(path) for path in files}
                there = {os.path.relpath(path, root): path for path in files if path.is_file()}
                hashes = {name: sha256(path.read_bytes()).hexdigest() for name, path in there.items()}
            digest = sha256(repr(sorted(hashes.items())).encode()).hexdigest()
            self._code = "\n".join([digest, *sorted(f"{hashes[name][:12]} {name}" for name in hashes)])
        return self._code if "\n" in (self._code or "") else None


class _EntryFinder(ModuleFinder):
    def find_module(self, *arguments: Any) -> Any:
        try:
            return super().find_module(*arguments)
        except AttributeError:  # A folder without an __init__ file, as one with data.
            raise ImportError from None


def _imported_by(name: str, folders: Sequence[str]) -> set[Path]:
    """The files of the module and of what it imports from ``folders``, as far as they can be read."""
    finder = _EntryFinder(path=[*folders], excludes=["asyncpipe"])
    for above in accumulate(name.split(".")[:-1], "{}.{}".format):
        if getattr(sys.modules.get(above), "__file__", None) is None:
            vars(finder.add_module(above))["__path__"] = [*sys.modules[above].__path__]
    with suppress(ImportError, SyntaxError, OSError):  # Its run will say so.
        finder.import_hook(name)
    files = [getattr(each, "__file__", None) for each in finder.modules.values()]
    return {Path(file) for file in files if file}


def _version(package: str) -> dict[str, str]:
    with suppress(PackageNotFoundError):
        return {package: version(packages_distributions().get(package, [package])[0])}
    return {}


def _stamp(path: Path) -> tuple[int, ...]:
    with suppress(OSError):
        return (path.stat().st_mtime_ns, path.stat().st_size)
    return ()


def changed_files(before: str | None, now: str | None) -> list[str]:
    """The names of what is not the same in two contents; none if one is not known."""
    if before is None or now is None:
        return []
    return sorted({line.partition(" ")[2] for line in {*before.split("\n")[1:]} ^ {*now.split("\n")[1:]}})
