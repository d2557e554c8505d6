"""Runs the rows of the table, or those that are named, and prints what each showed.

    python -m tests.campaigns.service                       # all, one after the other
    python -m tests.campaigns.service greedy backup

The exit status is 1 if one of them did not hold.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

# Rows use the same helpers as tests do, by the same names.
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from tests.campaigns import service
from tests.campaigns.service import Row

HEAD = "| done to the service | seen | held | seconds |\n|---|---|---|---|"


def names() -> list[str]:
    """The rows that there are."""
    found = [module.name for module in pkgutil.iter_modules(service.__path__)]
    return [name for name in found if not name.startswith(("_", "test_"))]


def rows_of(name: str) -> tuple[list[Row], float]:
    """What the row ``name`` showed, and how many seconds it took. An error is a row that did not hold."""
    begun = monotonic()
    with TemporaryDirectory(prefix=f"asyncpipe-{name}-") as folder:
        try:
            rows = importlib.import_module(f"tests.campaigns.service.{name}").run(Path(folder))
        except Exception as error:  # noqa: BLE001 - becomes a row
            traceback.print_exc()
            rows = [Row(name, f"{type(error).__name__}: {error}".splitlines()[0], held=False)]
    return rows, monotonic() - begun


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())} (default: all)")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(names())):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(names())}")
    print(HEAD, flush=True)
    held = True
    for name in args.names or names():
        rows, seconds = rows_of(name)
        for row in rows:
            print(f"| {row.what} | {row.figure} | {'yes' if row.held else '**no**'} | {seconds:.0f} |", flush=True)
            held &= row.held
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
