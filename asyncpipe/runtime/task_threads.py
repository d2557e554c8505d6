"""Which code runs inside a task: in a stage, a loss or a hook, or in a coroutine that one of these has started.

The mark is a context variable, because asyncio hands the context on: ``run_coroutine_threadsafe`` and ``to_thread``
carry it to the loop or thread that does what a task may wait for. A thread that a task starts itself has no mark.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["call_as_task", "inside_task", "mark_thread"]

_T = TypeVar("_T")

_inside = ContextVar("asyncpipe_inside_task", default=False)


def inside_task() -> bool:
    """Whether the caller is inside a task."""
    return _inside.get()


def mark_thread() -> None:
    """Mark all that the calling thread does from now on: it runs tasks only."""
    _inside.set(True)


def call_as_task(function: Callable[[], _T]) -> _T:
    """What a task's ``function`` returns, on a thread that does other things, too."""
    token = _inside.set(True)
    try:
        return function()
    finally:
        _inside.reset(token)
