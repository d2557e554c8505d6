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

from tests.campaigns.crashes.campaign import Campaign, all_strikes, outside
from tests.campaigns.crashes.controllers import kill_controllers


def main() -> None:
    """Run the command line. What is wrong ends it."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.crashes")
    parser.add_argument("--seed", type=int, default=1, help="of the campaign (default: 1)")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no more rounds after that (default: 60)")
    parser.add_argument("--outside", type=int, default=100, help="strikes at random instants (default: 100)")
    parser.add_argument(
        "--part", default="1/1", help="which of how many parts of the rounds; 0/1 is none (default: 1/1)"
    )
    parser.add_argument("--controllers", type=int, default=25, help="kills of the controller (default: 25)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="c-") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        chance = random.Random(args.seed)
        if args.controllers:
            kill_controllers(chance, args.controllers, deadline, Path(folder))
        part, parts = map(int, args.part.split("/"))
        if part:
            asyncio.run(_rounds(random.Random(args.seed), args.outside, deadline, slice(part - 1, None, parts)))


async def _rounds(chance: random.Random, instants: int, deadline: float, part: slice) -> None:
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(folders=[Path("/dev/shm")])
        rounds = [*outside(chance, instants, 2.0), *all_strikes(chance, Path(folder) / "struck")]
        async with campaign:
            for what in rounds[part]:
                if time.monotonic() > deadline:
                    print("the time is over")
                    break
                await campaign.round(what)
        campaign.check_nothing_is_left()
    figures = campaign.figures
    for name, count in sorted(figures.rounds.items()):
        print(f"{count:6}  {name}")
    for deed, seconds in sorted(figures.to_error.items()):
        print(f"{seconds:8.3f} s at most to the error after {deed}")
    print(f"{figures.to_close:8.3f} s at most from there until the pipeline is closed")
    print(f"{figures.restart:8.3f} s at most to have workers again, with their stages")


if __name__ == "__main__":
    main()
