"""How far a webhook was told, on disk: so messages survive the service, and none is sent twice on purpose."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["ToldSoFar", "read_told", "write_told"]


class ToldSoFar(NamedTuple):
    """Where a webhook stands."""

    sequence: int
    """All transitions up to this one are told, or nobody wants to hear of them, or they are lost."""
    lost: int
    """Messages that were given up since the last one that arrived."""


def read_told(path: Path) -> ToldSoFar | None:
    """What the file says; ``None`` if there is none. Blocks. Raises ``ValueError`` or ``OSError``."""
    try:
        table = json.loads(path.read_bytes())
        return ToldSoFar(int(table["sequence"]), int(table["lost"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.name} lacks {error}") from error


def write_told(path: Path, told: ToldSoFar) -> None:
    """Replace the file, so that it is the old or the new one whatever happens. Blocks. Raises ``OSError``."""
    beside = path.with_suffix(".incomplete")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, json.dumps(told._asdict()).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    beside.replace(path)
