"""The task graph: every forward, recompute, backward and copy of one step, and what each waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from asyncpipe.core.graph.rows import Rows
from asyncpipe.core.graph.task import Lane, Task
from asyncpipe.core.kinds import COMPUTE_KINDS, INPUT_GRADIENT_KINDS, RELEASING_KINDS, TaskKind
from asyncpipe.core.schedules.protocol import Action, Shape

__all__ = ["Edge", "Phase", "Reason", "Rule", "TaskGraph", "Wiring", "critical_path"]


class Phase(StrEnum):
    """What part of a step a graph is."""

    STEP = "step"
    """Forwards and backwards, as the schedule interleaves them."""
    FORWARD = "forward"
    """The forwards alone, in the schedule's order: an evaluation, or a training step whose loss is the caller's."""
    BACKWARD = "backward"
    """The backwards alone, in the reverse order of the forwards: each micro-batch waits for the caller's gradient."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """What stages exchange: with a schedule and a shape, all that a task graph is made from."""

    links: tuple[tuple[int, int], ...]
    """(source, user) for every pair of stages between which values travel; the source comes before the user."""
    ties: tuple[tuple[int, int], ...] = ()
    """(owner, user) where a stage uses replicas of parameters that a stage on another device owns."""
    updates: tuple[int, ...] = ()
    """Stages whose optimizer runs as a task of the step."""
    statistics: tuple[tuple[int, int], ...] = ()
    """Those of ``ties`` where a forward changes something at the user that the owner is told of."""
    reduces: tuple[tuple[int, int], ...] = ()
    """(stage of row 0, number of buckets) where each replica keeps the parameters and has an optimizer of its own."""
    shards: bool = False
    """Whether each replica updates a part of each bucket, and parameters are gathered; or all of it, from gradients
    that are gathered."""
    rows: int = 1
    """How many replicas of the pipeline there are (``rows.py``). Links do not lead from one to another; ties do."""
    norm: int | None = None
    """The stage at which the norm of all gradients is added up, if updates wait for it."""

    @classmethod
    def chain(cls, stages: int) -> Wiring:
        """Each stage feeds the next one, and nothing else."""
        return cls(tuple((stage, stage + 1) for stage in range(stages - 1)))

    def in_rows(self, rows: int, buckets: Sequence[int], *, shards: bool = False) -> Wiring:
        """That of so many replicas of a pipeline, each with an optimizer; ``buckets`` has the number of each stage."""
        stages = len(buckets)
        links, ties = (
            tuple((a + row * stages, b + row * stages) for row in range(rows) for a, b in pairs)
            for pairs in (self.links, self.ties)
        )
        reduces = tuple((stage, count) for stage, count in enumerate(buckets) if count)
        updates = tuple(stage for stage, _ in reduces)
        return replace(self, links=links, ties=ties, updates=updates, reduces=reduces, shards=shards, rows=rows)

    def around(self, own: frozenset[int], rows: Rows) -> Wiring:
        """What concerns the stages in ``own``: what these exchange, and all that a sum or norm of theirs is of."""
        reduces = tuple([each for each in self.reduces if not own.isdisjoint(rows.replicas(each[0]))])
        summed = {stage for first, _ in reduces for stage in rows.replicas(first)}
        return replace(
            self,
            links=tuple([each for each in self.links if not own.isdisjoint(each)]),
            ties=tuple([each for each in self.ties if each[0] in summed or not own.isdisjoint(each)]),
            updates=tuple([stage for stage in self.updates if stage in own or stage in summed or self.norm in own]),
            reduces=reduces,
        )


class Reason(StrEnum):
    """Why a task waits for another."""

    DATA = "data"
    """It reads what the other computed."""
    ORDER = "order"
    """The schedule runs the other first on this device, a copy that is needed before arrives first, or memory that an
    offload frees is needed."""
    RECOMPUTE = "recompute"
    """It needs the activations that the other recomputes."""
    COPY = "copy"
    """It reads what the other copied, or loaded again, to its device."""


@dataclass(frozen=True, slots=True)
class Edge:
    """``task`` runs after ``dependency`` (both numbers of tasks), for ``reason``."""

    dependency: int
    task: int
    reason: Reason


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """How the scheduler picks among the ready tasks of a ruled schedule."""

    ranks: tuple[int, ...]
    """The rank of each task, all different: the ready task of the lowest rank runs first on a lane."""
    by_rank: tuple[int, ...]
    """The task of each rank."""
    loads: tuple[tuple[int, ...], ...]
    """For each device and micro-batch, how many compute tasks there are; the device holds the micro-batch until the
    last of them has completed."""
    admit: Callable[[Action, int], bool]
    """Whether a forward may bring one more micro-batch to its device, given how many the device holds."""
    ahead: int
    """How many compute tasks may be dispatched to a device and not yet completed."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TaskGraph:
    """What ``lower`` makes of a schedule: immutable, and shared by every step of its shape.

    Tasks are numbered by clock cycle, a copy just before what needs it, and last what a step has once. So a number is a
    priority, every dependency has a lower number than its dependents, and the order of a device's own tasks follows
    from its actions alone. Dependents are split by where they run because they are released at different times:
    a *local* dependent (on the same device) when the task is dispatched, a *remote* one when the task is issued.
    """

    schedule: str
    shape: Shape
    devices: tuple[str, ...]
    placement: tuple[int, ...]
    phase: Phase
    wiring: Wiring
    tasks: tuple[Task, ...]
    dependencies: tuple[tuple[int, ...], ...]
    local_dependents: tuple[tuple[int, ...], ...]
    remote_dependents: tuple[tuple[int, ...], ...]
    lanes: tuple[Lane, ...]
    lane_of: tuple[int, ...]
    """The position in ``lanes`` of each task's lane."""
    gates: tuple[int, ...] = ()
    """By gate, the task that waits for something from outside the graph; several gates may hold the same task. In the
    graph of a backward, gate i holds the task that waits for the caller's gradient of micro-batch i."""
    rule: Rule | None = None
    """For a ruled schedule; with an ordered one, the order edges decide."""

    @property
    def rows(self) -> Rows:
        """The replicas of the pipeline."""
        return Rows.of(self.shape, self.wiring.rows)

    @property
    def updates(self) -> bool:
        """Whether optimizers run as tasks."""
        return self.phase is Phase.STEP and bool(self.wiring.updates)

    @property
    def training(self) -> bool:
        """Whether this is a whole training step."""
        return self.phase is Phase.STEP

    @property
    def releasing(self) -> tuple[TaskKind, ...]:
        """The kinds of tasks after which what a micro-batch's forward kept at a stage is dropped."""
        return RELEASING_KINDS if self.training else (TaskKind.FORWARD,)

    @property
    def own_devices(self) -> tuple[str, ...]:
        """The devices that it has lanes of: all of them, unless it is a part of a step (``part.py``)."""
        return tuple(dict.fromkeys(lane.device for lane in self.lanes))

    def edges(self) -> Iterator[Edge]:
        """Every edge, in the order of the tasks that wait."""
        for task, dependencies in zip(self.tasks, self.dependencies, strict=True):
            for dependency in dependencies:
                yield Edge(dependency, task.number, _reason(self.tasks[dependency], task))

    def read_by(self, task: int) -> tuple[int, ...]:
        """The dependencies of ``task`` (numbers); of a copy only what it copies, without the order of its lane."""
        before = self.dependencies[task]
        if self.tasks[task].kind is not TaskKind.COPY:
            return before
        return tuple([number for number in before if self.tasks[number].kind is not TaskKind.COPY])

    def frees(self) -> dict[int, list[tuple[int, int]]]:
        """By task: the (micro-batch, stage) that were offloaded before it, and whose memory on the device is free then.

        If there are several such tasks for one, the first of them to begin frees it.
        """
        found: dict[int, list[tuple[int, int]]] = {}
        for task in self.tasks:
            if task.kind is TaskKind.OFFLOAD:
                for after in self.local_dependents[task.number]:
                    _, kind, microbatch, stage, *_ = self.tasks[after]
                    if kind is not TaskKind.LOAD or (microbatch, stage) != (task.microbatch, task.stage):
                        found.setdefault(after, []).append((task.microbatch, task.stage))
        return found

    def find(self, kind: TaskKind, microbatch: int, stage: int, source: int | None = None) -> Task:
        """The task with this identity; raises ``KeyError`` if the graph has none."""
        for task in self.tasks:
            if (task.kind, task.microbatch, task.stage, task.source) == (kind, microbatch, stage, source):
                return task
        raise KeyError(f"no {kind.value} task for micro-batch {microbatch} at stage {stage}")


def _reason(dependency: Task, task: Task) -> Reason:
    """Why ``task`` waits for ``dependency``; their kinds and places tell, so edges do not store it."""
    if dependency.kind is TaskKind.COPY:
        return Reason.ORDER if task.kind is TaskKind.COPY else Reason.COPY
    if dependency.kind is TaskKind.LOAD:
        return Reason.COPY
    if dependency.kind is TaskKind.OFFLOAD:
        is_same = (task.microbatch, task.stage) == (dependency.microbatch, dependency.stage)
        return Reason.DATA if task.kind is TaskKind.LOAD and is_same else Reason.ORDER
    if dependency.kind is TaskKind.RECOMPUTE:
        return Reason.RECOMPUTE
    if task.kind is TaskKind.LOAD:
        return Reason.ORDER
    if task.kind not in COMPUTE_KINDS:
        return Reason.DATA
    if dependency.microbatch != task.microbatch:
        return Reason.ORDER
    if dependency.stage == task.stage or dependency.kind is task.kind:
        return Reason.DATA
    gradients = dependency.kind in INPUT_GRADIENT_KINDS and task.kind in INPUT_GRADIENT_KINDS
    return Reason.DATA if gradients else Reason.ORDER


def critical_path(graph: TaskGraph, duration: Callable[[Task], float]) -> float:
    """The length of the longest chain of dependent tasks, in the unit of ``duration``.

    Order edges count. No run of this graph takes less time.
    """
    finish = [0.0] * len(graph.tasks)
    for task in graph.tasks:
        start = max((finish[dependency] for dependency in graph.dependencies[task.number]), default=0.0)
        finish[task.number] = start + duration(task)
    return max(finish, default=0.0)
