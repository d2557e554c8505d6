"""Simulation by hand and by bounds, reports of hand-made journals, and the steady state of steps that overlap."""

from __future__ import annotations

import itertools
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.core.engine.events import (
    Command,
    Dispatch,
    Event,
    Outcome,
    StepCompleted,
    StepFinished,
    StepSubmitted,
    TaskCompleted,
    TaskFailed,
)
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import RELEASING_KINDS, TaskKind
from asyncpipe.core.predict.costs import Costs, Jitter
from asyncpipe.core.predict.report import report, reports, steady_state
from asyncpipe.core.predict.simulate import can_overlap, simulate, simulate_steps
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError

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


# Reports: each number can be told from a drawing.

ORIGIN = 100.0


def record(graph: TaskGraph, ran: dict[str, tuple[float, float]], outcome: Outcome = Outcome.OK) -> StepRecord:
    """A step that was submitted at ``ORIGIN`` and whose tasks ran at these times after that."""
    numbers = {task.id: task.number for task in graph.tasks}
    journal: list[tuple[float, Event | Command]] = [(ORIGIN, StepSubmitted(3, graph))]
    for name, (start, end) in sorted(ran.items(), key=lambda item: item[1][1]):
        journal.append((ORIGIN + start, Dispatch(3, numbers[name])))
        journal.append((ORIGIN + end, TaskCompleted(3, numbers[name], ORIGIN + start, ORIGIN + end)))
    journal.append((ORIGIN + 1000, StepFinished(3, outcome)))
    journal.append((ORIGIN + 1000, StepCompleted(3, outcome)))
    return StepRecord(3, graph, journal, outcome)


PIPE = lower(find_schedule("gpipe"), Shape(2, 2, 2))
#            0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15
# dev:0      ·  F0F0 F1F1F1F1           ·    ·    ·    ·    B1B1B1B1  ·   B0B0B0B0
# dev:1      ·    ·    F0F0   F1F1 B1B1B1B1 B0B0B0B0B0B0
PIPE_TIMES = {
    "F(0,0)": (1.0, 2.0),
    "C(0,0>1)": (2.0, 2.5),
    "F(1,0)": (2.0, 4.0),
    "F(0,1)": (2.5, 3.5),
    "C(1,0>1)": (4.0, 4.5),
    "F(1,1)": (4.5, 5.5),
    "B(1,1)": (5.5, 7.5),
    "C(1,1>0)": (7.5, 8.0),
    "B(0,1)": (7.5, 10.5),
    "B(1,0)": (8.0, 10.0),
    "C(0,1>0)": (10.5, 11.0),
    "B(0,0)": (11.0, 13.0),
}


def test_the_numbers_of_a_step() -> None:
    found = report(record(PIPE, PIPE_TIMES))
    assert found.step == 3
    assert found.seconds == 13.0
    assert found.device_busy == {"dev:0": 1 + 2 + 2 + 2, "dev:1": 1 + 1 + 2 + 3}
    assert found.stage_busy == (7.0, 7.0)
    assert found.device_utilization == {"dev:0": 7 / 13, "dev:1": 7 / 13}
    assert found.stage_utilization == (7 / 13, 7 / 13)
    assert found.bubble_ratio == pytest.approx(1 - 7 / 13)
    assert found.peak_in_flight == (2, 2)


def test_a_failed_step_reports_what_completed() -> None:
    graph = lower(find_schedule("gpipe"), Shape(1, 2, 1))
    base = record(graph, {"F(0,0)": (0.0, 2.0)}, Outcome.FAILED)
    failed = graph.find(*graph.tasks[1][1:4]).number
    journal = [*base.journal[:-2], (ORIGIN + 5.0, TaskFailed(3, failed, RuntimeError())), *base.journal[-2:]]
    found = report(StepRecord(3, graph, journal, Outcome.FAILED))
    assert (found.seconds, found.device_busy, found.peak_in_flight) == (2.0, {"dev:0": 2.0}, (1,))


def test_a_step_in_which_nothing_ran() -> None:
    found = report(record(PIPE, {}, Outcome.CANCELLED))
    assert (found.seconds, found.tasks, found.bound) == (0.0, (), 0.0)
    assert found.device_utilization == {"dev:0": 0.0, "dev:1": 0.0}
    assert found.bubble_ratio == 0.0


# Replicas


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "backward-first"])
def test_a_reduction_begins_with_the_last_gradient_of_its_stage(name: str, shards: bool) -> None:
    """Whatever other stages still have to do, also on the same device; what a device reduces follows each other."""
    stages, costs = 2 * (find_schedule(name).virtual or 1), Costs(reduce=1.5, gather=0.25, update=0.5)
    wiring = Wiring.chain(stages).in_rows(3, [2] * stages, shards=shards)
    graph = lower(find_schedule(name), Shape(3 * stages, 12, 6), wiring=wiring)
    done = report(simulate(graph, costs)).tasks
    last = [0.0] * stages
    for time in done:
        if time.task.kind in RELEASING_KINDS:
            last[time.task.stage % stages] = max(last[time.task.stage % stages], time.end)
    free = dict.fromkeys(graph.devices, 0.0)
    buckets: list[int | None] = []
    for task, start, end in ((time.task, time.start, time.end) for time in done if time.task.kind is TaskKind.REDUCE):
        assert start == max(last[task.stage % stages], free[task.lane.device])
        free[task.lane.device] = end
        buckets += [task.bucket] if task.stage == 0 else []
    assert buckets == [0, 1]


# Steps that overlap: how soon one follows the other, by hand, by bounds, and as the documentation says.

SCHEDULES = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text(encoding="utf-8")
STEADY = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \| ([\d.]+) % \|$", SCHEDULES, re.MULTILINE)
NAMES = ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zbv"]


def graph_of(name: str, devices: int, microbatches: int, *, updates: bool = False) -> TaskGraph:
    schedule = find_schedule(name)
    stages = devices * (schedule.virtual or 1)
    wiring = Wiring(Wiring.chain(stages).links, updates=tuple(range(stages)) if updates else ())
    return lower(schedule, Shape(stages, microbatches, devices), wiring=wiring)


def test_steps_of_a_rule_and_steps_with_tied_parameters_do_not_overlap() -> None:
    tied = lower(find_schedule("zb-h2"), Shape(3, 5, 3), wiring=Wiring(((0, 1), (1, 2)), ((0, 2),), (0, 1, 2)))
    for graph in (graph_of("backward-first", 3, 4), tied):
        assert not can_overlap(graph)
        assert steady_state(reports(simulate_steps(graph, steps=3))).seconds == report(simulate(graph)).seconds
    # The second step must not copy the tied parameters before their owner has updated them.
    first, second = reports(simulate_steps(tied, steps=2))
    copied = next(time.start for time in second.tasks if time.task.id == "C(0>2)")
    assert copied >= next(time.end for time in first.tasks if time.task.id == "U(0)") > 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.3, 3.0]),
    st.sampled_from([0.0, 0.4]),
    st.integers(0, 99),
    st.integers(1, 3),
    st.booleans(),
)
def test_steady_state_lies_between_the_busiest_device_and_a_single_step(
    name: str, p: int, m: int, copy: float, sigma: float, seed: int, ahead: int, updates: bool
) -> None:
    graph, cost = graph_of(name, p, m, updates=updates), Jitter(Costs(copy=copy), sigma, seed)
    records = simulate_steps(graph, cost, steps=5, ahead=ahead)
    single, found = report(simulate(graph, cost)), steady_state(reports(records))
    assert max(single.device_busy.values()) - 1e-9 <= found.seconds <= single.seconds + 1e-9
    assert -1e-9 <= found.bubble_ratio <= single.bubble_ratio + 1e-9
    ends = [step.end for step in reports(records)]
    assert [later - end for end, later in pairwise(ends)] == pytest.approx([found.seconds] * 4), "even from the start"
    for earlier, later in pairwise(reports(records)):
        for device in graph.devices:
            last = max(t.end for t in earlier.tasks if t.task.lane.device == device and is_compute(t.task.lane.queue))
            begin = min(t.start for t in later.tasks if t.task.lane.device == device and is_compute(t.task.lane.queue))
            assert begin >= last - 1e-9


def is_compute(queue: Queue) -> bool:
    return queue is Queue.COMPUTE


def test_what_shows_no_steady_state_is_refused() -> None:
    with pytest.raises(OptionError, match="two steps or more, got 1"):
        steady_state([report(simulate(graph_of("1f1b", 2, 2)))])
    with pytest.raises(OptionError, match="ahead must be a number of steps, zero or more, got -1"):
        simulate_steps(graph_of("1f1b", 2, 2), steps=2, ahead=-1)


def test_the_documentation_has_the_ordered_schedules() -> None:
    assert [row[0] for row in STEADY] == [
        *("gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb"),
        *("zbv", "v-half", "v-min", "dualpipev", "hanayo"),
    ]


@pytest.mark.parametrize("row", STEADY, ids=lambda row: row[0])
def test_the_documented_bubbles_are_those_of_the_simulator(row: tuple[str, ...]) -> None:
    graph = graph_of(row[0], 4, 8)
    share = 4 / graph.shape.stages
    costs = Costs(share, None, share, 0.0, share, share)
    single, found = report(simulate(graph, costs)), steady_state(reports(simulate_steps(graph, costs, steps=4)))
    figures = single.seconds, single.bubble_ratio * 100, found.seconds, abs(found.bubble_ratio) * 100
    assert [f"{figure:.3g}" if number % 2 == 0 else f"{figure:.1f}" for number, figure in enumerate(figures)] == [
        *row[1:]
    ]
