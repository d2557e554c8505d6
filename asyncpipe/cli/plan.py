"""``asyncpipe plan``: which pipeline of a job's model is the fastest that fits."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.profile import add_measuring, default_counts, measured, ticker
from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.predict.layer_profile import ADAMW_SCALE, Profile
from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.core.predict.planner import Plan, best_of_each, plan
from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.train.job_file import Job

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser"]

DESCRIPTION = """\
Try schedules, balances, numbers of micro-batches and recomputation modes, on paper: each is simulated with the
measured costs of the job's layers. Prints the ten fastest that fit, one line for the best balance of each, and what
to write into the job file to have the first.

Without --profile the model is measured first, in real training steps on the job's devices. Memory counts weights,
gradients, AdamW's averages and what micro-batches keep for their backwards.
"""

EPILOG = """\
examples:
  asyncpipe plan examples/charlm/charlm.toml
  asyncpipe plan examples/charlm/charlm.toml --memory-limit 8GiB --checkpoint never,except_last
  asyncpipe plan examples/charlm/charlm.toml --profile charlm-profile.json --schedules 1f1b,gpipe --json
"""

SHOWN = 10

_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("kmgt", 1)
    for unit, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def add_parser(subparsers: Subparsers) -> None:
    """Add ``plan`` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="find the fastest pipeline for a job's model",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", metavar="JOB.toml", type=Path, help="the job file")
    parser.add_argument("--profile", type=Path, metavar="FILE.json", help="costs that 'asyncpipe profile' has written")
    parser.add_argument("--memory-limit", type=_bytes, metavar="8GiB", help="what each device has, as 8GiB or 500MB")
    add_measuring(parser)
    parser.add_argument(
        "--schedules", type=_names, metavar="A,B", help="schedules to try (default: all that are known)"
    )
    parser.add_argument(
        "--checkpoint", type=_modes, default=list(CheckpointMode), metavar="A,B", help="modes (default: all three)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=_plan)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _modes(text: str) -> list[CheckpointMode]:
    try:
        return [CheckpointMode.parse(name) for name in _names(text)]
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise argparse.ArgumentTypeError(f"must be a number of bytes, as 8GiB, 500MB or 1000000, got {text!r}")
    return round(float(found[1]) * _UNITS[found[2]])


def _plan(args: argparse.Namespace) -> int:
    from asyncpipe.train.job_file import load_job

    job = load_job(args.job)
    show = ticker(sys.stderr)
    try:
        plans = plan(
            _profile(job, args),
            len(job.pipeline.devices),
            schedules=args.schedules,
            microbatches=args.microbatches,
            checkpoints=args.checkpoint,
            memory_limit=args.memory_limit,
            parameter_scale=ADAMW_SCALE,
            progress=show,
        )
    finally:
        show("")
    best = best_of_each(plans)[:SHOWN]
    if args.json:
        print(json.dumps({"job": job.name, "devices": job.pipeline.devices, "plans": [_row(each) for each in best]}))
    else:
        print(_table(best) + f"\n\nthe first, in {args.job}:\n\n{_toml(best[0])}")
    return 0


def _profile(job: Job, args: argparse.Namespace) -> Profile:
    if args.profile is not None:
        return Profile.read(args.profile)
    return measured(job, args.microbatches or default_counts(job), args.steps)


def _row(each: Plan) -> dict[str, Any]:
    return {**each.options(), "seconds": each.seconds, "bubble": each.bubble, "memory": list(each.memory)}


def _table(plans: Sequence[Plan]) -> str:
    """One line a plan, the columns as wide as need be."""
    head = ("schedule", "balance", "micro-batches", "checkpoint", "step", "bubble", "memory per device")
    rows = [
        (
            each.schedule,
            "-".join(map(str, each.balance)),
            str(each.microbatches),
            each.checkpoint.value,
            f"{each.seconds * 1e3:.1f} ms",
            f"{each.bubble:.1%}",
            ", ".join(map(format_bytes, each.memory)),
        )
        for each in plans
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def _toml(best: Plan) -> str:
    """The lines of ``[pipeline]`` that choose a plan."""
    options = best.options()
    return "\n".join(["[pipeline]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())])
