"""``asyncpipe bench``: benchmarks for the user's own machine."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib import import_module
from typing import Any

from asyncpipe.bench import BENCHMARKS, OPTIONS
from asyncpipe.cli.arguments import add_command, count
from asyncpipe.errors import OptionError, missing_package

__all__ = ["add_parser"]

_OPTIONS = sorted({name for names in OPTIONS.values() for name in names})


def add_parser(subparsers: Any) -> None:
    """Register ``asyncpipe bench``."""
    names = "\n".join(f"  {name:10} {summary}" for name, summary in BENCHMARKS.items())
    parser = add_command(
        subparsers,
        "bench",
        summary="measure asyncpipe on this machine",
        description="Run a benchmark on this machine and print its figures (medians).",
        examples=f"benchmarks:\n{names}",
    )
    parser.add_argument("name", metavar="NAME", choices=sorted(BENCHMARKS), help=", ".join(sorted(BENCHMARKS)))
    parser.add_argument("--device", help="where to run, e.g. cuda:0 (unet: by default a CPU; paper: a GPU)")
    parser.add_argument("--size", help="small or paper (unet; by default small on a CPU, paper on a CUDA device)")
    parser.add_argument("--cases", help="which of its steps, e.g. tiny,fine (peers, pipeline; by default all)")
    parser.add_argument("--contestants", help="who takes part, e.g. plain,bare,step (peers; by default everyone)")
    parser.add_argument("--repeats", type=count, help="measured turns (peers: 15; pipeline with --steps: 3)")
    parser.add_argument("--steps", type=count, help="also measure so many steps in a row (pipeline)")
    parser.add_argument("--beside", type=count, help="busy processes that take a part of the CPU meanwhile (sharing)")
    parser.add_argument("--out", metavar="FOLDER", help="write timelines as SVG pictures into FOLDER (paper)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark ``args.name``; progress goes to standard error.

    Raises ``OptionError`` for an option that this benchmark does not have, and for a package that is not installed.
    """
    known = OPTIONS.get(args.name, ())
    options = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    for option in options:
        if option not in known:
            has = ", ".join(f"--{name}" for name in known) or "no options"
            raise OptionError(f"the benchmark {args.name!r} has no --{option}; it has {has}")
    try:
        benchmark = import_module(f"asyncpipe.bench.{args.name}")
    except ImportError as error:
        raise missing_package(f"this benchmark needs {error.name}", "service") from error
    figures = benchmark.run(lambda text: print(f"… {text}", file=sys.stderr), **options)
    if args.json:
        machine = {"python": platform.python_version(), "system": platform.system(), "processor": platform.machine()}
        print(json.dumps({"benchmark": args.name, "machine": machine, **figures}))
    else:
        print(benchmark.show(figures))
    return 0
