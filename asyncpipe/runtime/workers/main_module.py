"""Classes and functions of the controller's script, in a worker.

What is pickled by the name ``__main__.Net`` is in the script that the controller runs. ``multiprocessing`` imports that
script into every process that it spawns, under another name, so that what stands behind ``if __name__ == "__main__":``
does not run again. A worker does the same, but only if a message needs it, and only if the script has that guard: a
script without it would begin its training once more in each worker.
"""

from __future__ import annotations

import ast
import os
import runpy
import sys
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from asyncpipe.errors import MessageError

__all__ = ["MainModule", "own_main_class"]

ALIAS = "__mp_main__"
"""The script's name where it does not run as ``__main__``; the one that ``multiprocessing`` gives it."""


def own_main_class(name: str) -> Any:
    """What is called ``name`` in the script of this process. For the controller."""
    return reduce(getattr, name.split("."), sys.modules["__main__"])


@dataclass(frozen=True, slots=True)
class MainModule:
    """Where the controller's ``__main__`` comes from: a module's name, or a file; neither for an interactive one."""

    name: str | None = None
    path: str | None = None

    @classmethod
    def of_this_process(cls) -> MainModule:
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        if spec is not None and spec.name != "__main__":  # As a folder or an archive is called that is run.
            return cls(name=spec.name)
        path = getattr(main, "__file__", None)
        return cls(path=None if path is None else os.path.abspath(path))

    def get(self, name: str) -> Any:
        """What is called ``name`` in the module, which is imported at the first call. For workers.

        Raises ``MessageError`` if it cannot be imported without running the script once more.
        """
        if sys.modules["__main__"].__name__ != ALIAS:
            # Pickles made here then name a module which the controller knows, too.
            sys.modules["__main__"] = sys.modules[ALIAS] = self._load(name)
        return reduce(getattr, name.split("."), sys.modules["__main__"])

    def _load(self, wanted: str) -> ModuleType:
        path = self.path
        if self.name is not None:
            spec = find_spec(self.name)
            path = None if spec is None else spec.origin
        if path is None or not os.path.isfile(path):
            raise MessageError(f"{wanted} is defined interactively, where workers cannot import it; put it in a module")
        if not _has_guard(path):
            raise MessageError(
                f"{wanted} is defined in the script {path}, which workers cannot import without running all of it once "
                f'more; put {wanted} in a module, or what the script does behind `if __name__ == "__main__":`'
            )
        module = ModuleType(ALIAS)
        if self.name is not None:
            module.__dict__.update(runpy.run_module(self.name, run_name=ALIAS, alter_sys=True))
        else:
            module.__dict__.update(runpy.run_path(path, run_name=ALIAS))
        return module


def _has_guard(path: str) -> bool:
    """Whether the file has ``if __name__ == "__main__":`` at its top level."""
    with open(path, "rb") as file:
        tree = ast.parse(file.read(), path)
    tests = [ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If)]
    return any("__name__" in test and "__main__" in test for test in tests)
