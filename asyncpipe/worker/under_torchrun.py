"""``torchrun … -m asyncpipe.worker PROGRAM``: rank 0 runs the program, as the controller, and the others serve it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from asyncpipe.errors import AsyncpipeError
from asyncpipe.runtime.workers.torchrun import Rank, serve_rank

__all__ = ["run", "serve"]

COMMANDS = ("train", "serve")
USAGE = """\
usage: torchrun [its options] -m asyncpipe.worker train JOB.toml [options]    a job, as `asyncpipe train`
       torchrun [its options] -m asyncpipe.worker serve [options]             a service, as `asyncpipe serve`
       torchrun [its options] -m asyncpipe.worker SCRIPT.py [arguments]       a script with TorchrunWorkers()
       torchrun [its options] -m asyncpipe.worker -m MODULE [arguments]
"""


def serve() -> None:
    """Serve rank 0, in another one, until that ends."""
    try:
        serve_rank()
    except AsyncpipeError as error:
        sys.exit(f"asyncpipe: error: {error}")


def run(arguments: Sequence[str]) -> None:
    """Run the program of ``arguments``, in rank 0. Returns, or raises, as the program does."""
    try:
        Rank.of_this_process()
    except AsyncpipeError as error:
        sys.exit(f"asyncpipe: error: {error}\n{USAGE}")
    program, *rest = arguments
    if program in COMMANDS:
        workers = [] if any(each.partition("=")[0] == "--workers" for each in rest) else ["--workers", "torchrun"]
        sys.argv[:] = ["asyncpipe", program, *rest, *workers]
        runpy.run_module("asyncpipe", run_name="__main__", alter_sys=True)
    elif program == "-m" and rest:
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif os.path.isfile(program):
        sys.argv[:] = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")
    else:
        sys.exit(f"asyncpipe: error: {program!r} is no command ({', '.join(COMMANDS)}) and no script\n{USAGE}")
