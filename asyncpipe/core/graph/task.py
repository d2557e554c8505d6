"""Tasks: the nodes of a task graph, and the lanes that they run on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from asyncpipe.core.kinds import TaskKind

__all__ = ["WHOLE_STEP", "Lane", "Queue", "Task"]

WHOLE_STEP = -1
"""The ``microbatch`` of tasks that a step has once: updates, sums and copies of tied parameters."""


class Queue(StrEnum):
    """The queues of a device.

    Activations and gradients arrive in separate queues, so that the copy of a gradient, which a backward waits for,
    never queues behind the copy of an activation that is not needed yet. What is offloaded to the host and loaded again
    has two queues of its own: the two directions of a bus are independent. Only graphs that offload have these lanes.
    What replicas of a stage add up and gather has another, in graphs with replicas.
    """

    COMPUTE = "compute"
    COPY_IN = "copy-in"
    GRAD_IN = "grad-in"
    OFFLOAD = "offload"
    LOAD = "load"
    REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class Lane:
    """A logical device and one of its queues; tasks of one lane run one after the other."""

    device: str
    queue: Queue

    def __str__(self) -> str:
        return f"{self.device}/{self.queue.value}"


class Task(NamedTuple):
    """A node of a task graph.

    ``number`` is its position in the graph and also its priority: tasks are numbered by clock cycle, a copy just before
    what needs it, and last what a step has once. ``source`` is the stage that a copy takes its tensors from (``stage``
    is where they go); it is ``None`` for every other kind. This is a named tuple because a graph of 64 stages and 1024
    micro-batches has 325,000 tasks, and creating frozen dataclasses takes five times as long.
    """

    number: int
    kind: TaskKind
    microbatch: int
    stage: int
    lane: Lane
    cycle: int
    source: int | None = None
    bucket: int | None = None
    """The part of a stage's parameters that A and G are about."""

    @property
    def id(self) -> str:
        """``F(1,2)`` is the forward of micro-batch 1 at stage 2; ``C(1,2>3)`` copies its output on to stage 3.

        A task of the whole step has no micro-batch: ``U(2)`` updates stage 2, ``C(0>3)`` copies tied parameters, and
        ``A(2,0)`` adds up the first bucket of stage 2.
        """
        place = str(self.stage) if self.source is None else f"{self.source}>{self.stage}"
        if self.microbatch != WHOLE_STEP:
            place = f"{self.microbatch},{place}"
        elif self.bucket is not None:
            place = f"{place},{self.bucket}"
        return f"{self.kind.value}({place})"

    @property
    def label(self) -> str:
        """Kind and micro-batch, for pictures: ``F1``; the kind alone for a task of the whole step."""
        return self.kind.value if self.microbatch == WHOLE_STEP else f"{self.kind.value}{self.microbatch}"

    @property
    def is_gradient_copy(self) -> bool:
        """Whether this copies a gradient to an earlier stage, and not an activation to a later one."""
        return self.source is not None and self.source > self.stage

    def __str__(self) -> str:
        return self.id
