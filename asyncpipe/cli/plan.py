"""Find the fastest pipeline for a job's model that fits into memory.

Simulate schedules, balances, numbers of micro-batches and recomputation modes with the measured costs of the job's
layers. Prints the ten fastest that fit, each with its best balance, as comments, and the [pipeline] table that chooses
the first: a file with this output is what 'asyncpipe train JOB.toml --plan FILE' takes. A traced model's layers are the
stages that it was cut into, which plans join; a transformers model's are its own layers.

Devices are shared by replicas of the pipeline, each with its micro-batches: a mini-batch has as many micro-batches as
all of them together. Sharded replicas keep a part of the optimizer's state each, which needs overlap = true.

If the job overlaps its steps, what counts is how soon one follows the other.

With --topology the stages are placed on several hosts: on all devices that the file lists, host by host, the hosts in
the order in which a message passes all of them soonest, more layers to faster devices, and messages take the time that
the links say. The layers are those of a device of speed 1, as they are measured here. The plan shows what each device
has, and the share of the step in which it waits for links. The printed table has workers = "ray" unless the job says
"torchrun"; such a job has overlap = true.

Without --profile the model is measured first, in real training steps on the job's devices. Memory counts weights,
gradients, AdamW's averages and what micro-batches keep for their backwards.

examples:
  asyncpipe plan examples/charlm/charlm.toml
  asyncpipe plan examples/charlm/charlm.toml > plan.toml && asyncpipe train examples/charlm/charlm.toml --plan plan.toml
  asyncpipe plan examples/charlm/charlm.toml --memory-limit 8GiB --checkpoint never,except_last
  asyncpipe plan examples/charlm/charlm.toml --profile charlm-profile.json --schedules 1f1b,gpipe --json
  asyncpipe plan examples/charlm/charlm.toml --profile charlm-profile.json --topology hosts.toml

a file for --topology (latency in seconds, bandwidth in bytes per second):
  [link]                             # between any two hosts; [[links]] with hosts = ["a", "b"] for a pair of them
  latency = 2e-4
  bandwidth = 1.25e9

  [[hosts]]
  name = "host-a"
  devices = ["cuda:0", "cuda:1"]
  speeds = [1.0, 0.5]                # the second takes twice as long; by default all are 1
  inside = {bandwidth = 2e10}        # between its devices; by default messages there take no time

  [[hosts]]
  name = "host-b"
  devices = ["cuda:0"]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import add_command, counts, names
from asyncpipe.cli.profile import add_measuring, measured
from asyncpipe.cli.progress import show_phases
from asyncpipe.cli.tables import columns, table
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.predict.layer_profile import ADAMW_SCALE
from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.core.predict.planner import Placing, Plan, best_of_each, plan
from asyncpipe.core.predict.topology import Topology
from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.train.job_file import Job

__all__ = ["add_parser"]

SHOWN = 10
ON_HOSTS = ("ray", "torchrun")
"""What starts workers on hosts, in a job file."""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``plan`` to the command line."""
    parser = add_command(subparsers, "plan", __doc__)
    add = parser.add_argument
    add("job", metavar="JOB.toml", type=Path, help="the job file")
    add("--profile", type=Path, metavar="FILE.json", help="costs that 'asyncpipe profile' has written")
    add("--memory-limit", type=_bytes, metavar="8GiB", help="memory of each device, as 8GiB or 500MB")
    text = "plans above the limit may offload activations to the host's memory"
    add("--offload", action="store_true", help=text)
    add("--topology", type=Path, metavar="FILE.toml", help="hosts, devices and links to place it on")
    add_measuring(parser)
    add("--schedules", type=names, metavar="A,B", help="schedules to try (default: all that are known)")
    add("--replicas", type=counts, metavar="1,2,4", help="numbers of replicas to try (default: those that fit)")
    add("--checkpoint", type=_modes, default=list(CheckpointMode), metavar="A,B", help="modes (default: all three)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=_plan)


def _modes(text: str) -> list[CheckpointMode]:
    try:
        return [CheckpointMode.parse(name) for name in names(text)]
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bytes(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        if number := int(TypeAdapter(ByteSize).validate_python(text)):
            return number
    except ValidationError:
        pass
    raise argparse.ArgumentTypeError(f"must be a number of bytes, as 8GiB, 500MB or 1000000, got {text!r}")


def _plan(args: argparse.Namespace) -> int:
    from asyncpipe.cli.prediction_files import read_profile, read_topology
    from asyncpipe.train.job_file import load_job

    job = load_job(args.job)
    topology = None if args.topology is None else read_topology(args.topology)
    devices = job.pipeline.devices if topology is None else list(topology.devices)
    with show_phases(sys.stderr) as show:
        profile = measured(job, args, show) if args.profile is None else read_profile(args.profile)
        plans = plan(
            profile,
            len(devices),
            schedules=args.schedules,
            microbatches=args.microbatches,
            checkpoints=args.checkpoint,
            memory_limit=args.memory_limit,
            parameter_scale=ADAMW_SCALE,
            ahead=int(job.training.overlap),
            topology=topology,
            offload=args.offload,
            replicas=args.replicas or [each for each in range(1, len(devices) + 1) if len(devices) % each == 0],
            shards=[False, True] if job.training.overlap else [False],
            progress=show,
        )
    best = best_of_each(plans)[:SHOWN]
    if args.json:
        print(json.dumps({"job": job.name, "devices": devices, "plans": [_row(each) for each in best]}))
        return 0
    told = [columns(_COLUMNS, best, numbers=("replicas", "micro-batches", "step", "bubble"))]
    if topology is not None and best[0].placing is not None:
        told.append(_placement(best[0], best[0].placing, topology))
    # The whole output is TOML, which train reads.
    print(*(f"# {line}".rstrip() for text in told for line in (*text.splitlines(), "")), sep="\n")
    print(f"# the first, for {args.job}:\n\n{_toml(job, best[0])}")
    return 0


def _row(each: Plan) -> dict[str, Any]:
    row = {**each.options(), "seconds": each.seconds, "bubble": each.bubble, "memory": list(each.memory)}
    if each.placing is not None:
        row |= {"stages": list(each.placing.stages), "link_waits": list(each.placing.waits)}
    return row


def _placement(each: Plan, placing: Placing, topology: Topology) -> str:
    """A row for each device: its host, its stages and layers, how long it waits for links, and the way to the next."""
    speeds, rows, routes = topology.speeds, [], []
    for device, following in pairwise(placing.devices):
        link = topology.route(device, following).link
        speed = "" if link.bandwidth == inf else f", {link.bandwidth / 1e6:,.0f} MB/s"
        routes.append(f"{link.latency * 1e3:g} ms{speed}")
    for number, (device, route) in enumerate(zip(placing.devices, [*routes, ""], strict=True)):
        stages = [stage for stage, at in enumerate(placing.stages) if at == number]
        layers = [each.balance[stage % len(each.balance)] for stage in stages]
        shown = (" ".join(map(str, values)) for values in (stages, layers))
        rows.append((device, f"{speeds[device]:g}", *shown, f"{placing.waits[number]:.1%}", route))
    head = ("device", "speed", "stages", "layers", "waits for links", "to the next")
    lines = table(head, rows, numbers=("speed", "waits for links"))
    waits = sum(placing.waits) / len(placing.waits)
    summary = f"step {each.seconds * 1e3:.1f} ms, {waits:.1%} of it waiting for links (mean of the devices)"
    return f"the first, device by device:\n\n{lines}\n\n{summary}"


_COLUMNS: dict[str, Callable[[Plan], str]] = {
    "replicas": lambda plan: f"{plan.replicas}{' sharded' if plan.shards else ''}",
    "schedule": lambda plan: plan.schedule,
    "balance": lambda plan: "-".join(map(str, plan.balance)),
    "micro-batches": lambda plan: str(plan.microbatches),
    "checkpoint": lambda plan: plan.checkpoint.value,
    "offload": lambda plan: " ".join(f"{part:.0%}" for part in plan.offload) or "-",
    "step": lambda plan: f"{plan.seconds * 1e3:.1f} ms",
    "bubble": lambda plan: f"{plan.bubble:.1%}",
    "memory per device": lambda plan: ", ".join(map(format_bytes, plan.memory)),
}


def _toml(job: Job, best: Plan) -> str:
    """The ``[pipeline]`` table that chooses the plan; it takes the place of the job's."""
    workers: object = job.pipeline.workers
    if best.placing is not None and workers not in ON_HOSTS:
        workers = ON_HOSTS[0]
    # What a plan does not say stays as the job says it.
    own = {"replicas": 1, "shard_optimizer": False} if job.pipeline.replicas > 1 else {}
    options = {"devices": job.pipeline.devices, **own, **best.options()}
    if workers != "threads" and isinstance(workers, str):
        options |= {"workers": workers}
    return "\n".join(["[pipeline]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())])
