"""How a failure is told: its traceback, as Python prints it, and its root line, by which failures are grouped.

::

    RuntimeError: mat1 and mat2 shapes cannot be multiplied (NxN and NxN) (charlm.py:41 in forward)
    └─ type ────  └─ message: a number is N, a path its last part ──────  └─ the innermost frame of the job's own code

The root is the first error of a chain, of which the others are consequences; of an error in a worker it is in the
worker's text. Where the job has no frame of its own, it is the innermost one of a library other than asyncpipe.
"""

from __future__ import annotations

import re
from pathlib import Path
from traceback import format_exception

import asyncpipe
from asyncpipe.train.redaction import redacted

__all__ = ["full_traceback", "root_line"]

MAX_ROOT = 300
_PACKAGE = re.escape(str(Path(asyncpipe.__file__).parent))
_OUR_FRAMES = re.compile(rf'(?:  File "{_PACKAGE}/[^\n]*\n(?:    [^\n]*\n)*){{2,}}')
_LIBRARY = re.compile(rf"^{_PACKAGE}/|/(?:site|dist)-packages/|/lib/python3|^<")
_FRAME = re.compile(r'^ +File "([^"]+)", line (\d+),? in (.+)$', re.MULTILINE)
_BETWEEN = re.compile(r"\n\n(?:The above exception was the direct cause|During handling of the above)[^\n]*\n")
_FOLDERS = re.compile(r"(?<![\w.])[~.]{0,2}/(?:[\w.+-]+/)*(?=[\w.+-])")
_VALUES = re.compile(
    r"0x[0-9a-f]+|(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)|\b(?=\w*\d)\w{16,}\b|(?<=\btmp)\w{8}\b|\d+",
    re.IGNORECASE,
)


def full_traceback(error: BaseException) -> str:
    """The traceback of ``error`` and of what it was raised from, in which frames of asyncpipe are folded.

    Of a task that hangs, it ends with the stack of its thread.
    """
    text = "".join(format_exception(error))
    stack = getattr(error, "stack", "") or getattr(error.__cause__, "stack", "")
    return _OUR_FRAMES.sub(_folded, text) + (f"The stack of the task that hangs:\n{stack}" if stack else "")


def _folded(frames: re.Match[str]) -> str:
    return f"  … {len(_FRAME.findall(frames[0]))} frames of asyncpipe\n"


def root_line(text: str, cause: str | None = None) -> str:
    """The root line of the traceback ``text``; or of a run that ended because of ``cause``, and left ``text``."""
    is_crash = cause is not None
    if is_crash:
        block = text.partition("most recent call first")[2]
    else:
        block = _BETWEEN.split(text)[0].rpartition("Traceback (most recent call last):\n")[2]
    frames = list(_FRAME.finditer(block))
    if cause is None:
        behind = block[frames[-1].end() :] if frames else block
        cause = next((line for line in behind.split("\n") if line[:1].strip()), "")
    others = [frame for frame in frames if not re.match(f"{_PACKAGE}/", frame[1])]
    own = [frame for frame in others if not _LIBRARY.search(frame[1])] or others
    where = own[0 if is_crash else -1] if own else None
    shown = "" if where is None else f" ({Path(where[1]).name}:{where[2]} in {where[3]})"
    plain = _VALUES.sub("N", _FOLDERS.sub("", redacted(cause)))
    return f"{plain[: MAX_ROOT - len(shown)]}{shown}"
