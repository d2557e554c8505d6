"""``python -m tests.campaigns.workers --cases 10000 --seed 1``: run the campaign, or one case of it."""

from __future__ import annotations

import argparse
import os
import sys
from pprint import pformat

from tests.campaigns.workers.campaign import run_campaign
from tests.campaigns.workers.cases import draw


def main() -> int:
    """Run the command line; 1 if something was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.workers", description="Random runs in worker processes, against threads."
    )
    parser.add_argument("--cases", type=int, default=10000, help="how many (default: 10000)")
    parser.add_argument("--seed", type=int, default=1, help="of the campaign (default: 1)")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long at most (default: 30)")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="how many (default: 2)")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for 25 cases (default: 120)")
    parser.add_argument("--transport", default="shared_memory", help="of edges (default: shared_memory; or connection)")
    parser.add_argument("--case", type=int, metavar="SEED", help="run the case of this seed")
    parser.add_argument("--times", type=int, default=1, help="with --case: so often")
    args = parser.parse_args()
    first, cases = args.seed * 1_000_000, args.cases
    if args.case is not None:
        print(pformat(draw(args.case), width=120))
        first, cases, args.processes = args.case, 1, 1
    for _ in range(1 if args.case is None else args.times):
        campaign = run_campaign(
            range(first, first + cases),
            minutes=args.minutes,
            processes=args.processes,
            deadline=args.deadline,
            transport=args.transport,
            tell=lambda text: print(text, file=sys.stderr),
        )
        print(campaign.report())
        if campaign.findings:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
