"""The ``asyncpipe`` command line. ``main`` below is its entry point.

Each command is a module with an ``add_parser`` function: train, serve, jobs, service, schedule, simulate, profile,
plan, bench, doctor. The help of a command is a docstring: that of its module, or of the function that runs it. What
they share:

    arguments.py       the parser of a command, types of arguments, --set
    step_options.py    options of commands that lower a schedule, and texts about its graph
    tables.py          tables, by rich
    progress.py        the progress display of train
    metrics.py         the metrics server of train and serve; log_format.py: the log of serve
    jobs_asking.py     commands of jobs that ask once; jobs_watching.py, jobs_download.py: the others; jobs_text.py

Commands may import everything; nothing imports them. A module here imports torch, FastAPI or rich only when its command
runs, so that ``--help`` and the other commands start quickly.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncpipe import __version__
from asyncpipe.errors import AsyncpipeError
from asyncpipe.train.import_path import import_path

__all__ = ["main"]

EXIT_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141
"""Exit statuses other than 0; the last two are those of a process that SIGINT or SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: ``sys.argv``) and return the exit status.

    An ``AsyncpipeError`` becomes one line on stderr and status 2.
    """
    parser = _parser()
    args, more = parser.parse_known_args(_joined(sys.argv[1:] if argv is None else argv))
    if more and not hasattr(args, "run_with"):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    try:
        # So that a schedule's module:Class is found in the working directory, as with `python -m asyncpipe`.
        with import_path(Path.cwd()):
            status: int = args.run_with(more) if hasattr(args, "run_with") else args.run(args)
        sys.stdout.flush()
    except AsyncpipeError as error:
        print(f"asyncpipe: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout again at exit, which would fail on the same pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return status


def _joined(argv: Sequence[str]) -> list[str]:
    """``argv``, in which ``--since -1d`` is ``--since=-1d``: argparse takes what begins with a dash for an option."""
    joined: list[str] = []
    for text in argv:
        if joined and joined[-1].startswith("--") and re.fullmatch(r"-[0-9.]+[smhd]", text):
            joined[-1] += f"={text}"
        else:
            joined.append(text)
    return joined


def _parser() -> argparse.ArgumentParser:
    # Imported here, so that importing this package costs nothing; none of them imports torch before it runs.
    from asyncpipe.cli import bench, doctor, jobs, plan, profile, schedule, serve, service, simulate, train

    parser = argparse.ArgumentParser(
        prog="asyncpipe", description="Pipeline-parallel training for PyTorch, and tools around it."
    )
    parser.add_argument("--version", action="version", version=f"asyncpipe {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (train, serve, jobs, service, schedule, simulate, profile, plan, bench, doctor):
        module.add_parser(subparsers)
    return parser
