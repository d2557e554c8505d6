"""Measure asyncpipe on this machine.

In a checkout, `python -m benchmarks` has more benchmarks, by the same command line.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from asyncpipe.bench import BENCHMARKS
from asyncpipe.cli.arguments import add_command
from asyncpipe.errors import missing_package

__all__ = ["add_benchmarks", "add_parser"]


def add_parser(subparsers: Any) -> None:
    """Register ``asyncpipe bench``."""
    add_benchmarks(add_command(subparsers, "bench", __doc__), "asyncpipe.bench", BENCHMARKS)


def add_benchmarks(
    parser: argparse.ArgumentParser, package: str, benchmarks: Mapping[str, str]
) -> dict[str, argparse.ArgumentParser]:
    """Add a command for each of ``benchmarks``, which are modules of ``package``, and return the commands by name.

    A command's default ``options`` names those of its options that are keyword arguments of the benchmark's ``run``.
    """
    commands, parsers = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True), {}
    for name, summary in benchmarks.items():
        parsers[name] = add_command(commands, name, f"{summary}\n\nMeasure {summary}. Figures are medians.")
        parsers[name].add_argument("--json", action="store_true", help="print one JSON object instead of Markdown")
        parsers[name].set_defaults(run=partial(_run, package, name), options=())
    return parsers


def _run(package: str, name: str, args: argparse.Namespace) -> int:
    """Run the benchmark; progress goes to standard error. Raises ``OptionError``, also where a package is missing."""
    options = {option: value for option in args.options if (value := getattr(args, option)) is not None}
    try:
        benchmark = import_module(f"{package}.{name}")
    except ImportError as error:
        raise missing_package(f"this benchmark needs {error.name}", "service") from error
    figures = benchmark.run(lambda text: print(f"… {text}", file=sys.stderr), **options)
    if args.json:
        machine = {"python": platform.python_version(), "system": platform.system(), "processor": platform.machine()}
        print(json.dumps({"benchmark": name, "machine": machine, **figures}))
    else:
        print(benchmark.show(figures))
    return 0
