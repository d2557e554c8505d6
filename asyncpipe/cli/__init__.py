"""The ``asyncpipe`` command: each subcommand is a module of this package with an ``add_parser`` function."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from asyncpipe.errors import AsyncpipeError
from asyncpipe.train.import_path import import_path

__all__ = ["main"]

EXIT_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141
"""Statuses beside 0; the last two are those of a process that SIGINT or SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (by default the process's own) and return the exit status.

    An error that asyncpipe raises for the caller becomes one line on stderr and status 2.
    """
    args = _parser().parse_args(argv)
    try:
        # A schedule's module:Class may be in the working directory, as with ``python -m asyncpipe``.
        with import_path(Path.cwd()):
            status: int = args.run(args)
        sys.stdout.flush()
    except AsyncpipeError as error:
        print(f"asyncpipe: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit and would complain about the same pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return status


def _parser() -> argparse.ArgumentParser:
    # Imported here, so that importing this package costs nothing; none of them imports torch before it runs.
    from asyncpipe.cli import bench, jobs, plan, profile, schedule, serve, simulate, train

    parser = argparse.ArgumentParser(
        prog="asyncpipe", description="Pipeline-parallel training for PyTorch, and tools around it."
    )
    parser.add_argument("--version", action="version", version=f"asyncpipe {_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (train, serve, jobs, schedule, simulate, profile, plan, bench):
        module.add_parser(subparsers)
    return parser


def _version() -> str:
    try:
        return metadata.version("asyncpipe")
    except metadata.PackageNotFoundError:
        return "unknown"
