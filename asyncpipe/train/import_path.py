"""Imports of a user's own modules, from the folder of the job file or the working directory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["import_path"]


@contextmanager
def import_path(folder: Path) -> Iterator[None]:
    """During the block, modules in ``folder`` are found before all others."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        # An imported module may have changed sys.path, so only this entry is removed, if it is still there.
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
