"""``asyncpipe bench``: benchmarks for the user's own machine."""

from __future__ import annotations

import argparse
from typing import Any

from asyncpipe.bench import BENCHMARKS, OPTIONS
from asyncpipe.bench.command import Suite, add_arguments, run_benchmark
from asyncpipe.cli.arguments import add_command

__all__ = ["add_parser"]

_SUITE = Suite("asyncpipe.bench", BENCHMARKS, OPTIONS)


def add_parser(subparsers: Any) -> None:
    """Register ``asyncpipe bench``."""
    parser = add_command(
        subparsers,
        "bench",
        summary="measure asyncpipe on this machine",
        description="Run a benchmark on this machine and print its figures (medians).",
        examples=f"benchmarks:\n{_SUITE.listing()}\n\nIn a checkout, python -m benchmarks has more of them.",
    )
    add_arguments(parser, _SUITE)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run a benchmark; raises ``OptionError`` for an option that it does not have."""
    return run_benchmark(args, _SUITE)
