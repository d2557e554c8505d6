"""The lifeline: a pipe that only the controller can write to, and never does. When it hangs up, the worker ends.

The kernel closes the controller's end when the controller ends, however it ends. It then sends the worker the signal
that is set for the other end (``F_SETSIG``), and this is SIGKILL: so the worker ends also if it is stopped, or if its
threads hold the GIL for ever in C. ``PR_SET_PDEATHSIG`` would kill the worker already when the *thread* ends that has
started it.

A worker whose entry starts processes of its own calls ``lead_group``: the signal then goes to its whole group. Whoever
reaps a worker kills the rest of its group first (``end_group``), while the number of the group cannot be given away.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from typing import Final, NoReturn

__all__ = ["CONTROLLER_GONE", "end_group", "end_without_controller", "hold_on_to", "lead_group"]

CONTROLLER_GONE: Final = 82
"""The exit status of a worker that ends itself because its controller is gone."""


def hold_on_to(reader: int) -> None:
    """End this process when the pipe of ``reader`` hangs up, or anything arrives on it. Keeps ``reader`` for good."""
    if sys.platform == "linux":
        fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        if poll.poll(0):  # It hung up before the signal was set.
            os._exit(CONTROLLER_GONE)
    else:
        threading.Thread(target=_wait, args=(reader,), name="asyncpipe lifeline", daemon=True).start()


def lead_group(reader: int) -> None:
    """Make this process the leader of a group, all of which ends when the pipe of ``reader`` hangs up."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        fcntl.fcntl(reader, fcntl.F_SETOWN, -os.getpid())


def end_without_controller() -> NoReturn:
    """End this process, and its group if it leads one, since the controller is gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(CONTROLLER_GONE)


def end_group(leader: int) -> None:
    """Kill what is left of the group of the child ``leader``, which has ended and is not reaped yet.

    A child that leads no group has none of its number.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _wait(reader: int) -> None:
    os.read(reader, 1)
    end_without_controller()
