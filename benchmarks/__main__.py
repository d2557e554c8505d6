"""``python -m benchmarks NAME``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from asyncpipe.bench.command import Suite, add_arguments, run_benchmark
from asyncpipe.errors import AsyncpipeError
from benchmarks import BENCHMARKS, OPTIONS

SUITE = Suite("benchmarks", BENCHMARKS, OPTIONS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; without a name, list them. 2 for an option that is wrong, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Measure asyncpipe on this machine; figures are medians.",
        epilog=f"benchmarks:\n{SUITE.listing()}\n\nThose with which users decide are in asyncpipe bench.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, SUITE)
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help()
        return 0
    try:
        return run_benchmark(parser.parse_args(arguments), SUITE)
    except AsyncpipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
