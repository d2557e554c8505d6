"""``python -m tests.campaigns.faults --cases 200 --seed 1``: run the campaign, or one case of it."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from tests.campaigns.faults.campaign import draw, run_campaign, run_case


def main() -> None:
    """Run the command line. An error of a case ends it; so does one that hangs, with all stacks."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.faults")
    parser.add_argument("--cases", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="of the campaign (default: 1)")
    parser.add_argument("--case", type=int, metavar="SEED", help="run the case of this seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # The watchdog logs all stacks for each hung task.
    faulthandler.dump_traceback_later(60 + args.cases, exit=True)
    if args.case is not None:
        print(draw(args.case), run_case(draw(args.case)))
        return
    for what, count in sorted(run_campaign(args.seed, args.cases).items()):
        print(f"{count:6}  {what}")


if __name__ == "__main__":
    main()
