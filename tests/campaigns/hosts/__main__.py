"""``python -m tests.campaigns.hosts --seed 1 --minutes 60``: run the campaign."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from tests.campaigns.hosts.campaign import DEEDS, LATEST, Campaign, Figures, all_rounds


def main() -> None:
    """Run the command line. What is wrong ends it."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.hosts")
    add = parser.add_argument
    add("--seed", type=int, default=1, help="of the campaign (default: 1)")
    add("--minutes", type=float, default=60.0, help="begin nothing more after that (default: 60)")
    add("--instants", type=int, default=100, help="losses at random instants (default: 100)")
    add("--deeds", default=",".join(DEEDS), help="how hosts are lost (default: %(default)s)")
    add("--models", default="split,moved", help="the model that is split anew, and the one that draws (default: both)")
    add("--schedules", default="1f1b,zb-h1", help="which schedules (default: %(default)s)")
    add("--latest", type=float, default=LATEST, help="seconds to the first step behind a loss (default: %(default)g)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    deadline, chance = time.monotonic() + 60 * args.minutes, random.Random(args.seed)
    deeds, figures = args.deeds.split(","), Figures()
    # Split anew and moved; backwards whole and split in two halves.
    with tempfile.TemporaryDirectory(prefix="h-") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        for draws, schedule in product((False, True), ("1f1b", "zb-h1")):
            rounds = all_rounds(chance, deeds, args.instants // 4, schedule)
            model = "moved" if draws else "split"
            if schedule not in args.schedules.split(",") or model not in args.models.split(","):
                continue
            if time.monotonic() > deadline:
                print(f"no time for the model that is {model}, with {schedule}")
                continue
            own = Path(folder, f"{schedule}-{model}")
            own.mkdir()
            campaign = Campaign(rounds, own, schedule=schedule, draws=draws, deadline=deadline, latest=args.latest)
            asyncio.run(campaign.run())
            figures.add(campaign.figures)
    print(figures)


if __name__ == "__main__":
    main()
