"""``python -m tests.campaigns.hangs --cases 200 --seed 1``: run the campaign, or a part of it, or one case."""

from __future__ import annotations

import argparse
import asyncio
import sys

from tests.campaigns.hangs.campaign import run_campaign


def main() -> int:
    """Run the command line; 1 if a hang was not named rightly."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.hangs", description="Hangs in workers, each of which must be named."
    )
    parser.add_argument("--cases", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="of the campaign (default: 1)")
    parser.add_argument("--lanes", type=int, default=4, help="how many cases run side by side (default: 4)")
    parser.add_argument("--case", type=int, help="run this case of the campaign alone")
    args = parser.parse_args()
    cases = range(args.cases) if args.case is None else [args.case]
    lanes = min(args.lanes, len(cases))
    figures = asyncio.run(run_campaign(args.seed, cases, lanes, lambda text: print(text, flush=True)))
    print(figures)
    return int(bool(figures.wrong))


if __name__ == "__main__":
    sys.exit(main())
