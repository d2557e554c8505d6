"""``python -m benchmarks NAME``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from asyncpipe.cli.arguments import count
from asyncpipe.cli.bench import add_benchmarks
from asyncpipe.errors import AsyncpipeError
from benchmarks import BENCHMARKS, gpu

_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "cases": ("which of its steps, separated by commas (default: all)", str),
    "contestants": ("who takes part, e.g. plain,bare,step (default: everyone)", str),
    "device": ("where to run, e.g. cuda:0", str),
    "out": ("write timelines as SVG pictures into this folder", str),
    "repeats": ("measured turns", count),
    "size": ("small or paper (default: small on a CPU, paper on a CUDA device)", str),
    "steps": ("steps in a row", count),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; 2 for an option that is wrong, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Measure asyncpipe on this machine; figures are medians.",
        epilog="Those with which users decide are in asyncpipe bench.",
    )
    summaries = {name: summary for name, (summary, _) in BENCHMARKS.items()}
    for name, command in add_benchmarks(parser, "benchmarks", summaries).items():
        options = BENCHMARKS[name][1]
        for option in options:
            text, kind = _OPTIONS[option]
            command.add_argument(f"--{option}", type=kind, metavar=option.upper(), help=text)
        command.set_defaults(options=options)
    given = sys.argv[1:] if arguments is None else [*arguments]
    try:
        if given[:1] == ["gpu"]:  # Its options are its own, and its exit status says whether something failed.
            return gpu.main(given[1:])
        args = parser.parse_args(given)
        status: int = args.run(args)
    except AsyncpipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
