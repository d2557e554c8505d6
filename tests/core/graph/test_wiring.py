"""Links, ties, updates and phases: what a task graph has beside the schedule's actions."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from invariants import check_scheduler

from asyncpipe.core.engine.events import (
    Dispatch,
    GateOpened,
    StepSubmitted,
    TaskIssued,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue, Task
from asyncpipe.core.graph.task_graph import Phase, Reason, TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import InvalidTransition

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def graph_of(
    name: str = "gpipe",
    shape: Shape = Shape(4, 3, 4),  # noqa: B008 # immutable
    *,
    links: tuple[tuple[int, int], ...] = ((0, 1), (1, 2), (2, 3)),
    ties: tuple[tuple[int, int], ...] = (),
    updates: tuple[int, ...] = (),
    phase: Phase = Phase.STEP,
    checkpoint: str = "never",
) -> TaskGraph:
    wiring = Wiring(links, ties, updates)
    return lower(find_schedule(name), shape, checkpoint=CheckpointMode(checkpoint), phase=phase, wiring=wiring)


def before(graph: TaskGraph, task: Task) -> set[str]:
    return {graph.tasks[dependency].id for dependency in graph.dependencies[task.number]}


def reads(graph: TaskGraph, task: Task) -> set[str]:
    return {graph.tasks[dependency].id for dependency in graph.read_by(task.number)}


def copies(graph: TaskGraph) -> list[str]:
    return sorted(task.id for task in graph.tasks if task.kind is TaskKind.COPY)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_a_skip_is_one_copy_to_its_user_and_one_back(name: str, checkpoint: str) -> None:
    plain = graph_of(name, checkpoint=checkpoint)
    graph = graph_of(name, checkpoint=checkpoint, links=((0, 1), (0, 3), (1, 2), (2, 3)))
    skips = {f"C({i},0>3)" for i in range(3)} | {f"C({i},3>0)" for i in range(3)}
    assert set(copies(graph)) - set(copies(plain)) == skips
    assert len(copies(graph)) == len(copies(plain)) + len(skips)
    for i in range(3):
        onward, back = graph.find(TaskKind.COPY, i, 3, 0), graph.find(TaskKind.COPY, i, 0, 3)
        assert reads(graph, onward) == {f"F({i},0)"}
        assert reads(graph, back) == {f"B({i},3)"}
        assert onward.id in before(graph, graph.find(TaskKind.FORWARD, i, 3))
        assert back.id in before(graph, graph.find(TaskKind.BACKWARD, i, 0))


U_SHAPED = ((0, 1), (0, 3), (1, 2), (1, 3), (2, 3))


@pytest.mark.promise("Everything ends", "A copy between devices does not wait for a copy that is needed later.")
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_copies_of_a_lane_arrive_in_the_order_in_which_they_are_needed(name: str) -> None:
    graph = graph_of(name, Shape(4, 6, 4), links=U_SHAPED)
    for lane in graph.lanes:
        arriving = [task for task in graph.tasks if task.lane == lane and task.kind is TaskKind.COPY]
        needed = [
            min(graph.local_dependents[task.number], key=lambda k: graph.tasks[k].kind is TaskKind.COPY)
            for task in arriving
        ]
        assert needed == sorted(needed), lane
        sources = [task.source for task in arriving]
        ordered = {edge.task for edge in graph.edges() if edge.reason is Reason.ORDER}
        for previous, source, task in zip(sources, sources[1:], arriving[1:], strict=False):
            assert (task.number in ordered) == (source != previous), task


@pytest.mark.promise("Everything ends", "A copy between devices does not wait for a copy that is needed later.")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_skips_that_a_host_issues_far_ahead_do_not_block_copies_that_are_needed_before(name: str, seed: int) -> None:
    """On an asynchronous device. A lane runs what it gets in that order; the threads of devices are at any speed."""
    graph = graph_of(name, Shape(4, 8, 4), links=U_SHAPED)
    cost = Costs(forward=1.0, backward=2.0, copy=0.1)
    state, chance = SchedulerState(in_flight=1000), random.Random(seed)
    queues: dict[str, deque[Task]] = {device: deque() for device in graph.devices}
    free: dict[Lane, float] = {}
    ends: dict[int, float] = {}
    commands = state.handle(StepSubmitted(0, graph), 0.0)
    while True:
        for command in commands:
            if isinstance(command, Dispatch):
                task = graph.tasks[command.task]
                queues[task.lane.device].append(task)
        if not (waiting := [queue for queue in queues.values() if queue]):
            break
        task = chance.choice(waiting).popleft()
        start = max([free.get(task.lane, 0.0), *(ends[number] for number in graph.dependencies[task.number])])
        ends[task.number] = free[task.lane] = start + cost(task)
        commands = state.handle(TaskIssued(0, task.number), 0.0)
    assert len(ends) == len(graph.tasks)
    assert max(ends.values()) <= 1.02 * report(simulate(graph, cost)).seconds


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_tied_parameters_travel_once_a_step(name: str) -> None:
    graph = graph_of(name, ties=((0, 2), (0, 3)), updates=(0, 1, 2, 3))
    assert [task.id for task in graph.tasks if task.microbatch == WHOLE_STEP and task.kind is TaskKind.COPY] == [
        "C(0>2)",
        "C(0>3)",
        "C(2>0)",
        "C(3>0)",
    ]
    bring, back = graph.find(TaskKind.COPY, WHOLE_STEP, 3, 0), graph.find(TaskKind.COPY, WHOLE_STEP, 0, 3)
    assert (bring.lane.queue, bring.lane.device, before(graph, bring)) == (Queue.COPY_IN, "dev:3", set())
    assert (back.lane.queue, back.lane.device, before(graph, back)) == (Queue.GRAD_IN, "dev:0", {last(graph, 3)})
    assert bring.id in before(graph, graph.find(TaskKind.FORWARD, 0, 3))
    total = graph.find(TaskKind.SUM, WHOLE_STEP, 0)
    assert (total.id, before(graph, total)) == ("S(0)", {last(graph, 0), "C(2>0)", "C(3>0)"})
    assert before(graph, graph.find(TaskKind.UPDATE, WHOLE_STEP, 0)) == {"S(0)"}
    assert before(graph, graph.find(TaskKind.UPDATE, WHOLE_STEP, 2)) == {last(graph, 2)}
    assert {edge.reason for edge in graph.edges() if edge.task == total.number} == {Reason.DATA, Reason.COPY}


@pytest.mark.parametrize("shards", [None, False, True], ids=["one row", "replicas", "shards"])
def test_updates_wait_for_the_norm_of_all_gradients(shards: bool | None) -> None:
    """Each stage but one sends a number and gets one, whatever the rows."""
    wiring, rows = Wiring(((0, 1), (1, 2)), updates=(0, 1, 2), norm=0), 1 if shards is None else 2
    if shards is not None:
        wiring = replace(wiring.in_rows(rows, [1, 1, 1], shards=shards), norm=0)
    schedule, shape = find_schedule("1f1b"), Shape(3 * rows, 4 * rows, 3 * rows)
    graph = lower(schedule, shape, wiring=wiring)
    counted = range(3 * rows if shards else 3)
    norms = [task.stage for task in graph.tasks if task.kind is TaskKind.NORM]
    assert (sorted(norms), norms[-1]) == ([*counted], 0), "the last one adds up"
    complete = {None: lambda j: last(graph, j), False: "G({},0)".format, True: "A({},0)".format}[shards]
    for j in counted:
        others = {f"N({other})" for other in counted[1:]} if j == 0 else set()
        assert before(graph, graph.find(TaskKind.NORM, WHOLE_STEP, j)) == {complete(j), *others}
    for j in range(3 * rows):
        assert before(graph, graph.find(TaskKind.UPDATE, WHOLE_STEP, j)) == {complete(j), "N(0)"}
    assert not any(
        task.kind is TaskKind.NORM for task in lower(schedule, shape, wiring=replace(wiring, updates=())).tasks
    )
    seconds, bare = (report(simulate(graph, Costs(norm=norm, update=1.0))).seconds for norm in (0.5, 0.0))
    assert seconds == bare + (1.0 if shards else 0.5), "other norms come early"


def last(graph: TaskGraph, stage: int) -> str:
    """The last backward of a stage in the order of its device."""
    return [t.id for t in graph.tasks if t.kind is TaskKind.BACKWARD and t.stage == stage][-1]


@pytest.mark.parametrize(("name", "shape"), [("gpipe", Shape(3, 4, 3)), ("1f1b", Shape(3, 4, 3))])
def test_the_backward_phase_is_figure_2(name: str, shape: Shape) -> None:
    graph = graph_of(name, shape, links=((0, 1), (1, 2)), phase=BACKWARD, checkpoint="except_last")
    assert [graph.tasks[gated].id for gated in graph.gates] == ["B(0,2)", "B(1,2)", "B(2,2)", "B(3,2)"]
    for i, j in ((i, j) for i in range(4) for j in range(3)):
        expected = {f"B({i + 1},{j})"} if i < 3 else set()
        recomputed = expected | ({f"R({i},{j})"} if i < 3 else set())
        copied = {f"C({i},{j + 1}>{j})"} if j < 2 else set()
        assert before(graph, graph.find(TaskKind.BACKWARD, i, j)) == recomputed | copied
        if i < 3:
            assert before(graph, graph.find(TaskKind.RECOMPUTE, i, j)) == expected


def test_a_gate_holds_its_backward_and_nothing_else() -> None:
    graph = graph_of(phase=BACKWARD, checkpoint="always", shape=Shape(2, 2, 2), links=((0, 1),))
    state = SchedulerState()
    commands = state.handle(StepSubmitted(0, graph), 0.0)
    dispatched = {graph.tasks[c.task].id for c in commands if isinstance(c, Dispatch)}
    assert dispatched == {"R(1,0)", "R(1,1)"}
    assert state.handle(GateOpened(0, 0), 0.0) == []
    opened = state.handle(GateOpened(0, 1), 0.0)
    assert {graph.tasks[c.task].id for c in opened if isinstance(c, Dispatch)} == {"B(1,1)", "R(0,1)", "B(0,1)"}
    check_scheduler(state)
    with pytest.raises(InvalidTransition):
        state.handle(GateOpened(0, 1), 0.0)
    with pytest.raises(InvalidTransition):
        state.handle(GateOpened(7, 0), 0.0)
