"""Measure asyncpipe on this machine.

In a checkout, `python -m benchmarks` has more benchmarks, by the same command line.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from asyncpipe.bench import BENCHMARKS
from asyncpipe.cli.arguments import add_command, count
from asyncpipe.errors import missing_package

__all__ = ["add_benchmarks", "add_parser"]

_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "cases": ("which of its steps, separated by commas (default: all)", str),
    "contestants": ("who takes part, e.g. plain,bare,step (default: everyone)", str),
    "device": ("where to run, e.g. cuda:0", str),
    "out": ("write timelines as SVG pictures into this folder", str),
    "repeats": ("measured turns", count),
    "size": ("small or paper (default: small on a CPU, paper on a CUDA device)", str),
    "steps": ("steps in a row", count),
}


def add_parser(subparsers: Any) -> None:
    """Register ``asyncpipe bench``."""
    add_benchmarks(add_command(subparsers, "bench", __doc__), "asyncpipe.bench", BENCHMARKS)


def add_benchmarks(
    parser: argparse.ArgumentParser, package: str, benchmarks: Mapping[str, tuple[str, tuple[str, ...]]]
) -> None:
    """Add a command for each of ``benchmarks``, which are modules of ``package``, with the options that it has."""
    commands = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for name, (summary, options) in benchmarks.items():
        command = add_command(commands, name, f"{summary}\n\nMeasure {summary}. Figures are medians.")
        for option in options:
            text, kind = _OPTIONS[option]
            command.add_argument(f"--{option}", type=kind, metavar=option.upper(), help=text)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of Markdown")
        command.set_defaults(run=partial(_run, package, name, options))


def _run(package: str, name: str, known: tuple[str, ...], args: argparse.Namespace) -> int:
    """Run the benchmark; progress goes to standard error. Raises ``OptionError``, also where a package is missing."""
    options = {option: value for option in known if (value := getattr(args, option)) is not None}
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
