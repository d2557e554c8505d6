"""Lowering: a schedule's actions become a task graph.

On each device, the actions of an ordered schedule form a chain of order edges. Between stages, the output of a
forward and the gradient of a backward travel along data edges, through a copy task where the two stages are on
different devices. If micro-batch i is recomputed, R(i,j) is inserted after the action before B(i,j), so that it runs
while the gradient that B(i,j) waits for is copied::

    stage j-1     F(i,j-1) ──C──┐                           ┌──C──▶ B(i,j-1)
                                ▼                           │
    stage j       F(i-1,j) ──▶ F(i,j)  …  B(i+1,j) ──▶ R(i,j) ──▶ B(i,j)
                                │            └──────────────────────▲ ▲
    stage j+1                   └──C──▶ F(i,j+1)  …     B(i,j+1) ──C──┘

With GPipe this is Figure 2 of the torchgpipe paper (arXiv 2004.09910). If the backward is split, I(i,j) takes the
place of B(i,j), and W(i,j) follows it. A ruled schedule has no chain: its tasks have data edges only, R(i,j) waits
for the task that computes the gradient of the stage's output (not for the copy of that gradient), and the rule
decides the rest while the step runs.

The wiring says which stages exchange values. A link that jumps over stages (a skip connection) is a data edge like
any other, with one copy from its source to its user and one back. If a lane gets copies from several devices, an
ordered schedule orders them too, by when they are needed. A parameter tied across devices is copied to its
user's replica before the user's first forward. After the user's last backward the replica's gradient is copied back,
and S adds it to the owner's. U updates a stage when its gradients are complete::

    owner     ┌──▶ …                    B(last,owner) ──▶ S(owner) ──▶ U(owner)
              C(owner>user)                               ▲
    user      └──▶ F(first,user)  …  B(last,user) ──C(user>owner)

Where the pipeline has replicas (``rows.py``) that update the parameters themselves, A(j,k) adds up in one replica its
part of bucket k of stage j's gradients, and G(j,k) gathers the parts of all. That is a reduce-scatter and an
all-gather, made of tasks. With shards each replica updates its parts, and the parameters are gathered instead::

    replica 0     B(last,0) ──┬──▶ A(0,k) ──┬──▶ G(0,k) ──▶ U(0)        ──▶ A(0,k) ──▶ U(0) ──┬──▶ G(0,k)
                              ╪             ╪                      with shards                ╪
    replica 1     B(last,2) ──┴──▶ A(2,k) ──┴──▶ G(2,k) ──▶ U(2)        ──▶ A(2,k) ──▶ U(2) ──┴──▶ G(2,k)

Where updates are clipped by the norm of all gradients, N(j) completes the gradients of stage j and takes their norm.
N of the first stage that is updated also waits for the other norms and adds them up, and every U waits for it. So each
other stage sends one message and gets one; if each sent its norm to each, 64 stages would send 4032. It is the first
stage since its gradients are the last to be complete: a sum elsewhere would come one message later. Of replicas the
first has norms, of whole gradients; with shards all do, of their parts::

    stage 2   … B(last,2) ──▶ N(2) ──────┐                ┌──▶ U(2)
    stage 1   …     B(last,1) ──▶ N(1) ──┤                ├──▶ U(1)
    stage 0   …         B(last,0) ───────┴──▶ N(0) ───────┴──▶ U(0)

What F(i,j) keeps may be offloaded to the host until its backward (``offload.py`` says of which micro-batches). O(i,j)
copies it while the next action runs, and what comes after that waits for O, since it gets the memory. L(i,j) brings it
back while the last action before the backward (or before R(i,j), which reads it then) runs::

    actions    F(i,j) ──▶ next ──▶ after ──▶ … ──▶ a ──▶ b ──▶ B(i,j)
                 └───── O(i,j) ─────┘               └── L(i,j) ──┘
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, pairwise
from typing import Any, NamedTuple

from asyncpipe.core.checks import check_choice
from asyncpipe.core.graph.offload import AHEAD, HOLD, offloaded
from asyncpipe.core.graph.rows import Rows
from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue, Task
from asyncpipe.core.graph.task_graph import Phase, Rule, TaskGraph, Wiring
from asyncpipe.core.kinds import COPY_KINDS, INPUT_GRADIENT_KINDS, SCHEDULED_KINDS, TaskKind
from asyncpipe.core.schedules.protocol import Action, RuledSchedule, Schedule, Shape
from asyncpipe.core.schedules.validate import blaming, check_admission, checked_actions, checked_placement
from asyncpipe.errors import ScheduleError

__all__ = ["CheckpointMode", "lower"]

_F, _R, _B, _C = TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.COPY
_I, _W = TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT
_O, _L = TaskKind.OFFLOAD, TaskKind.LOAD
_S, _A, _G, _U = TaskKind.SUM, TaskKind.REDUCE, TaskKind.GATHER, TaskKind.UPDATE
_N = TaskKind.NORM
_USUAL_QUEUES = (Queue.COMPUTE, Queue.COPY_IN, Queue.GRAD_IN)
"""Those of graphs that offload nothing and have no replicas."""
_QUEUE_OF = {_O: Queue.OFFLOAD, _L: Queue.LOAD, _A: Queue.REDUCE}


class CheckpointMode(StrEnum):
    """Which micro-batches drop their activations after the forward and recompute them before the backward."""

    ALWAYS = "always"
    EXCEPT_LAST = "except_last"
    SELECTIVE = "selective"
    """All are recomputed, except for products, convolutions and attention, whose outputs are kept."""
    NEVER = "never"

    @classmethod
    def parse(cls, value: str) -> CheckpointMode:
        """The mode called ``value``; raises ``OptionError`` that lists the modes."""
        check_choice("checkpoint", value, [mode.value for mode in cls])
        return cls(value)

    def recomputes(self, microbatch: int, microbatches: int) -> bool:
        """Whether ``microbatch`` is recomputed, of the ``microbatches`` that the mini-batch was really cut into."""
        if self is CheckpointMode.EXCEPT_LAST:
            return microbatch < microbatches - 1
        return self is not CheckpointMode.NEVER


def lower(
    schedule: Schedule,
    shape: Shape,
    *,
    devices: Sequence[str] | None = None,
    checkpoint: CheckpointMode = CheckpointMode.NEVER,
    phase: Phase = Phase.STEP,
    wiring: Wiring | None = None,
    offload: Sequence[float] = (),
    around: Collection[str] = (),
) -> TaskGraph:
    """The task graph of one step: the schedule's actions with copies, recomputations and order edges.

    ``devices`` are the names of the ``shape.devices`` logical devices, ``dev:0`` … by default. ``phase`` selects the
    whole step, only its forwards or only its backwards. ``wiring`` says what stages exchange; by default each stage
    feeds the next. ``offload`` is, for each stage, the fraction of its micro-batches whose activations are offloaded,
    in whole steps; by default none. Time and memory are linear in the number of tasks. Raises ``ScheduleError``, which
    names the device and the action, if an action is missing, duplicate, out of place or on the wrong device, or if the
    schedule deadlocks; also for a ruled schedule that is to offload, since only an order tells what waits how long.

    ``around`` are the names of a worker's devices. The graph then has the tasks of these devices, and what they wait
    for or what waits for them elsewhere, if the schedule is ordered: ``part`` makes the same of it as of the whole
    graph, for the schedule is asked only for the orders of these devices and their neighbours.
    """
    wiring = wiring or Wiring.chain(shape.stages)
    rows = Rows.of(shape, wiring.rows)
    names = tuple(devices) if devices is not None else tuple(f"dev:{r}" for r in range(shape.devices))
    if not len(names) == len(set(names)) == shape.devices:
        raise ScheduleError(f"got the device names {list(names)}, expected {shape.devices} different ones")
    places: dict[int, tuple[int, ...]] = {}
    for row, one in rows.shapes():
        with blaming(f"schedule {schedule.name!r}: check"):
            schedule.check(one)
        places[row] = checked_placement(schedule, one)
    placement = tuple(place + row * rows.devices for row in range(len(rows)) for place in places[0])
    local: Wiring = wiring
    near: Sequence[int] = range(shape.devices)
    if around and not isinstance(schedule, RuledSchedule):
        local, near = _neighbourhood(wiring, rows, placement, {k for k, name in enumerate(names) if name in around})
    orders: list[Sequence[Action]] = []
    for row, one in rows.shapes():
        mine = [device % rows.devices for device in near if device // rows.devices == row]
        found = _orders(schedule, one, places[row], phase, mine)
        orders += [[rows.in_graph(action, row) for action in order] for order in found]
    offloads = any(offload) and phase is Phase.STEP
    queues = (
        *_USUAL_QUEUES,
        *((Queue.OFFLOAD, Queue.LOAD) if offloads else ()),
        *((Queue.REDUCE,) if wiring.reduces else ()),
    )
    builder = _Builder(schedule, shape, placement, checkpoint, phase, local, near, queues)
    builder.add_actions(orders)
    if offloads:
        if isinstance(schedule, RuledSchedule):
            raise ScheduleError(
                f"schedule {schedule.name!r} decides while the step runs, so it is not known what waits for long; "
                "offload needs an ordered schedule, in its strict order"
            )
        for order in orders:
            builder.add_offloads(order, offloaded(order, offload))
    builder.add_ends()
    builder.add_transfers()
    return builder.build(names, wiring)


def _neighbourhood(
    wiring: Wiring, rows: Rows, placement: Sequence[int], own: Collection[int]
) -> tuple[Wiring, Sequence[int]]:
    """What of ``wiring`` concerns the ``own`` devices, and these with all that they exchange something with."""
    stages = [stage for stage, place in enumerate(placement) if place in own]
    local = wiring.around(frozenset(stages), rows)
    summed = [rows.replicas(stage) for stage, _ in local.reduces]
    return local, sorted({placement[stage] for stage in chain(stages, *local.links, *local.ties, *summed)})


def _orders(
    schedule: Schedule, shape: Shape, placement: tuple[int, ...], phase: Phase, devices: Iterable[int]
) -> Iterator[Sequence[Action]]:
    """The actions of each of ``devices`` in ``phase``, every action after its prerequisite.

    The backwards alone run in the reverse order of the forwards. The forwards of a ruled schedule, where there is
    nothing to decide without backwards, run stage by stage.
    """
    for device in devices:
        actions = checked_actions(schedule, shape, placement, device)
        forwards = [action for action in actions if action.kind is _F]
        if isinstance(schedule, RuledSchedule):
            if phase is Phase.STEP:
                check_admission(schedule, forwards, shape, device)
            forwards.sort(key=lambda action: (action.stage, action.microbatch))
            actions.sort(key=lambda action: SCHEDULED_KINDS.index(action.kind))
        if phase is Phase.STEP:
            yield actions
        elif phase is Phase.FORWARD:
            yield forwards
        else:
            yield [Action(_B, i, j) for _, i, j in reversed(forwards)]


class _OrderedCopy(NamedTuple):
    """A copy of one micro-batch. Sorts by when it is needed; of those for one task, the one from furthest is first."""

    consumer: int
    nearness: int
    device: int
    """Where it comes from."""
    copy: int


@dataclass(eq=False)
class _Builder:
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
            admit=lambda action, live: _admits(schedule, rows, action, live),
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
            queue = 1 if source < stage else 2  # ``_USUAL_QUEUES`` are always there.
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
