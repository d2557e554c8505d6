"""Options of the commands that lower a schedule (``schedule show``, ``simulate``), and texts about its graph.

Nothing here imports torch, so that these commands start quickly.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from asyncpipe.cli.arguments import count
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.errors import OptionError

__all__ = [
    "COSTS",
    "SCHEDULE_HELP",
    "STAGES_HELP",
    "add_step_arguments",
    "counted",
    "headline",
    "in_rows",
    "shape_of",
    "spelled",
]

SCHEDULE_HELP = "a schedule: one that 'asyncpipe schedule list' shows, module:Class or csv:FILE"
STAGES_HELP = "stages on all devices together"
COSTS: dict[str, Any] = {
    "default": "",
    "metavar": "F=1,I=1,W=1,C=0",
    "help": "virtual time of a forward, an input gradient, a weight gradient and a copy (default: as shown), of a full "
    "backward B (default: I + W), of a recomputation R (default: 1), and of an update U, and with --replicas of a "
    "reduction A and a gather G (default: 0)",
}
"""The option --costs, which ``parse_costs`` reads."""


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --microbatches, --virtual, --order, --checkpoint and those of replicas."""
    add = parser.add_argument
    add("--microbatches", type=count, required=True, metavar="M", help="micro-batches of the step")
    text = "pipelines with these stages and micro-batches each, whose gradients are added up (default: 1)"
    add("--replicas", type=count, default=1, metavar="R", help=text)
    add("--shard-optimizer", action="store_true", help="each replica updates a part, and parameters are gathered")
    text = "stages per device (default: the schedule's own number if that divides the stages, else 1)"
    add("--virtual", type=count, metavar="V", help=text)
    text = "strict: devices keep the schedule's order (default); hint: it only ranks ready tasks"
    add("--order", choices=["strict", "hint"], default="strict", help=text)
    text = "which micro-batches are recomputed before their backward: never (default), selective, always or except_last"
    add("--checkpoint", default="never", metavar="MODE", help=text)


def shape_of(schedule: Schedule, stages: int, microbatches: int, virtual: int | None) -> Shape:
    """The shape with ``stages`` stages in total, ``virtual`` of them on each device.

    The default of ``virtual`` is the schedule's own number if that divides the stages, else 1. Raises ``OptionError``
    if ``virtual`` does not divide them.
    """
    if virtual is None:
        virtual = schedule.virtual if schedule.virtual > 0 and stages % schedule.virtual == 0 else 1
    if stages % virtual:
        raise OptionError(f"--virtual must divide the number of stages, got {virtual} for {stages} stages")
    return Shape(stages, microbatches, stages // virtual)


def in_rows(
    shape: Shape, args: argparse.Namespace, wiring: Wiring | None = None, buckets: Sequence[int] = ()
) -> tuple[Shape, Wiring | None]:
    """The shape and the wiring of ``args.replicas`` pipelines, if there are several; by default with a bucket each."""
    rows: int = args.replicas
    if args.shard_optimizer and rows == 1:
        raise OptionError("--shard-optimizer shares the optimizer among replicas; give --replicas R with it")
    if rows > 1:
        chain = wiring or Wiring.chain(shape.stages)
        wiring = chain.in_rows(rows, buckets or [1] * shape.stages, shards=args.shard_optimizer)
    return Shape(shape.stages * rows, shape.microbatches * rows, shape.devices * rows), wiring


def headline(graph: TaskGraph, checkpoint: str) -> str:
    """A line about the graph: ``1f1b: 2 stages on 2 devices, 3 micro-batches, checkpoint never``."""
    rows = graph.rows
    [(_, shape), *_] = rows.shapes()
    replicas = f"{counted(len(rows), 'replica')} of " if len(rows) > 1 else ""
    mode = f"checkpoint {checkpoint}" if graph.training else "forward only"
    return (
        f"{graph.schedule}: {replicas}{counted(shape.stages, 'stage')} on {counted(shape.devices, 'device')}, "
        f"{counted(shape.microbatches, 'micro-batch')}, {mode}"
    )


def spelled(costs: Costs) -> str:
    """The costs as text: ``F=1 R=1 B=2 I=1 W=1 C=0``."""
    more = {"U": costs.update, "A": costs.reduce, "G": costs.gather}
    return (
        f"F={costs.forward:g} R={costs.recompute:g} B={costs.full_backward:g} "
        f"I={costs.input_gradient:g} W={costs.weight_gradient:g} C={costs.copy:g}"
    ) + "".join(f" {kind}={cost:g}" for kind, cost in more.items() if cost)


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``1 stage``, ``2 micro-batches``."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{count} {noun if count == 1 else plural}"
