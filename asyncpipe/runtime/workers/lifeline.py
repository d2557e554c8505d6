"""The lifeline: a pipe that only the controller can write to, and never does. When it hangs up, the worker ends.

The kernel closes the controller's end when the controller ends, however it ends. It then sends the worker the signal
that is set for the other end (``F_SETSIG``), and this is SIGKILL: so the worker ends also if it is stopped, or if its
threads hold the GIL for ever in C. ``PR_SET_PDEATHSIG`` would kill the worker already when the *thread* ends that has
started it.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
from typing import Final

__all__ = ["CONTROLLER_GONE", "hold_on_to"]

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


def _wait(reader: int) -> None:
    os.read(reader, 1)
    os._exit(CONTROLLER_GONE)
