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

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.graph_builder import GraphBuilder
from asyncpipe.core.graph.offload import offloaded
from asyncpipe.core.graph.rows import Rows
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.graph.task_graph import Phase, TaskGraph, Wiring
from asyncpipe.core.kinds import SCHEDULED_KINDS, TaskKind
from asyncpipe.core.schedules.protocol import Action, RuledSchedule, Schedule, Shape
from asyncpipe.core.schedules.validate import check_admission, check_shape, checked_actions, checked_placement
from asyncpipe.errors import ScheduleError

__all__ = ["lower"]

_F, _B = TaskKind.FORWARD, TaskKind.BACKWARD
_USUAL_QUEUES = (Queue.COMPUTE, Queue.COPY_IN, Queue.GRAD_IN)
"""Those of graphs that offload nothing and have no replicas."""


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
        check_shape(schedule, one)
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
    builder = GraphBuilder(schedule, shape, placement, checkpoint, phase, local, near, queues)
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
