"""Lowering: a schedule's actions become a task graph.

Per device, the actions of an ordered schedule form a chain of order edges. Across stages, the output of a forward
and the gradient of a backward travel by data edges, through a copy task wherever two neighbouring stages sit on
different devices. A recomputed micro-batch gets R(i,j) after the action before B(i,j), so that it overlaps the copy
of the gradient that B(i,j) waits for::

    stage j-1     F(i,j-1) ──C──┐                           ┌──C──▶ B(i,j-1)
                                ▼                           │
    stage j       F(i-1,j) ──▶ F(i,j)  …  B(i+1,j) ──▶ R(i,j) ──▶ B(i,j)
                                │            └──────────────────────▲ ▲
    stage j+1                   └──C──▶ F(i,j+1)  …     B(i,j+1) ──C──┘

With GPipe this is Figure 2 of the torchgpipe paper (arXiv 2004.09910). A backward in halves is I(i,j) in the place of
B(i,j), and W(i,j) behind it. A ruled schedule has no chain: its tasks have data edges alone, R(i,j) waits for what
makes the gradient of its output, before that is copied, and the rest is decided while the step runs.

Which stages exchange values is the wiring's business. A link that jumps stages (a skip) is a data edge like any
other, with one copy straight to its user and one straight back. Parameters tied over devices are brought to
their user's replicas before its first forward, and the replicas' gradients back behind its last backward, where
S adds them up; U updates a stage once its gradients are whole::

    owner     ┌──▶ …                    B(last,owner) ──▶ S(owner) ──▶ U(owner)
              C(owner>user)                               ▲
    user      └──▶ F(first,user)  …  B(last,user) ──C(user>owner)
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue, Task
from asyncpipe.core.graph.task_graph import Phase, Rule, TaskGraph, Wiring
from asyncpipe.core.kinds import SCHEDULED_KINDS, TaskKind
from asyncpipe.core.schedules.protocol import Action, RuledSchedule, Schedule, Shape
from asyncpipe.core.schedules.validate import blaming, check_admission, checked_actions, checked_placement
from asyncpipe.errors import OptionError, ScheduleError

__all__ = ["CheckpointMode", "lower"]

_F, _R, _B, _C = TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.COPY
_I, _W = TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT
_S, _U = TaskKind.SUM, TaskKind.UPDATE
_COMPUTE, _COPY_IN, _GRAD_IN = range(len(Queue))


class CheckpointMode(StrEnum):
    """Which micro-batches drop their activations after the forward and recompute them before the backward."""

    ALWAYS = "always"
    EXCEPT_LAST = "except_last"
    NEVER = "never"

    @classmethod
    def parse(cls, value: str) -> CheckpointMode:
        """The mode called ``value``; raises ``OptionError`` that lists the modes."""
        try:
            return cls(value)
        except ValueError:
            allowed = ", ".join(repr(mode.value) for mode in cls)
            raise OptionError(f"checkpoint must be one of {allowed}, got {value!r}") from None

    def recomputes(self, microbatch: int, microbatches: int) -> bool:
        """Whether ``microbatch`` of ``microbatches`` (the real number, counted after scattering) is recomputed."""
        if self is CheckpointMode.EXCEPT_LAST:
            return microbatch < microbatches - 1
        return self is CheckpointMode.ALWAYS


def lower(
    schedule: Schedule,
    shape: Shape,
    *,
    devices: Sequence[str] | None = None,
    checkpoint: CheckpointMode = CheckpointMode.NEVER,
    phase: Phase = Phase.STEP,
    wiring: Wiring | None = None,
) -> TaskGraph:
    """The task graph of one step: copies, recomputes and order edges added, complete and free of deadlock.

    ``devices`` are the names of ``shape.devices`` logical devices (``dev:0`` … by default). ``phase`` picks the
    whole step, its forwards or its backwards; ``wiring`` says what stages exchange (by default each feeds the
    next). Time and memory are linear in the number of tasks. Raises ``ScheduleError`` naming the device and the
    action where the schedule has a missing, duplicate, foreign or misplaced action, or a deadlock.
    """
    with blaming(f"schedule {schedule.name!r}: check"):
        schedule.check(shape)
    names = tuple(devices) if devices is not None else tuple(f"dev:{r}" for r in range(shape.devices))
    placement = checked_placement(schedule, shape, names)
    ruled = schedule if isinstance(schedule, RuledSchedule) and phase is Phase.STEP else None
    builder = _Builder(schedule, shape, placement, checkpoint, phase, wiring or Wiring.chain(shape.stages))
    with _collector_paused():
        actions = [checked_actions(schedule, shape, placement, device) for device in range(shape.devices)]
        if ruled is not None:
            check_admission(ruled, actions, shape, placement)
        elif isinstance(schedule, RuledSchedule):
            actions = [_breadth_first(mine) for mine in actions]
        builder.add_actions(_of_phase(mine, phase) for mine in actions)
        builder.add_ends()
        builder.add_transfers()
        return builder.build(names)


def _breadth_first(actions: Iterable[Action]) -> list[Action]:
    """A ruled schedule's forwards in an order, for phases without anything to decide: one stage after the other."""
    return sorted((action for action in actions if action.kind is _F), key=lambda action: (action[2], action[1]))


def _of_phase(order: list[Action], phase: Phase) -> list[Action]:
    """The actions of a phase: the backward alone mirrors the forwards, so the last micro-batch is the first."""
    if phase is Phase.STEP:
        return order
    forwards = [action for action in order if action.kind is _F]
    if phase is Phase.FORWARD:
        return forwards
    return [Action(_B, i, j) for _, i, j in reversed(forwards)]


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No cycle collection meanwhile: a large graph is a million containers and no cycle, and scanning them
    again and again costs half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Builder:
    """Collects tasks and edges in arrays, then numbers them by clock cycle."""

    def __init__(
        self,
        schedule: Schedule,
        shape: Shape,
        placement: tuple[int, ...],
        checkpoint: CheckpointMode,
        phase: Phase,
        wiring: Wiring,
    ) -> None:
        self._name = schedule.name
        self._ruled = schedule if isinstance(schedule, RuledSchedule) and phase is Phase.STEP else None
        self._shape = shape
        self._placement = placement
        self._phase = phase
        self._wiring = wiring
        m = shape.microbatches
        self._recomputed = [phase is not Phase.FORWARD and checkpoint.recomputes(i, m) for i in range(m)]
        self._keys: list[tuple[TaskKind, int, int, int | None]] = []
        self._dependencies: list[list[int]] = []
        self._forward = [[-1] * m for _ in range(shape.stages)]
        self._backward = [[-1] * m for _ in range(shape.stages)]
        """The task that makes the gradients of a stage's inputs: B or I."""
        self._recompute = [[-1] * m for _ in range(shape.stages)]
        self._first: dict[int, list[int]] = {}
        """The first action of each stage; without a chain, all its forwards."""
        self._last: dict[int, list[int]] = {}
        """The last action of each stage; without a chain, all that make its weights' gradients."""
        self._sums: dict[int, int] = {}

    def _add(self, kind: TaskKind, i: int, j: int, dependencies: list[int], source: int | None = None) -> int:
        self._keys.append((kind, i, j, source))
        self._dependencies.append(dependencies)
        return len(self._keys) - 1

    def add_actions(self, orders: Iterable[Iterable[Action]]) -> None:
        """F, R, B, I and W tasks, with the order edges of each device's chain if there is one."""
        for order in orders:
            before: list[int] = []
            for kind, i, j in order:
                if kind is _F:
                    last = self._forward[j][i] = self._add(_F, i, j, before)
                elif kind is _W:
                    inputs = self._backward[j][i]
                    last = self._add(_W, i, j, before if inputs in before else [*before, inputs])
                else:
                    last = self._backward[j][i] = self._add_backward(kind, i, j, before)
                if self._ruled is None:
                    self._first.setdefault(j, [last])
                    self._last[j] = [last]
                    before = [last]
                elif kind is _F:
                    self._first.setdefault(j, []).append(last)
                elif kind is not _I:
                    self._last.setdefault(j, []).append(last)

    def _add_backward(self, kind: TaskKind, i: int, j: int, before: list[int]) -> int:
        forward = self._forward[j][i]
        read = before if forward in before or forward < 0 else [*before, forward]
        if not self._recomputed[i]:
            return self._add(kind, i, j, read)
        # A chain already puts R(i,j) behind F(i,j), whose saved input it reads.
        again = self._recompute[j][i] = self._add(_R, i, j, before if self._ruled is None else read)
        return self._add(kind, i, j, [*before, again])

    def add_ends(self) -> None:
        """S and U tasks, behind a stage's last backward. Comes after the actions, before the transfers."""
        if self._phase is Phase.FORWARD:
            return
        ends = dict(self._last)
        for owner, _ in self._wiring.ties:
            if owner not in self._sums:
                self._sums[owner] = self._add(_S, WHOLE_STEP, owner, list(self._last[owner]))
                ends[owner] = [self._sums[owner]]
        if self._phase is Phase.STEP:
            for stage in self._wiring.updates:
                self._add(_U, WHOLE_STEP, stage, list(ends[stage]))

    def add_transfers(self) -> None:
        """Data edges between stages, through copies where the device changes. Comes last."""
        for source, user in self._wiring.links:
            for i in range(self._shape.microbatches):
                if self._phase is not Phase.BACKWARD:
                    self._transfer(i, source, user, self._forward)
                if self._phase is not Phase.FORWARD:
                    self._transfer(i, user, source, self._backward)
        for owner, user in self._wiring.ties:
            if self._phase is not Phase.BACKWARD:
                bring = self._add(_C, WHOLE_STEP, user, [], owner)
                for first in self._first[user]:
                    self._depend(first, bring)
            if self._phase is not Phase.FORWARD:
                self._dependencies[self._sums[owner]].append(
                    self._add(_C, WHOLE_STEP, owner, list(self._last[user]), user)
                )

    def _transfer(self, i: int, source: int, stage: int, table: list[list[int]]) -> None:
        producer, consumer = table[source][i], table[stage][i]
        if table is self._backward and self._ruled is not None and self._recomputed[i]:
            self._depend(self._recompute[stage][i], producer)
        if self._placement[source] != self._placement[stage]:
            producer = self._add(_C, i, stage, [producer], source)
        self._depend(consumer, producer)

    def _depend(self, task: int, dependency: int) -> None:
        """``task`` waits for ``dependency``, too. A new list: that of an R or an order edge may be shared."""
        if dependency not in self._dependencies[task]:
            self._dependencies[task] = [*self._dependencies[task], dependency]

    def build(self, devices: tuple[str, ...]) -> TaskGraph:
        dependents = _inverted(self._dependencies)
        cycles = self._cycles(dependents)
        # A copy shares the cycle of the task that it feeds and must come before it.
        rank = [2 * cycle + (key[0] is not _C) for cycle, key in zip(cycles, self._keys, strict=True)]
        numbered = sorted(range(len(rank)), key=rank.__getitem__)
        number = _inverse(numbered)
        lanes = tuple(Lane(device, queue) for device in devices for queue in Queue)
        lane_of = [self._lane(*self._keys[old][2:]) for old in numbered]
        after = [sorted(map(number.__getitem__, dependents[old])) for old in numbered]
        local, remote = _split(after, [lane // len(Queue) for lane in lane_of])
        tasks = tuple(
            [
                Task(k, kind, i, j, lanes[lane_of[k]], cycles[old], source)
                for k, old in enumerate(numbered)
                for kind, i, j, source in (self._keys[old],)
            ]
        )
        return TaskGraph(
            schedule=self._name,
            shape=self._shape,
            devices=devices,
            placement=self._placement,
            phase=self._phase,
            wiring=self._wiring,
            tasks=tasks,
            dependencies=tuple([tuple(map(number.__getitem__, self._dependencies[old])) for old in numbered]),
            local_dependents=local,
            remote_dependents=remote,
            lanes=lanes,
            lane_of=tuple(lane_of),
            gates=tuple([number[old] for old in self._backward[-1]]) if self._phase is Phase.BACKWARD else (),
            rule=None if self._ruled is None else self._rule(self._ruled, tasks),
        )

    def _rule(self, schedule: RuledSchedule, tasks: tuple[Task, ...]) -> Rule:
        """The schedule's answers, as far as they do not depend on what is in flight."""
        shape = self._shape
        ranked: list[tuple[Any, int]] = []
        free: list[int] = []
        loads = [[0] * shape.microbatches for _ in range(shape.devices)]
        for task in tasks:
            if task.kind is _C or task.microbatch == WHOLE_STEP:
                free.append(task.number)
            else:
                ranked.append((self._priority(schedule, task), task.number))
                loads[self._placement[task.stage]][task.microbatch] += 1
        with blaming(f"schedule {self._name!r}: comparing priorities"):
            by_rank = [number for _, number in sorted(ranked)] + free
        return Rule(
            ranks=tuple(_inverse(by_rank)),
            by_rank=tuple(by_rank),
            loads=tuple(map(tuple, loads)),
            admit=lambda action, live: schedule.admit(action, live, shape),
            ahead=schedule.ahead,
        )

    def _priority(self, schedule: RuledSchedule, task: Task) -> Any:
        i, j = task.microbatch, task.stage
        action = Action(self._keys[self._backward[j][i]][0] if task.kind is _R else task.kind, i, j)
        with blaming(lambda: f"schedule {self._name!r}: priority of {action}"):
            return schedule.priority(action, self._shape)

    def _lane(self, stage: int, source: int | None) -> int:
        """The position of a task's lane: the queues of device 0, then those of device 1 …"""
        queue = _COMPUTE
        if source is not None:
            queue = _COPY_IN if source < stage else _GRAD_IN
        return self._placement[stage] * len(Queue) + queue

    def _cycles(self, dependents: list[list[int]]) -> list[int]:
        """The clock cycle of each task: the longest chain of compute tasks before it (F(i,j) of GPipe: i + j).

        Kahn's algorithm; what it cannot reach stands in a deadlock.
        """
        waiting = [len(before) for before in self._dependencies]
        cycles = [0] * len(waiting)
        ready = [task for task, count in enumerate(waiting) if not count]
        for task in ready:
            after = cycles[task] + (self._keys[task][0] is not _C)
            for dependent in dependents[task]:
                if after > cycles[dependent]:
                    cycles[dependent] = after
                waiting[dependent] -= 1
                if not waiting[dependent]:
                    ready.append(dependent)
        if len(ready) < len(waiting):
            raise ScheduleError(self._deadlock([bool(count) for count in waiting]))
        return cycles

    def _deadlock(self, stuck: list[bool]) -> str:
        """Follow one stuck dependency after the other until one comes again."""
        task = stuck.index(True)
        path: dict[int, None] = {}
        while task not in path:
            path[task] = None
            task = next(dependency for dependency in self._dependencies[task] if stuck[dependency])
        steps = list(path)
        ring = [k for k in steps[steps.index(task) :] if self._keys[k][0] in SCHEDULED_KINDS]
        names = [str(Action(*self._keys[k][:3])) for k in (*ring, ring[0])]
        device = self._placement[self._keys[ring[0]][2]]
        return f"schedule {self._name!r} deadlocks: on device {device}, {', which waits for '.join(names)}"


def _inverse(permutation: Sequence[int]) -> list[int]:
    inverse = [0] * len(permutation)
    for position, value in enumerate(permutation):
        inverse[value] = position
    return inverse


def _split(
    dependents: Sequence[Sequence[int]], device_of: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Dependents on the same device, and those on others."""
    local: list[tuple[int, ...]] = []
    remote: list[tuple[int, ...]] = []
    for device, after in zip(device_of, dependents, strict=True):
        elsewhere = tuple([task for task in after if device_of[task] != device])
        remote.append(elsewhere)
        local.append(tuple(after) if not elsewhere else tuple([task for task in after if device_of[task] == device]))
    return tuple(local), tuple(remote)


def _inverted(dependencies: Sequence[Sequence[int]]) -> list[list[int]]:
    """The dependents of each task."""
    dependents: list[list[int]] = [[] for _ in dependencies]
    for task, before in enumerate(dependencies):
        for dependency in before:
            dependents[dependency].append(task)
    return dependents
