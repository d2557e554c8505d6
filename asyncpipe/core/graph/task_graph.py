"""The task graph: every forward, recompute, backward and copy of one step, and what each waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

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
    """What stages exchange beside what a schedule says: the rest of what a task graph is made from."""

    links: tuple[tuple[int, int], ...]
    """(source, user) for every pair of stages between which values travel; the source comes before the user."""
    ties: tuple[tuple[int, int], ...] = ()
    """(owner, user) where a stage works with replicas of parameters that another one, on another device, owns."""
    updates: tuple[int, ...] = ()
    """Stages whose optimizer runs as a task of the step."""

    @classmethod
    def chain(cls, stages: int) -> Wiring:
        """Each stage feeds the next one, and nothing else."""
        return cls(tuple((stage, stage + 1) for stage in range(stages - 1)))


class Reason(StrEnum):
    """Why a task waits for another."""

    DATA = "data"
    """It reads what the other computed."""
    ORDER = "order"
    """The schedule runs the other first on this device."""
    RECOMPUTE = "recompute"
    """It needs the activations that the other recomputes."""
    COPY = "copy"
    """It reads what the other brought to its device."""


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
    """Of each task, all different: the lowest ready one of a lane runs first."""
    by_rank: tuple[int, ...]
    """The task of each rank."""
    loads: tuple[tuple[int, ...], ...]
    """For each device and micro-batch, how many compute tasks it has there: with the last one it leaves."""
    admit: Callable[[Action, int], bool]
    """Whether a forward may bring one more micro-batch to its device, which holds so many."""
    ahead: int
    """Compute tasks that a device holds."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TaskGraph:
    """What ``lower`` makes of a schedule: immutable, and shared by every step of its shape.

    Tasks are numbered by clock cycle with copies first, so a number is a priority and every dependency has
    a lower number than its dependents. Dependents are split by where they run, because the two are released
    at different moments: a *local* dependent (same device) as soon as this task is handed to the device, a
    *remote* one when it is issued.
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
    """For each micro-batch, the task that waits for a gradient from the caller; empty unless this is a backward."""
    rule: Rule | None = None
    """Of a ruled schedule; else the order edges decide."""

    @property
    def training(self) -> bool:
        """Whether this is a whole training step."""
        return self.phase is Phase.STEP

    @property
    def releasing(self) -> tuple[TaskKind, ...]:
        """The kinds of tasks that end a micro-batch's life at a stage: what its forward kept is dropped."""
        return RELEASING_KINDS if self.training else (TaskKind.FORWARD,)

    def edges(self) -> Iterator[Edge]:
        """Every dependency, by dependent."""
        for task, dependencies in zip(self.tasks, self.dependencies, strict=True):
            for dependency in dependencies:
                yield Edge(dependency, task.number, _reason(self.tasks[dependency], task))

    def find(self, kind: TaskKind, microbatch: int, stage: int, source: int | None = None) -> Task:
        """The task with this identity; raises ``KeyError`` if the graph has none."""
        for task in self.tasks:
            if (task.kind, task.microbatch, task.stage, task.source) == (kind, microbatch, stage, source):
                return task
        raise KeyError(f"no {kind.value} task for micro-batch {microbatch} at stage {stage}")


def _reason(dependency: Task, task: Task) -> Reason:
    """Why ``task`` waits for ``dependency``: what the two are says it, so no edge has to store it."""
    if dependency.kind is TaskKind.COPY:
        return Reason.COPY
    if dependency.kind is TaskKind.RECOMPUTE:
        return Reason.RECOMPUTE
    if task.kind not in COMPUTE_KINDS:
        return Reason.DATA
    same_microbatch = dependency.microbatch == task.microbatch
    if same_microbatch and dependency.kind is task.kind:
        return Reason.DATA
    if same_microbatch and (dependency.stage == task.stage or (_is_gradient(dependency) and _is_gradient(task))):
        return Reason.DATA
    return Reason.ORDER


def _is_gradient(task: Task) -> bool:
    return task.kind in INPUT_GRADIENT_KINDS


def critical_path(graph: TaskGraph, duration: Callable[[Task], float]) -> float:
    """The length of the longest chain of dependent tasks, in the unit of ``duration``.

    Order edges count, so no run of this graph, however fast its scheduler, takes less time.
    """
    finish = [0.0] * len(graph.tasks)
    for task in graph.tasks:
        start = max((finish[dependency] for dependency in graph.dependencies[task.number]), default=0.0)
        finish[task.number] = start + duration(task)
    return max(finish, default=0.0)
