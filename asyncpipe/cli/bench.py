"""``asyncpipe bench``: benchmarks for the user's own machine."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

from asyncpipe.bench import BENCHMARKS
from asyncpipe.cli.arguments import add_command

__all__ = ["add_parser"]

OPTIONS = ("device", "size")
"""The options of all benchmarks; each benchmark has some of them."""


def add_parser(subparsers: Any) -> None:
    """Register ``asyncpipe bench``."""
    names = "\n".join(f"  {name:10} {benchmark.summary}" for name, benchmark in BENCHMARKS.items())
    parser = add_command(
        subparsers,
        "bench",
        summary="measure asyncpipe on this machine",
        description="Run a benchmark on this machine and print its figures (medians).",
        examples=f"benchmarks:\n{names}",
    )
    parser.add_argument("name", metavar="NAME", choices=sorted(BENCHMARKS), help=", ".join(sorted(BENCHMARKS)))
    parser.add_argument("--device", help="where to run, e.g. cuda:0 (unet; by default a CPU)")
    parser.add_argument("--size", help="small or paper (unet; by default small on a CPU, paper on a CUDA device)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark ``args.name``; progress goes to standard error."""
    benchmark = BENCHMARKS[args.name]
    options = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    figures = benchmark.run(lambda text: print(f"… {text}", file=sys.stderr), **options)
    if args.json:
        print(json.dumps({"benchmark": benchmark.name, "machine": _machine(), **figures}))
    else:
        print(benchmark.show(figures))
    return 0


def _machine() -> dict[str, str]:
    return {"python": platform.python_version(), "system": platform.system(), "processor": platform.machine()}
