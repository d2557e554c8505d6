"""The command line of a suite of benchmarks: ``asyncpipe bench``, and ``python -m benchmarks`` of a checkout."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

from asyncpipe.errors import OptionError, missing_package

__all__ = ["Suite", "add_arguments", "run_benchmark"]

_TEXTS: dict[str, tuple[str, type]] = {
    "beside": ("busy processes that take a part of the CPU meanwhile", int),
    "cases": ("which of its steps, separated by commas (default: all)", str),
    "contestants": ("who takes part, e.g. plain,bare,step (default: everyone)", str),
    "device": ("where to run, e.g. cuda:0", str),
    "out": ("write timelines as SVG pictures into this folder", str),
    "repeats": ("measured turns", int),
    "size": ("small or paper (default: small on a CPU, paper on a CUDA device)", str),
    "steps": ("steps in a row", int),
}


class Suite(NamedTuple):
    """Benchmarks that are run by one command."""

    package: str
    """Each benchmark is a module of it."""
    benchmarks: Mapping[str, str]
    """A summary by name."""
    options: Mapping[str, tuple[str, ...]]
    """Which options a benchmark has; those that are not here have none."""

    def listing(self) -> str:
        """A line for each benchmark."""
        width = max(map(len, self.benchmarks))
        return "\n".join(f"  {name:{width}}  {summary}" for name, summary in self.benchmarks.items())


def add_arguments(parser: argparse.ArgumentParser, suite: Suite) -> None:
    """Add the name of a benchmark and the options of all of them to ``parser``."""
    parser.add_argument("name", metavar="NAME", choices=sorted(suite.benchmarks), help=", ".join(suite.benchmarks))
    for option in _options(suite):
        text, kind = _TEXTS[option]
        users = ", ".join(name for name, options in suite.options.items() if option in options)
        parser.add_argument(f"--{option}", type=kind, metavar=option.upper(), help=f"{text} ({users})")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run_benchmark(args: argparse.Namespace, suite: Suite) -> int:
    """Run the benchmark ``args.name``; progress goes to standard error.

    Raises ``OptionError`` for an option that this benchmark does not have, for a number below 1, and for a package that
    is not installed.
    """
    known = suite.options.get(args.name, ())
    options = {name: value for name in _options(suite) if (value := getattr(args, name)) is not None}
    for option, value in options.items():
        if option not in known:
            has = ", ".join(f"--{name}" for name in known) or "no options"
            raise OptionError(f"the benchmark {args.name!r} has no --{option}; it has {has}")
        if isinstance(value, int) and value < 1:
            raise OptionError(f"--{option} must be an integer of at least 1, got {value}")
    try:
        benchmark = import_module(f"{suite.package}.{args.name}")
    except ImportError as error:
        raise missing_package(f"this benchmark needs {error.name}", "service") from error
    figures = benchmark.run(lambda text: print(f"… {text}", file=sys.stderr), **options)
    if args.json:
        machine = {"python": platform.python_version(), "system": platform.system(), "processor": platform.machine()}
        print(json.dumps({"benchmark": args.name, "machine": machine, **figures}))
    else:
        print(benchmark.show(figures))
    return 0


def _options(suite: Suite) -> list[str]:
    return sorted({option for options in suite.options.values() for option in options})
