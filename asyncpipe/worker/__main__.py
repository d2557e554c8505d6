"""Begins a worker: the controller's signals, ``sys.path``, and then ``asyncpipe/runtime/workers/worker_main.py``.

Nothing of asyncpipe is imported before ``sys.path`` is the controller's, since only that says where asyncpipe is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Become the worker of the invitation that comes on standard input."""
    _leave_signals_to_the_controller()
    values = _read_invitation()
    sys.path[:] = values["sys_path"]
    sys.argv[:] = values["argv"]
    from asyncpipe.runtime.workers.worker_main import become_worker

    become_worker(values, lifeline=_lifeline())


def _leave_signals_to_the_controller() -> None:
    """Ignore what a terminal or a service manager sends to all processes: the controller stops its workers.

    Not by ``SIG_IGN``, which the worker's own children would inherit.
    """
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    for each in signals:
        signal.signal(each, _do_nothing)
    os.register_at_fork(after_in_child=lambda: [signal.signal(each, signal.SIG_DFL) for each in signals])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _do_nothing(*_: object) -> None:
    pass


def _read_invitation() -> dict[str, Any]:
    """The one line of JSON that is written. The pipe stays open, and silent, from then on."""
    line = b""
    while not line.endswith(b"\n"):
        if not (part := os.read(0, 1 << 16)):
            sys.exit("no invitation came on standard input, where the process that starts a worker writes it")
        line += part
    values: dict[str, Any] = json.loads(line)
    return values


def _lifeline() -> int:
    """Standard input, moved to another number; what reads standard input from now on finds it empty."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lifeline


if __name__ == "__main__":
    main()
