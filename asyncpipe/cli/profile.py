"""Measure the costs of a job's model.

Measure what the layers of a job's model cost, in real training steps on the job's devices: seconds of a forward, of
a backward and its halves and of a recomputation, bytes saved for the backward, bytes sent to the next layer, and
parameters. Also measures the overhead of a task and of a step, and the transfer between two devices.

Nothing is trained: copies of the model run, each number of micro-batches for a few steps. 'asyncpipe plan' and
'asyncpipe simulate' read the file.

examples:
  asyncpipe profile examples/charlm/charlm.toml
  asyncpipe profile examples/charlm/charlm.toml --microbatches 4,8,16 --output charlm-profile.json
  asyncpipe plan examples/charlm/charlm.toml --profile charlm-profile.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpipe.cli.arguments import add_command, count, counts
from asyncpipe.cli.progress import show_phases
from asyncpipe.cli.tables import table
from asyncpipe.core.predict.layer_profile import Profile

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.train.job_file import Job

__all__ = ["add_measuring", "add_parser", "measured"]

STEPS = 5
HEAD = ("layer", "F", "R", "B", "I", "W", "kept", "sent", "weights")


def add_parser(subparsers: Subparsers) -> None:
    """Add ``profile`` to the command line."""
    parser = add_command(subparsers, "profile", __doc__)
    parser.add_argument("job", metavar="JOB.toml", type=Path, help="the job file")
    add_measuring(parser)
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the profile to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=_profile)


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add --microbatches and --steps, which ``measured`` reads."""
    text = "numbers of micro-batches, of all replicas together (default: the job's, half and twice as many)"
    parser.add_argument("--microbatches", type=counts, metavar="4,8,16", help=text)
    text = f"measured steps of each mode (default: {STEPS})"
    parser.add_argument("--steps", type=count, default=STEPS, metavar="N", help=text)


def measured(job: Job, args: argparse.Namespace, progress: Callable[[str], None]) -> Profile:
    """The profile of the job's model, measured now."""
    from asyncpipe.train.entry import find_entry
    from asyncpipe.train.planning import measure_job

    number = job.pipeline.microbatches * job.pipeline.replicas
    wanted = args.microbatches or sorted(
        {min(each, job.training.batch_size) for each in (max(1, number // 2), number, 2 * number)}
    )
    return measure_job(job, find_entry(job)(), wanted, steps=args.steps, progress=progress)


def _profile(args: argparse.Namespace) -> int:
    from asyncpipe.cli.prediction_files import profile_document, write_profile
    from asyncpipe.train.job_file import load_job

    job = load_job(args.job)
    with show_phases(sys.stderr) as show:
        profile = measured(job, args, show)
    if args.output is not None:
        write_profile(profile, args.output)
    if args.json:
        print(json.dumps(profile_document(profile)))
        return 0
    for number in profile.measured:
        print(_table(profile, number) + "\n")
    if args.output is not None:
        print(f"profile: {args.output}")
    return 0


def _table(profile: Profile, microbatches: int) -> str:
    """A row for each layer, and one for the overhead of each task."""
    found = profile.measurement(microbatches)
    rows = []
    kept = profile.memory([1] * len(profile.layers), microbatches).saved
    for number, (layer, costs, held) in enumerate(zip(profile.layers, found.layers, kept, strict=True)):
        seconds = (costs.forward, costs.recompute, costs.backward, costs.input_gradient, costs.weight_gradient)
        sent = sum(tensor.size for tensor in found.sent if tensor.source == number)
        sizes = (held, sent, layer.parameters)
        rows.append(
            [layer.name, *(f"{1e3 * each:.3f}" for each in seconds), *(f"{each / 1024:,.1f}" for each in sizes)]
        )
    rows.append(["each task", *(f"{1e3 * each:.3f}" for each in found.overhead.values()), "", "", ""])
    speed = "" if found.bandwidth == float("inf") else f", {found.bandwidth / 2**30:.1f} GiB/s"
    return "\n".join(
        [
            f"{microbatches} micro-batches, each in ms and KiB",
            table(HEAD, rows, numbers=HEAD[1:]),
            f"overhead of a step {1e3 * found.step:.3f} ms; to another device {1e3 * found.latency:.3f} ms{speed}",
        ]
    )
