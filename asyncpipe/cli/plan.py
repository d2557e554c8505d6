"""``asyncpipe plan``: find the fastest pipeline for a job's model that fits into memory."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import add_command
from asyncpipe.cli.profile import add_measuring, measured
from asyncpipe.cli.progress import show_phases
from asyncpipe.cli.tables import table
from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.predict.layer_profile import ADAMW_SCALE, Profile
from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.core.predict.planner import Plan, best_of_each, plan
from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.train.job_file import Job

__all__ = ["add_parser"]

DESCRIPTION = """\
Simulate schedules, balances, numbers of micro-batches and recomputation modes with the measured costs of the job's
layers. Prints the ten fastest that fit, each with its best balance, and the [pipeline] table of the job file that
chooses the first. A traced model's layers are the stages that it was cut into, which plans join.

If the job overlaps its steps, what counts is how soon one follows the other.

Without --profile the model is measured first, in real training steps on the job's devices. Memory counts weights,
gradients, AdamW's averages and what micro-batches keep for their backwards.
"""

EXAMPLES = """\
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
    parser = add_command(
        subparsers,
        "plan",
        summary="find the fastest pipeline for a job's model",
        description=DESCRIPTION,
        examples=EXAMPLES,
    )
    parser.add_argument("job", metavar="JOB.toml", type=Path, help="the job file")
    parser.add_argument("--profile", type=Path, metavar="FILE.json", help="costs that 'asyncpipe profile' has written")
    parser.add_argument("--memory-limit", type=_bytes, metavar="8GiB", help="memory of each device, as 8GiB or 500MB")
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
    with show_phases(sys.stderr) as show:
        profile = measured(job, args, show) if args.profile is None else Profile.read(args.profile)
        plans = plan(
            profile,
            len(job.pipeline.devices),
            schedules=args.schedules,
            microbatches=args.microbatches,
            checkpoints=args.checkpoint,
            memory_limit=args.memory_limit,
            parameter_scale=ADAMW_SCALE,
            ahead=int(job.training.overlap),
            progress=show,
        )
    best = best_of_each(plans)[:SHOWN]
    if args.json:
        print(json.dumps({"job": job.name, "devices": job.pipeline.devices, "plans": [_row(each) for each in best]}))
    else:
        print(f"{_table(best)}\n\nthe first, in {args.job}:\n\n{_toml(job, best[0])}")
    return 0


def _row(each: Plan) -> dict[str, Any]:
    return {**each.options(), "seconds": each.seconds, "bubble": each.bubble, "memory": list(each.memory)}


def _table(plans: list[Plan]) -> str:
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
    head = ("schedule", "balance", "micro-batches", "checkpoint", "step", "bubble", "memory per device")
    return table(head, rows, numbers=("micro-batches", "step", "bubble"))


def _toml(job: Job, best: Plan) -> str:
    """The ``[pipeline]`` table that chooses the plan; it takes the place of the job's."""
    options = {"devices": job.pipeline.devices, **best.options()}
    return "\n".join(["[pipeline]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())])
