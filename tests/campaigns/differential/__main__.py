"""``python -m tests.campaigns.differential``: run the campaign, or one case of it."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pprint import pformat

import torch

from tests.campaigns.apart import Apart
from tests.campaigns.differential.campaign import judging, report, run_campaign, verdict_of
from tests.campaigns.differential.cases import draw
from tests.campaigns.differential.judge import judge


def main() -> int:
    """Run the command line; 1 if something was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.differential",
        description="Random models of real layers, as pipelines, against the same models unsplit.",
    )
    parser.add_argument("--cases", type=int, default=2000, help="how many (default: 2000)")
    parser.add_argument("--seed", type=int, default=1, help="of the campaign (default: 1)")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long at most (default: 30)")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="how many (default: 2)")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for each case (default: 60)")
    parser.add_argument("--case", type=int, metavar="SEED", help="judge one case")
    parser.add_argument("--here", action="store_true", help="with --case: in this process, for a debugger")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.case is None:
        options = {"minutes": args.minutes, "processes": args.processes, "deadline": args.deadline}
        campaign = run_campaign(args.seed, args.cases, **options, tell=lambda text: print(text, file=sys.stderr))
        print(report(campaign))
        return int(bool(campaign.findings))
    case = draw(args.case)
    verdict = judge(case) if args.here else verdict_of(Apart(judging(case), args.deadline).finish())
    print(pformat(asdict(case), sort_dicts=False, width=120))
    print(verdict.outcome, verdict.text, sep=": ")
    return int(verdict.is_finding)


if __name__ == "__main__":
    sys.exit(main())
