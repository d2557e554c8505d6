"""``python -m tests.campaigns.architectures``: run the campaign, a part of it, or its cases of padding."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from tests.campaigns.architectures import padding, zoo_diffusers, zoo_transformers, zoo_vision
from tests.campaigns.architectures.architecture import ZOO
from tests.campaigns.architectures.judge import CELLS, Header, judge
from tests.campaigns.architectures.processes import judged
from tests.campaigns.architectures.report import findings, load, save, table

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
    add("--figures", type=Path, metavar="FILE", help="add the figures to those in FILE, and show all of them")
    add("--missing", action="store_true", help="only architectures that are not in FILE yet")
    add("--cases", type=int, default=200, help="of padding (default: 200)")
    add("--seed", type=int, default=1, help="of padding (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * args.minutes
    if args.what == "padding":
        return padding.run(args.seed, args.cases, until, args.only and args.only.split(","))
    figures = load(args.figures) if args.figures else {}
    cells = CELLS if args.cell is None else [tuple(args.cell.split(","))]
    names = args.only.split(",") if args.only else list(ZOO)
    for name in names:
        if time.monotonic() > until or (args.missing and name in figures):
            continue
        lines = list(judge(ZOO[name], cells)) if args.here else judged(ZOO[name], args.seconds, cells)
        for line in lines:
            print(f"{name}: {line}", file=sys.stderr, flush=True)
        if args.cell is None or name not in figures:
            figures[name] = lines
        else:
            done = [line for line in lines if not isinstance(line, Header)]
            figures[name] = [line for line in figures[name] if line[:2] not in [cell[:2] for cell in done]] + done
        if args.figures:
            save(args.figures, figures)
    print(table(figures))
    return int(any(findings(lines) for lines in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
