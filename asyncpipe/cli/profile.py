"""``asyncpipe profile``: measure what the layers of a job's model cost in a pipeline."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from asyncpipe.cli.arguments import count, counts
from asyncpipe.core.predict.layer_profile import Profile

if TYPE_CHECKING:
    from asyncpipe.train.job_file import Job

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "default_counts", "measured", "ticker"]

DESCRIPTION = """\
Measure what the layers of a job's model cost, in real training steps on the job's devices: seconds of a forward, of
a backward and its halves, of a recomputation, bytes saved for the backward, bytes sent on, parameters; and what a
task, a step and the way between two devices cost beside them.

Nothing is trained: copies of the model run, each number of micro-batches for a few steps. 'asyncpipe plan' and
'asyncpipe simulate' take the file.
"""

EPILOG = """\
examples:
  asyncpipe profile examples/charlm/charlm.toml
  asyncpipe profile examples/charlm/charlm.toml --microbatches 4,8,16 --output charlm-profile.json
  asyncpipe plan examples/charlm/charlm.toml --profile charlm-profile.json
"""

STEPS = 5


def add_parser(subparsers: Subparsers) -> None:
    """Add ``profile`` to the command line."""
    parser = subparsers.add_parser(
        "profile",
        help="measure the costs of a job's model",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", metavar="JOB.toml", type=Path, help="the job file")
    add_measuring(parser)
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the profile there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=_profile)


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is measured."""
    parser.add_argument(
        "--microbatches",
        type=counts,
        metavar="4,8,16",
        help="numbers of micro-batches (default: the job's, half and twice as many)",
    )
    parser.add_argument(
        "--steps", type=count, default=STEPS, metavar="N", help=f"measured steps of each mode (default: {STEPS})"
    )


def default_counts(job: Job) -> list[int]:
    """The job's number of micro-batches, half and twice as many, as far as its mini-batch has the samples."""
    number = job.pipeline.microbatches
    wanted = {max(1, number // 2), number, 2 * number}
    return sorted({min(each, job.training.batch_size) for each in wanted})


def measured(job: Job, microbatches: Sequence[int], steps: int) -> Profile:
    """The profile of the job's model, measured now; standard error says what is being done."""
    from asyncpipe.train.entry import find_entry
    from asyncpipe.train.planning import measure_job

    workload = find_entry(job)()
    with_line = ticker(sys.stderr)
    try:
        return measure_job(job, workload, microbatches, steps=steps, progress=with_line)
    finally:
        with_line("")


def ticker(out: TextIO) -> Callable[[str], None]:
    """Shows what is being done: on a terminal in one line, which an empty text clears; else a line for each phase."""
    last = ""

    def show(text: str) -> None:
        nonlocal last
        if out.isatty():
            out.write(f"\r\x1b[K… {text}" if text else "\r\x1b[K")
            out.flush()
        elif text and text.split()[0] != last:
            last = text.split()[0]
            print(f"… {text}", file=out, flush=True)

    return show


def _profile(args: argparse.Namespace) -> int:
    from asyncpipe.train.job_file import load_job

    job = load_job(args.job)
    profile = measured(job, args.microbatches or default_counts(job), args.steps)
    if args.output is not None:
        profile.write(args.output)
    if args.json:
        print(json.dumps(profile.document()))
        return 0
    for number in profile.measured:
        print(_table(profile, number) + "\n")
    if args.output is not None:
        print(f"profile: {args.output}")
    return 0


def _table(profile: Profile, microbatches: int) -> str:
    """One line a layer, with what is beside the layers below."""
    found = profile.measurement(microbatches)
    width = max(5, *(len(layer.name) for layer in profile.layers))
    lines = [
        f"{microbatches} micro-batches, each in ms and KiB",
        f"{'layer':{width}} {'F':>9} {'R':>9} {'B':>9} {'I':>9} {'W':>9} {'saved':>10} {'sent':>10} {'weights':>10}",
    ]
    for layer, costs in zip(profile.layers, found.layers, strict=True):
        seconds = (costs.forward, costs.recompute, costs.backward, costs.input_gradient, costs.weight_gradient)
        sizes = (costs.saved + costs.saved_input, costs.output, layer.parameters)
        cells = [f"{1e3 * each:9.3f}" for each in seconds] + [f"{each / 1024:10,.1f}" for each in sizes]
        lines.append(f"{layer.name:{width}} {' '.join(cells)}")
    beside = " ".join(f"{1e3 * each:9.3f}" for each in found.overhead.values())
    speed = "" if found.bandwidth == float("inf") else f", {found.bandwidth / 2**30:.1f} GiB/s"
    lines.append(f"{'task':{width}} {beside}   beside the layers, each task")
    lines.append(
        f"a step {1e3 * found.step:.3f} ms beside its tasks; to another device {1e3 * found.latency:.3f} ms{speed}"
    )
    return "\n".join(lines)
