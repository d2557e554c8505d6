"""``python -m tests.campaigns.crashes --seed 1 --minutes 60``: run the campaign."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from tests.campaigns.crashes.campaign import LATEST, Campaign, Figures, all_strikes, at_start, outside
from tests.campaigns.crashes.controllers import kill_controllers


def main() -> None:
    """Run the command line. What is wrong ends it."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.crashes")
    add = parser.add_argument
    add("--seed", type=int, default=1, help="of the campaign (default: 1)")
    add("--minutes", type=float, default=60.0, help="begin nothing more after that (default: 60)")
    add("--outside", type=int, default=100, help="strikes at random instants (default: 100)")
    add("--controllers", type=int, default=25, help="kills of the controller (default: 25)")
    add("--latest", type=float, default=LATEST, help="seconds that an error may be late (default: %(default)g)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="c-") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        if args.controllers:
            kill_controllers(random.Random(args.seed), args.controllers, deadline, Path(folder))
        print(asyncio.run(_rounds(random.Random(args.seed), args.outside, deadline, args.latest)))


async def _rounds(chance: random.Random, instants: int, deadline: float, latest: float) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(folders=[Path("/dev/shm")], latest=latest)
        note = Path(folder) / "struck"
        rounds = [*outside(chance, instants, 2.0), *at_start(chance, 1.5), *all_strikes(chance, note)]
        async with campaign:
            for what in rounds:
                if time.monotonic() > deadline:
                    print("the time is over")
                    break
                await campaign.round(what)
            await campaign.round(None)  # The job goes on after the last one, too.
        campaign.check_nothing_is_left()
    return campaign.figures


if __name__ == "__main__":
    main()
