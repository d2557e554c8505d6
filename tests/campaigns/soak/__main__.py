"""``python -m tests.campaigns.soak``: run the soak and print its report in Markdown; 1 if something was found."""

from __future__ import annotations

import argparse
import sys

from tests.campaigns.soak.soak import Soak


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.soak",
        description="Run a training service under load and faults, and report whether its process grows. Ctrl-C ends "
        "it early, with a report.",
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the load and the faults (default: 1)")
    args = parser.parse_args()
    soak = Soak(60 * args.minutes, seed=args.seed, tell=lambda text: print(f"… {text}", file=sys.stderr))
    soak.run()
    print(soak.report())
    return int(bool(soak.problems))


if __name__ == "__main__":
    sys.exit(main())
