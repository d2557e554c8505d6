"""``python -m benchmarks NAME``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from asyncpipe.cli.bench import add_benchmarks
from asyncpipe.errors import AsyncpipeError
from benchmarks import BENCHMARKS, gpu


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; 2 for an option that is wrong, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Measure asyncpipe on this machine; figures are medians.",
        epilog="Those with which users decide are in asyncpipe bench.",
    )
    add_benchmarks(parser, "benchmarks", BENCHMARKS)
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
