"""Begins a worker: the controller's signals, ``sys.path``, and then ``asyncpipe/runtime/workers/worker_main.py``.

Nothing of asyncpipe is imported before ``sys.path`` is the controller's, since only that says where asyncpipe is.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

RANK = "--torchrun-rank"
"""The argument of a rank that serves."""
_CONTROLLERS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that a terminal or a service manager sends to all processes."""


def main() -> None:
    """Become the worker of the invitation that comes on standard input; with ``-m`` and arguments, what torchrun wants.

    By its path, this program gets an argument which it does not read: it tells who looks at the list of processes.
    """
    if sys.argv[1:] and (__spec__ is not None or sys.argv[1:] == [RANK]):
        _run_by_torchrun()
        return
    _leave_signals_to_the_controller()
    values = _read_line()
    _take_over(values)
    if "forks" in values:
        # From here on this is each of the workers.
        board, batches = _forked(values)
        values = _read_line() | {"board": board, "batches": batches}
        _take_over(values)
    # Forked children are ended as all others. What is sent before they say so waits until then.
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_be_usual)
    from asyncpipe.runtime.workers.worker_main import become_worker

    become_worker(values, lifeline=_lifeline())
    _end()


def _run_by_torchrun() -> None:
    if __spec__ is None:
        sys.path[0] = str(Path(__file__).parents[2])
    from asyncpipe.worker.under_torchrun import run, serve

    if os.environ.get("RANK") in (None, "0"):
        run(sys.argv[1:])
    else:
        _leave_signals_to_the_controller()
        serve()
        _end()


def _end() -> None:
    # Python's own end deletes all that torch has loaded, object by object, which takes most of a second of CPU time.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)


def _take_over(values: dict[str, Any]) -> None:
    """Have the controller's ``sys.path``, as far as its folders are here, its arguments, and variables of one's own."""
    os.environ.update(values.get("environment", {}))
    theirs = values["sys_path"]
    if not values.get("is_same_host"):
        theirs = [entry for entry in theirs if os.path.exists(entry)]
        theirs += [entry for entry in sys.path if entry not in theirs]
    sys.path[:] = theirs
    sys.argv[:] = values["argv"]


def _forked(values: dict[str, Any]) -> tuple[int, int]:
    """Become what workers are forked from; returns in these, with the numbers of their board and batches."""
    from asyncpipe.runtime.workers.fork_server import serve_forks

    return serve_forks(socket.socket(fileno=values["forks"]), _lifeline(), values["entry"])


def _leave_signals_to_the_controller() -> None:
    """Ignore those signals: the controller stops its workers.

    Not by ``SIG_IGN``, which the worker's own children would inherit.
    """
    for each in _CONTROLLERS:
        signal.signal(each, _do_nothing)
    _unblock()  # As the launcher has blocked them.


def _do_nothing(*_: object) -> None:
    pass


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _CONTROLLERS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _CONTROLLERS)


def _be_usual() -> None:
    for each in _CONTROLLERS:
        signal.signal(each, signal.SIG_DFL)
    _unblock()


def _read_line() -> dict[str, Any]:
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
