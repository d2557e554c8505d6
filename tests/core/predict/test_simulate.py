"""Simulation: the scheduler on virtual time, by hand for tiny graphs and by bounds for random ones."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepSubmitted, TaskCompleted
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule

SHAPES = st.builds(
    lambda name, p, v, m: (name, Shape(p * (v if name == "interleaved" else 1), m, p)),
    st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 8),
)


def times(record: StepRecord) -> dict[str, tuple[float, float]]:
    return {time.task.id: (time.start, time.end) for time in report(record).tasks}


def test_two_stages_by_hand() -> None:
    graph = lower(find_schedule("gpipe"), Shape(2, 1, 2))
    assert times(simulate(graph, Costs(forward=3, backward=5, copy=0.5))) == {
        "F(0,0)": (0.0, 3.0),
        "C(0,0>1)": (3.0, 3.5),
        "F(0,1)": (3.5, 6.5),
        "B(0,1)": (6.5, 11.5),
        "C(0,1>0)": (11.5, 12.0),
        "B(0,0)": (12.0, 17.0),
    }


@settings(max_examples=60)
@given(SHAPES, st.tuples(*[st.integers(0, 5)] * 4), st.sampled_from(CheckpointMode), st.integers(1, 20))
def test_every_run_keeps_to_its_graph(
    named: tuple[str, Shape], costs: tuple[int, int, int, int], mode: CheckpointMode, in_flight: int
) -> None:
    name, shape = named
    graph = lower(find_schedule(name), shape, checkpoint=mode)
    cost = Costs(*costs)
    record = simulate(graph, cost, in_flight=in_flight)
    assert record.outcome is Outcome.OK
    assert isinstance(record.journal[0][1], StepSubmitted)
    assert isinstance(record.journal[-1][1], StepCompleted)
    assert [at for at, _ in record.journal] == sorted(at for at, _ in record.journal), "time goes on"
    ran = {event.task: event for _, event in record.journal if isinstance(event, TaskCompleted)}
    assert sorted(ran) == list(range(len(graph.tasks)))
    for task, event in ran.items():
        assert event.ended - event.started == cost(graph.tasks[task])
        assert all(ran[before].ended <= event.started for before in graph.dependencies[task])
    assert_lanes_run_one_task_at_a_time(graph, ran)
    summary = report(record)
    assert summary.seconds >= summary.bound - 1e-9
    assert simulate(graph, cost, in_flight=in_flight).journal == record.journal, "simulation is deterministic"


def assert_lanes_run_one_task_at_a_time(graph: TaskGraph, ran: dict[int, TaskCompleted]) -> None:
    for lane in graph.lanes:
        spans = sorted((ran[task.number].started, ran[task.number].ended) for task in graph.tasks if task.lane == lane)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
