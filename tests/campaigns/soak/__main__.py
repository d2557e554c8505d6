"""``python -m tests.campaigns.soak``: run the soak and print its report, or write it to a file."""

from __future__ import annotations

import argparse
import sys
from math import isfinite
from pathlib import Path

from tests.campaigns.soak.report import markdown, summary
from tests.campaigns.soak.soak import SoakSize, run_soak


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.soak",
        description="Run a training service under load and faults, and report whether its process grows. Ctrl-C ends "
        "it early, with a report.",
    )
    parser.add_argument("--minutes", type=_minutes, default=30.0, help="how long (default: 30)")
    parser.add_argument("--report", type=_file, metavar="FILE", help="write the report there (default: print it)")
    args = parser.parse_args()
    figures = run_soak(SoakSize(seconds=60 * args.minutes), lambda text: print(f"… {text}", file=sys.stderr))
    if args.report is None:
        print(markdown(figures))
    else:
        args.report.write_text(markdown(figures), encoding="utf-8")
        print(f"{summary(figures)}\nreport: {args.report}")


def _minutes(text: str) -> float:
    minutes = float(text)
    if not (isfinite(minutes) and minutes > 0):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r:.50}")
    return minutes


def _file(text: str) -> Path:
    """A file that can be written, checked now and not half an hour later."""
    try:
        Path(text).touch()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from None
    return Path(text)


if __name__ == "__main__":
    main()
