"""``python -m tests.campaigns.architectures``: run the campaign, a part of it, or its cases of padding."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch

from tests.campaigns.architectures import padding, zoo_diffusers, zoo_transformers, zoo_vision
from tests.campaigns.architectures.architecture import ZOO
from tests.campaigns.architectures.judge import CELLS, Cell, findings, judge, judged

assert zoo_diffusers, zoo_transformers
assert zoo_vision


def main() -> int:
    """Run the command line; 1 if something was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.architectures",
        description="Real architectures as pipelines, against the same models unsplit.",
    )
    add = parser.add_argument
    add("what", nargs="?", choices=("table", "padding"), default="table", help="what to run (default: %(default)s)")
    add("--only", metavar="NAMES", help=f"these architectures, of {', '.join(ZOO)}")
    add("--cell", metavar="SCHEDULE,CHECKPOINT", help="this cell alone, as in zb-h1,never")
    add("--here", action="store_true", help="in this process, for a debugger")
    add("--seconds", type=float, default=300.0, help="for each architecture at most (default: 300)")
    add("--minutes", type=float, default=60.0, help="begin nothing more after that (default: 60)")
    add("--cases", type=int, default=200, help="of padding (default: 200)")
    add("--seed", type=int, default=1, help="of padding (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * args.minutes
    if args.what == "padding":
        return padding.run(args.seed, args.cases, until, args.only and args.only.split(","))
    cells = CELLS if args.cell is None else [tuple(args.cell.split(","))]
    outcomes: Counter[str] = Counter()
    found: list[tuple[str, Cell]] = []
    for name in args.only.split(",") if args.only else list(ZOO):
        if time.monotonic() > until:
            break
        lines = list(judge(ZOO[name], cells)) if args.here else judged(ZOO[name], args.seconds, cells)
        print(*(f"{name}: {line}" for line in lines), sep="\n", flush=True)
        outcomes.update(line.outcome for line in lines if isinstance(line, Cell))
        found += [(name, cell) for cell in findings(lines)]
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    for name, cell in found:
        print(f"found: {name}, {cell}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
