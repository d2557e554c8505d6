"""``GraphBuilder``: the tasks of one step, one kind after the other, and what each waits for (``lower.py``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.offload import AHEAD, HOLD
from asyncpipe.core.graph.rows import Rows
from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue, Task
from asyncpipe.core.graph.task_graph import Phase, Rule, TaskGraph, Wiring
from asyncpipe.core.kinds import COPY_KINDS, INPUT_GRADIENT_KINDS, SCHEDULED_KINDS, TaskKind
from asyncpipe.core.schedules.protocol import Action, RuledSchedule, Schedule, Shape
from asyncpipe.core.schedules.validate import blaming
from asyncpipe.errors import ScheduleError

__all__ = ["GraphBuilder"]

_F, _R, _B, _C = TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.COPY
_I, _W = TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT
_O, _L = TaskKind.OFFLOAD, TaskKind.LOAD
_S, _A, _G, _U = TaskKind.SUM, TaskKind.REDUCE, TaskKind.GATHER, TaskKind.UPDATE
_N = TaskKind.NORM
_QUEUE_OF = {_O: Queue.OFFLOAD, _L: Queue.LOAD, _A: Queue.REDUCE}


class _OrderedCopy(NamedTuple):
    """A copy of one micro-batch. Sorts by when it is needed; of those for one task, the one from furthest is first."""

    consumer: int
    nearness: int
    device: int
    """Where it comes from."""
    copy: int


@dataclass(eq=False)
class GraphBuilder:
    """Collects tasks and what each waits for, then numbers the tasks.

    A task is an index into parallel lists, and what it waits for is a tuple of such indices. The garbage collector
    traverses a list of numbers only as one object and stops tracking tuples of numbers. With an object for each of
    the hundreds of thousands of tasks of a large graph, collections would take a third of the time.
    """

    schedule: Schedule
    shape: Shape
    placement: tuple[int, ...]
    checkpoint: CheckpointMode
    phase: Phase
    wiring: Wiring
    """What the graph has of it."""
    devices: Collection[int]
    """Those that have tasks in the graph."""
    queues: Sequence[Queue]
    """Those of each device."""

    def __post_init__(self) -> None:
        m = self.shape.microbatches
        stages = [stage for stage, place in enumerate(self.placement) if place in self.devices]
        self._rows = Rows.of(self.shape, self.wiring.rows)
        self._ruled = self.schedule if isinstance(self.schedule, RuledSchedule) and self.phase is Phase.STEP else None
        self._recomputed = [
            self.phase is not Phase.FORWARD and self.checkpoint.recomputes(*self._rows.place(i)) for i in range(m)
        ]
        self._kinds: list[TaskKind] = []
        self._microbatches: list[int] = []
        self._stages: list[int] = []
        self._sources: list[int | None] = []
        self._dependencies: list[tuple[int, ...]] = []
        self._followed: list[int] = []
        """Of a copy, an offload or a load: the task before which its device takes it; -1 of other tasks."""
        self._forward = {stage: [-1] * m for stage in stages}
        """F of each stage and micro-batch."""
        self._backward = {stage: [-1] * m for stage in stages}
        """B or I of each stage and micro-batch: the task that computes the gradient of the stage's input."""
        self._weight: dict[tuple[int, int], int] = {}
        """W by stage and micro-batch, where backwards are split."""
        self._recompute = {stage: [-1] * m for stage in stages}
        self._first: dict[int, list[int]] = {}
        """The first action of each stage; in a ruled schedule, all its forwards."""
        self._last: dict[int, list[int]] = {}
        """The last action of each stage; in a ruled schedule, all that compute gradients of its parameters."""
        self._buckets: dict[int, int] = {}
        """Of each A and G."""
        self._sums: dict[int, int] = {}
        """S of each stage that owns tied parameters."""
        self._complete: dict[int, Sequence[int]] = {}
        """By stage that is updated: the tasks behind which it has its gradients, or with shards its part of them."""
        self._updates: dict[int, int] = {}
        """U of each stage."""
        self._to_order: dict[int, list[_OrderedCopy]] = {}
        """The copies of each lane, by its position, that gets copies from several devices in an ordered schedule."""
        self._places: dict[int, float] = {}
        """The place of copies in the order of their lane, from 0 to below 1."""

    def _add(
        self,
        kind: TaskKind,
        i: int,
        j: int,
        dependencies: Iterable[int],
        source: int | None = None,
        bucket: int | None = None,
        before: int = -1,
    ) -> int:
        if bucket is not None:
            self._buckets[len(self._kinds)] = bucket
        self._kinds.append(kind)
        self._microbatches.append(i)
        self._stages.append(j)
        self._sources.append(source)
        self._followed.append(before)
        self._dependencies.append(tuple(dependencies))
        return len(self._kinds) - 1

    def add_actions(self, orders: Iterable[Iterable[Action]]) -> None:
        """Add the F, R, B, I and W tasks; in an ordered schedule, each waits for the one before on its device."""
        for order in orders:
            before: tuple[int, ...] = ()
            for kind, i, j in order:
                if kind is _F:
                    task = self._forward[j][i] = self._add(_F, i, j, before)
                elif kind is _W:
                    task = self._weight[j, i] = self._add(_W, i, j, _with(before, self._backward[j][i]))
                else:
                    task = self._backward[j][i] = self._add_backward(kind, i, j, before)
                if self._ruled is None:
                    self._first.setdefault(j, [task])
                    self._last[j] = [task]
                    before = (task,)
                elif kind is _F:
                    self._first.setdefault(j, []).append(task)
                elif kind is not _I:
                    self._last.setdefault(j, []).append(task)

    def _add_backward(self, kind: TaskKind, i: int, j: int, before: tuple[int, ...]) -> int:
        # The graph of the backwards alone has no forwards to wait for.
        read = before if self.phase is Phase.BACKWARD else _with(before, self._forward[j][i])
        if not self._recomputed[i]:
            return self._add(kind, i, j, read)
        # In an ordered schedule the chain already puts R(i,j) after F(i,j), whose saved input it reads.
        again = self._recompute[j][i] = self._add(_R, i, j, before if self._ruled is None else read)
        return self._add(kind, i, j, (*before, again))

    def add_offloads(self, order: Sequence[Action], chosen: Collection[tuple[int, int]]) -> None:
        """Add O and L of the ``chosen`` (micro-batch, stage) of a device, whose actions are in ``order``."""
        action_of = {_F: self._forward, _B: self._backward, _I: self._backward}
        at = {(kind is _F, i, j): k for k, (kind, i, j) in enumerate(order) if kind is not _W}
        tasks = [action_of[kind][j][i] if kind is not _W else self._weight[j, i] for kind, i, j in order]
        leaving: dict[int, int] = {}
        """By position of the action that gets the memory, its O."""
        for i, j in chosen:
            made = at[True, i, j]
            leave = self._add(_O, i, j, (tasks[made],), before=self._begin(order[made + 1], tasks[made + 1]))
            leaving[made + HOLD + 1] = leave
            self._depend(self._begin(order[made + HOLD + 1], tasks[made + HOLD + 1]), leave)
        for i, j in chosen:
            made, read = at[True, i, j], at[False, i, j]
            # The load comes just before this action, and gets the memory that is there for it.
            after = self._begin(order[read - AHEAD], tasks[read - AHEAD])
            back = self._add(_L, i, j, (leaving[made + HOLD + 1], tasks[read - AHEAD - 1]), before=after)
            if (before := leaving.get(read - AHEAD)) is not None:
                self._depend(back, before)
            self._depend(self._begin(order[read], tasks[read]), back)

    def _begin(self, action: Action, task: int) -> int:
        """The first task of ``action``: of a backward its recomputation, if it has one."""
        again = self._recompute[action.stage][action.microbatch] if action.kind in INPUT_GRADIENT_KINDS else -1
        return task if again < 0 else again

    def add_ends(self) -> None:
        """Add what follows a stage's last backward, from S to U. Call it after ``add_actions``."""
        ends = dict(self._last)
        for owner, user in self.wiring.ties:
            if user in self._last and owner not in self._sums and self._comes_back(owner, user):
                self._sums[owner] = self._add(_S, WHOLE_STEP, owner, self._last[owner])
                ends[owner] = [self._sums[owner]]
        updates = self.wiring.updates if self.phase is Phase.STEP else ()
        replicated = [stage for stage, _ in self.wiring.reduces]
        if self.phase is not Phase.FORWARD:
            for stage, buckets in self.wiring.reduces:
                self._add_reduction(stage, range(buckets), ends, updates=stage in updates)
        for stage in updates:
            if stage not in replicated:
                # The device at which norms are added up knows of far stages only that they have N and U, in each row.
                for replica in (stage,) if self.wiring.norm is None else self._rows.replicas(stage):
                    self._add_update(replica, ends.get(replica, ()))
        if updates and self.wiring.norm is not None:
            self._add_norms(updates, self.wiring.norm)

    def _add_update(self, stage: int, complete: Sequence[int]) -> int:
        self._complete[stage] = complete
        task = self._updates[stage] = self._add(_U, WHOLE_STEP, stage, complete)
        return task

    def _add_norms(self, updates: Iterable[int], last: int) -> None:
        """Add N, the one of stage ``last`` behind the others, since tasks of a device are numbered in this order."""
        counted = [
            each for stage in updates for each in (self._rows.replicas(stage) if self.wiring.shards else (stage,))
        ]
        norms = [self._add(_N, WHOLE_STEP, each, self._complete[each]) for each in counted if each != last]
        total = self._add(_N, WHOLE_STEP, last, (*self._complete.get(last, ()), *norms))
        for update in self._updates.values():
            self._depend(update, total)

    def _add_reduction(
        self, stage: int, buckets: Iterable[int], ends: Mapping[int, Iterable[int]], *, updates: bool
    ) -> None:
        """Add what reduces the gradients of ``stage`` of row 0 and its replicas, and updates these.

        Without updates the sum of all rows is for the caller, so row 0 alone gathers it.
        """
        replicas = range(stage, self.shape.stages, self._rows.stages)
        complete = [task for replica in replicas for task in ends.get(replica, ())]
        parts = {
            replica: [self._add(_A, WHOLE_STEP, replica, complete, bucket=k) for k in buckets] for replica in replicas
        }
        if updates and self.wiring.shards:
            updated = [self._add_update(replica, parts[replica]) for replica in replicas]
            for replica in replicas:
                for k in buckets:
                    self._add(_G, WHOLE_STEP, replica, updated, bucket=k)
            return
        for replica in replicas if updates else replicas[:1]:
            gathered = [
                self._add(_G, WHOLE_STEP, replica, [parts[other][k] for other in replicas], bucket=k) for k in buckets
            ]
            if updates:
                self._add_update(replica, gathered)

    def _comes_back(self, owner: int, user: int) -> bool:
        """Whether ``user`` sends something to the ``owner`` of what it shares, at its end."""
        return self.phase is not Phase.FORWARD or (owner, user) in self.wiring.statistics

    def add_transfers(self) -> None:
        """Add the data edges between stages, with copies where the device changes. Call it last."""
        if self._ruled is None:
            self._to_order = self._lanes_to_order()
        for source, user in self.wiring.links:
            for i in self._rows.microbatches_of(self._rows.stage_row(source)):
                if self.phase is not Phase.BACKWARD:
                    self._transfer(i, source, user, self._forward)
                if self.phase is not Phase.FORWARD:
                    self._transfer(i, user, source, self._backward)
        self._order_copies()
        for owner, user in self.wiring.ties:
            if user not in self._first:  # A row without a micro-batch.
                continue
            if self.phase is not Phase.BACKWARD:
                values = self._add(_C, WHOLE_STEP, user, (), owner, before=self._first[user][0])
                for first in self._first[user]:
                    self._depend(first, values)
            if self._comes_back(owner, user):
                total = self._sums[owner]
                self._depend(total, self._add(_C, WHOLE_STEP, owner, self._last[user], user, before=total))

    def _transfer(self, i: int, source: int, stage: int, table: Mapping[int, list[int]]) -> None:
        producer, consumer = table[source][i], table[stage][i]
        if table is self._backward and self._ruled is not None and self._recomputed[i]:
            self._depend(self._recompute[stage][i], producer)
        if self.placement[source] != self.placement[stage]:
            producer = self._add(_C, i, stage, (producer,), source, before=consumer)
            if self._to_order and (copies := self._to_order.get(self._lane(stage, source))) is not None:
                copies.append(_OrderedCopy(consumer, -abs(stage - source), self.placement[source], producer))
        self._depend(consumer, producer)

    def _lanes_to_order(self) -> dict[int, list[_OrderedCopy]]:
        """An empty list for each lane that gets copies from several devices."""
        sources: dict[int, set[int]] = {}
        for source, stage in (*self.wiring.links, *((user, source) for source, user in self.wiring.links)):
            if self.placement[source] != self.placement[stage]:
                sources.setdefault(self._lane(stage, source), set()).add(self.placement[source])
        return {lane: [] for lane, devices in sources.items() if len(devices) > 1}

    def _order_copies(self) -> None:
        """Let the copies of these lanes run in the order in which they are needed.

        A lane of an asynchronous device runs them in the order of their dispatch, which follows the issue of what they
        bring. The first stage is issued far ahead: without this, what the second last stage sends to the last one is
        queued behind skips of later micro-batches, and waits for their forwards.
        """
        for copies in self._to_order.values():
            copies.sort()
            for before, after in pairwise(copies):
                if before.device != after.device:
                    self._depend(after.copy, before.copy)
            self._places.update({each.copy: k / len(copies) for k, each in enumerate(copies)})

    def _depend(self, task: int, dependency: int) -> None:
        self._dependencies[task] = _with(self._dependencies[task], dependency)

    def _ranks(self, cycles: Sequence[int], *, shards: bool) -> list[float]:
        """What tasks are numbered by.

        The order of one device's tasks follows from its own actions, whatever is known of the others: actions are a
        chain, a copy comes just before what needs it, and what a step has once comes behind, in the order in which it
        waits for that of other devices. So a worker numbers its own part as the whole graph does.
        """
        once = (_S, _A, _N, _U, _G) if shards else (_S, _A, _G, _N, _U)
        end = 2 * max(cycles, default=0) + 2
        behind = {kind: end + 2 * k for k, kind in enumerate((*once, _C))}
        rank: list[float] = [
            2 * cycle + 1 if i != WHOLE_STEP else behind[kind]
            for kind, i, cycle in zip(self._kinds, self._microbatches, cycles, strict=True)
        ]
        for copy, task in enumerate(self._followed):
            if task >= 0:
                rank[copy] = rank[task] - 1
        for copy, place in self._places.items():
            rank[copy] += place
        return rank

    def build(self, devices: tuple[str, ...], wiring: Wiring) -> TaskGraph:
        """The graph, with its tasks numbered; ``wiring`` is that of the whole step."""
        cycles = self._cycles()
        rank = self._ranks(cycles, shards=wiring.shards)
        by_number = sorted(range(len(rank)), key=rank.__getitem__)
        number = _inverse(by_number)
        placement = self.placement
        dependencies: list[tuple[int, ...]] = []
        local: list[tuple[int, ...]] = [()] * len(number)
        remote: list[tuple[int, ...]] = [()] * len(number)
        device_of = [placement[self._stages[index]] for index in by_number]
        for task, index in enumerate(by_number):
            before = tuple([number[dependency] for dependency in self._dependencies[index]])
            dependencies.append(before)
            device = device_of[task]
            for dependency in before:
                dependents = local if device_of[dependency] == device else remote
                dependents[dependency] += (task,)
        lanes = tuple(Lane(device, queue) for device in devices for queue in self.queues)
        lane_of = [self._lane(self._stages[index], self._sources[index], self._kinds[index]) for index in by_number]
        tasks = tuple(
            [
                Task(
                    task,
                    self._kinds[index],
                    self._microbatches[index],
                    self._stages[index],
                    lanes[lane_of[task]],
                    cycles[index],
                    self._sources[index],
                    self._buckets.get(index),
                )
                for task, index in enumerate(by_number)
            ]
        )
        return TaskGraph(
            schedule=self.schedule.name,
            shape=self.shape,
            devices=devices,
            placement=placement,
            phase=self.phase,
            wiring=wiring,
            tasks=tasks,
            dependencies=tuple(dependencies),
            local_dependents=tuple(local),
            remote_dependents=tuple(remote),
            lanes=lanes,
            lane_of=tuple(lane_of),
            gates=tuple(
                [
                    number[self._backward[stage][i]]
                    for i, stage in enumerate(map(self._rows.last_stage, range(self.shape.microbatches)))
                    if stage in self._backward
                ]
                if self.phase is Phase.BACKWARD
                else []
            ),
            rule=None if self._ruled is None else self._rule(self._ruled, tasks),
        )

    def _rule(self, schedule: RuledSchedule, tasks: tuple[Task, ...]) -> Rule:
        """The schedule's answers that do not depend on what is in flight."""
        shape, rows = self.shape, self._rows
        ranked: list[tuple[Any, int]] = []
        unranked: list[int] = []
        loads = [[0] * shape.microbatches for _ in range(shape.devices)]
        for task in tasks:
            if task.kind is _C or task.microbatch == WHOLE_STEP:
                unranked.append(task.number)
            else:
                ranked.append((self._priority(schedule, task), task.number))
                loads[self.placement[task.stage]][task.microbatch] += 1
        with blaming(f"schedule {self.schedule.name!r}: comparing priorities"):
            by_rank = [number for _, number in sorted(ranked)] + unranked
        return Rule(
            ranks=tuple(_inverse(by_rank)),
            by_rank=tuple(by_rank),
            loads=tuple(map(tuple, loads)),
            admit=partial(_admits, schedule, rows),  # No lambda: graphs go to other processes.
            ahead=schedule.ahead,
        )

    def _priority(self, schedule: RuledSchedule, task: Task) -> Any:
        i, j = task.microbatch, task.stage
        action = Action(self._kinds[self._backward[j][i]] if task.kind is _R else task.kind, i, j)
        with blaming(lambda: f"schedule {self.schedule.name!r}: priority of {action}"):
            return schedule.priority(*self._rows.in_row(action))

    def _lane(self, stage: int, source: int | None, kind: TaskKind = _C) -> int:
        """The position of a task's lane: the queues of device 0, then those of device 1 …"""
        if source is not None:
            queue = 1 if source < stage else 2  # The usual queues of ``lower.py`` are always there.
        elif kind in _QUEUE_OF:
            queue = self.queues.index(_QUEUE_OF[kind])
        else:
            queue = 0
        return self.placement[stage] * len(self.queues) + queue

    def _cycles(self) -> list[int]:
        """The clock cycle of each task: the longest chain of compute tasks before it (F(i,j) of GPipe: i + j).

        This is Kahn's algorithm; the tasks that it does not reach are part of a deadlock or wait for one.
        """
        dependents: list[list[int]] = [[] for _ in self._dependencies]
        for task, before in enumerate(self._dependencies):
            for dependency in before:
                dependents[dependency].append(task)
        waiting = [len(before) for before in self._dependencies]
        cycles = [0] * len(waiting)
        ready = [task for task, count in enumerate(waiting) if not count]
        for task in ready:
            after = cycles[task] + (self._kinds[task] not in COPY_KINDS)
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
        """The message that names a circle of actions: follow stuck dependencies until one comes a second time."""
        task = stuck.index(True)
        path: dict[int, None] = {}
        while task not in path:
            path[task] = None
            task = next(dependency for dependency in self._dependencies[task] if stuck[dependency])
        steps = list(path)
        circle = [step for step in steps[steps.index(task) :] if self._kinds[step] in SCHEDULED_KINDS]
        names = [str(Action(self._kinds[k], self._microbatches[k], self._stages[k])) for k in (*circle, circle[0])]
        device = self.placement[self._stages[circle[0]]]
        return f"schedule {self.schedule.name!r} deadlocks: on device {device}, {', which waits for '.join(names)}"


def _admits(schedule: RuledSchedule, rows: Rows, action: Action, live: int) -> bool:
    own, shape = rows.in_row(action)
    return schedule.admit(own, live, shape)


def _with(dependencies: tuple[int, ...], dependency: int) -> tuple[int, ...]:
    return dependencies if dependency in dependencies else (*dependencies, dependency)


def _inverse(permutation: Sequence[int]) -> list[int]:
    inverse = [0] * len(permutation)
    for position, value in enumerate(permutation):
        inverse[value] = position
    return inverse
