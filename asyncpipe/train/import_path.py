"""Where a user's own modules are looked for: next to the job file, or in the working directory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["import_path"]


@contextmanager
def import_path(folder: Path) -> Iterator[None]:
    """Modules in ``folder`` win over all others meanwhile."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        # A module may have changed sys.path itself, so only this one entry goes, if it is still there.
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
