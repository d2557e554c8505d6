"""A job on other devices than it names, since some are gone: split anew where that changes no bit, else only moved.

::

    cpu:0  cpu:1  cpu:2  cpu:3        devices of the job; that of cpu:2 is gone
    [0 1]  [2 3]  [4 5]  [6 7]        its layers
    [0 1 2]  [3 4]       [5 6 7]      split anew: the planner's balance, by what the steps before have cost
    [0 1]  [2 3]         [6 7] [4 5]  moved: the stages stay as they are, and a device that is left has two of them

What a stage draws follows from its number, and the gradients of parameters that layers share are added in an order that
follows from the cut. So such models are moved. Both ways have the bits of a run to which nothing happened.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from torch import nn

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.predict.balance import even_balance
from asyncpipe.core.predict.profile_from_journals import MeasuredStep
from asyncpipe.core.predict.split_anew import plan_anew, same_sums
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.errors import AsyncpipeError
from asyncpipe.ops.model.sequential import PipeSequential
from asyncpipe.ops.model.skips import Skippable
from asyncpipe.train.job_file import Job

__all__ = ["NotSplit", "StepCosts", "moved", "shrunk", "split_anew"]

MEASURED = 3
"""The last steps of a run that count."""


class NotSplit(Exception):
    """Why a job is not split anew: it could get other bits, or cannot run so."""


@dataclass(eq=False)
class StepCosts:
    """An observer that keeps the last steps of one run, and whether its stages draw random numbers."""

    balance: str | Sequence[int] = "auto"
    """Of the run."""
    steps: deque[MeasuredStep] = field(default_factory=lambda: deque(maxlen=MEASURED))
    draws: bool = False

    def step_completed(self, record: StepRecord) -> None:
        """Keep a training step that has succeeded."""
        if record.outcome is Outcome.OK and record.graph.training:
            self.draws = self.draws or bool(record.notes.drew)
            self.steps.append(MeasuredStep(0.0, record))


def moved(job: Job, gone: Collection[str], others: Sequence[str] = ()) -> Job:
    """The job with the stages that it has, those of the devices ``gone`` on devices that are left.

    Each goes to one of the job's own devices or of ``others`` that has the fewest, those first that have none. Raises
    ``NotSplit`` if none is left.
    """
    devices = job.pipeline.devices
    left = [device for device in dict.fromkeys([*devices, *others]) if device not in gone]
    if not left:
        raise NotSplit("no device is left")
    load = Counter(device for device in devices if device in left)
    placed: list[str] = []
    for device in devices:
        if device not in left:
            device = min(left, key=lambda each: load[each])
            load[device] += 1
        placed.append(device)
    return job.override("pipeline", devices=tuple(placed))


def shrunk(job: Job, gone: AbstractSet[str]) -> Job:
    """The job with those of its replicas whose devices are all left; they take the micro-batches of the others.

    Raises ``NotSplit`` if none is left whole.
    """
    table = job.pipeline
    count = len(table.devices) // table.replicas
    rows = [table.devices[first : first + count] for first in range(0, len(table.devices), count)]
    left = [row for row in rows if gone.isdisjoint(row)]
    if not left:
        raise NotSplit("no replica is left whole")
    total = table.total_microbatches or table.microbatches * table.replicas
    return job.override("pipeline", devices=sum(left, ()), replicas=len(left), total_microbatches=total)


def split_anew(job: Job, model: object, gone: Collection[str], costs: StepCosts, schedule: Schedule) -> Job:
    """The job on those of its devices that are not ``gone``, with the planner's balance.

    ``costs`` are those of its steps so far, ``schedule`` its schedule. Raises ``NotSplit`` with the reason if the
    numbers could differ in a bit from those of the stages as they are, or it cannot be done.
    """
    table = job.pipeline
    left = tuple(device for device in table.devices if device not in gone)
    steps = list(costs.steps)
    if not steps:
        raise NotSplit("no step of it was measured")
    before = steps[-1].record.graph
    layers = _layers(model)
    if costs.draws:
        raise NotSplit("its stages draw random numbers, which follow from their number")
    if table.stages is not None:
        raise NotSplit(f"it asks for {table.stages} stages")
    if table.replicas > 1:
        raise NotSplit("it has replicas")
    if isinstance(table.offload, tuple):
        raise NotSplit("it says what each of its stages offloads")
    weights = [1.0 + sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    stages = before.shape.stages
    try:
        balance = even_balance(weights, stages) if isinstance(costs.balance, str) else costs.balance
        plan = plan_anew(steps, balance, weights, len(left), schedule, table.checkpoint)
        shape = Shape(len(plan.balance), table.microbatches, len(left))
        after = lower(schedule, shape, checkpoint=table.checkpoint, wiring=Wiring.chain(shape.stages))
    except AsyncpipeError as error:
        raise NotSplit(str(error)) from error
    if not same_sums(before, after):
        raise NotSplit(f"the schedule {table.schedule} adds gradients in an order that follows from the stages")
    return job.override("pipeline", devices=left, balance=plan.balance)


def _layers(model: object) -> list[nn.Module]:
    """Raises ``NotSplit`` unless the model is a mere chain of layers that share nothing."""
    if isinstance(model, PipeSequential) or not isinstance(model, nn.Sequential | list | tuple):
        raise NotSplit(f"it is no mere sequence of layers ({type(model).__name__})")
    layers = list(model)
    users = Counter(id(tensor) for layer in layers for tensor in {*layer.parameters(), *layer.buffers()})
    if any(count > 1 for count in users.values()):
        raise NotSplit("layers share parameters, whose gradients are added in an order that follows from the stages")
    if any(isinstance(module, Skippable) for layer in layers for module in layer.modules()):
        raise NotSplit("values skip layers, and their gradients are added in an order that follows from the stages")
    return layers
