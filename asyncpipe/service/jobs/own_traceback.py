"""Where a job's code failed, as text for its log: frames of the job's own code first, the innermost first."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

import asyncpipe
from asyncpipe.errors import AsyncpipeError, RemoteError

__all__ = ["own_traceback"]

_LIBRARIES = (Path(asyncpipe.__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")))
_MOST_FRAMES = 30


def own_traceback(error: BaseException) -> str:
    """The traceback of what ``error`` was raised from; empty for an error of the package that no code has caused.

    Of an error in a worker, the worker's own text.
    """
    while isinstance(error, AsyncpipeError) and error.__cause__ is not None and not isinstance(error, RemoteError):
        error = error.__cause__
    if isinstance(error.__cause__, RemoteError):
        error = error.__cause__
    if isinstance(error, RemoteError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(path) for path in _LIBRARIES)]
    if not own and isinstance(error, AsyncpipeError):
        return ""
    others = [frame for frame in frames if frame not in own]
    return "\n".join([f"{type(error).__name__}: {error}", *_lines("", own), *_lines("by way of ", others)])


def _lines(begin: str, frames: Sequence[FrameSummary]) -> list[str]:
    recent = list(reversed(frames))[:_MOST_FRAMES]
    return [f"  {begin}{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in recent]
