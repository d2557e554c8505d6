"""What a worker does from its beginning until its entry runs, and behind that."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from asyncpipe.errors import OptionError
from asyncpipe.runtime.portal import new_event_loop
from asyncpipe.runtime.task_board import TaskBoard
from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.handed_down import HandedDown
from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.lifeline import hold_on_to
from asyncpipe.runtime.workers.remote_logs import RemoteLogHandler
from asyncpipe.shared_memory import SharedViews

__all__ = ["STACKS_SIGNAL", "become_worker"]

_Memory = TypeVar("_Memory")

STACKS_SIGNAL = signal.SIGQUIT
"""On it, a worker writes the stacks of all its threads to standard error, whatever these do, and goes on."""
FLUSH_SECONDS = 60.0
"""For what the entry has sent last. A controller that has told the worker to end waits less, and kills it."""


def become_worker(values: dict[str, Any], lifeline: int | None) -> None:
    """Connect to the controller, and run the entry on this thread. Returns when that has returned.

    ``values`` are those of ``Invitation.line_for``. What the entry raises is raised here, and ends the process.
    """
    if lifeline is not None:
        hold_on_to(lifeline)
    handed_down = HandedDown.from_json(values)
    handed_down.check_versions()
    # On a crash in C, the stack of the thread that crashed goes to standard error, whose end the controller has.
    faulthandler.enable(all_threads=False)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # A worker that is killed has nothing in its buffer.
    board, batches = _open(TaskBoard, values.get("board")), _open(SharedViews, values.get("batches"))
    if not values.get("is_same_host"):
        board = batches = None  # The memory of whoever has started this process in the controller's place.
    control = ControlClient(Invitation.from_json(values["invitation"]), handed_down.main, board, batches, lifeline)
    logs = _send_logs(control, handed_down.log_levels)
    try:
        entry = _find(control.entry)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_run(entry, control))
    finally:
        logging.getLogger().removeHandler(logs)
        control.flush(FLUSH_SECONDS)
        control.end()


def _open(kind: Callable[[int], _Memory], descriptor: int | None) -> _Memory | None:
    if descriptor is None:
        return None
    try:
        return kind(descriptor)
    finally:
        os.close(descriptor)


async def _run(entry: Callable[[ControlClient], Awaitable[None]], control: ControlClient) -> None:
    await entry(control)


def _send_logs(control: ControlClient, levels: Mapping[str, int]) -> logging.Handler:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    handler = RemoteLogHandler(control.name, control.send_log)
    logging.getLogger().addHandler(handler)
    return handler


def _find(entry: str) -> Callable[[ControlClient], Awaitable[None]]:
    module, _, function = entry.partition(":")
    found = getattr(import_module(module), function, None)
    if not callable(found):
        raise OptionError(f"the entry of a worker is module:function, and {entry!r} names no function")
    result: Callable[[ControlClient], Awaitable[None]] = found
    return result
