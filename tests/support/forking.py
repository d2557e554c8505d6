"""Runs a function in a forked child, with a deadline."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

SECONDS = 20.0
"""A child needs milliseconds; one that has not answered by then hangs."""


def in_child(function: Callable[[], Any]) -> Any:
    """What ``function`` returns in a forked child; its exceptions are raised here. A child that hangs is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _answer(function, writer)
    os.close(writer)
    try:
        answer = _read(reader)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if answer is None:
        raise AssertionError(f"the child has not answered within {SECONDS:g} s")
    assert answer, f"the child ended without an answer, with the status {status}"
    returned, error = pickle.loads(answer)
    if error is not None:
        raise error
    return returned


def raised_by(function: Callable[[], Any]) -> str:
    """The type and text of what ``function`` raises, or an empty text."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - told to the caller
        return f"{type(error).__name__}: {error}"
    return ""


def _answer(function: Callable[[], Any], writer: int) -> None:
    """Never returns: what pytest would do at the end of the process is the parent's."""
    try:
        threading.excepthook = lambda _: os._exit(3)
        try:
            answer = pickle.dumps((function(), None))
        except BaseException as error:  # noqa: BLE001 - told to the parent
            traceback.print_exc()
            answer = pickle.dumps((None, AssertionError(f"in the child: {type(error).__name__}: {error}")))
        os.write(writer, answer)
    finally:
        os._exit(0)


def _read(reader: int) -> bytes | None:
    parts = []
    while select.select([reader], [], [], SECONDS)[0]:
        part = os.read(reader, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None
