"""What a live view keeps of a run, and its snapshots."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepSubmitted, TaskFailed
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import EdgeTraffic, WorkerChange, WorkerNotes, WorkerState, WorkerUse
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import HangError, HungTaskError, WorkerLostError
from asyncpipe.observe.live import step_data
from asyncpipe.observe.live.view import LiveView, Series


def lowered(name: str = "1f1b", stages: int = 4, microbatches: int = 8, devices: int = 4) -> TaskGraph:
    return lower(find_schedule(name), Shape(stages, microbatches, devices), checkpoint=CheckpointMode("never"))


def slow_stage(task: Task) -> float:
    """Stage 1 takes twice as long, copies a quarter of a unit."""
    return Costs(copy=0.25)(task) * (2.0 if task.stage == 1 and task.kind is not TaskKind.COPY else 1.0)


def fold(view: LiveView) -> dict[str, Any]:
    """The snapshot as a page receives it."""
    state: dict[str, Any] = json.loads(json.dumps(view.snapshot(), allow_nan=False))
    return state


def failed(graph: TaskGraph, error: BaseException, step: int = 3) -> StepRecord:
    number = graph.find(TaskKind.BACKWARD, 2, 1).number
    journal = [
        (5.0, StepSubmitted(step, graph)),
        (6.0, TaskFailed(step, number, error)),
        (6.0, StepCompleted(step, Outcome.FAILED, number, error)),
    ]
    return StepRecord(step, graph, journal, Outcome.FAILED)


# The last step


def test_the_figures_are_those_of_the_report() -> None:
    view, record = LiveView(), simulate(lowered(), slow_stage)
    view.step_completed(record)
    state, result = fold(view), report(record)
    step = state["step"]
    assert (step["schedule"], step["phase"], step["microbatches"]) == ("1f1b", "step", 8)
    assert step["seconds"] == pytest.approx(result.seconds, rel=1e-3)
    assert step["bubble"] == pytest.approx(result.bubble_ratio, rel=1e-3)
    assert [stage["busy"] for stage in step["stages"]] == pytest.approx(list(result.stage_utilization), rel=1e-3)
    assert [stage["in_flight"] for stage in step["stages"]] == list(result.peak_in_flight)
    assert {row["name"]: row["busy"] for row in step["devices"]} == pytest.approx(result.device_utilization, rel=1e-3)
    assert max(range(4), key=lambda stage: step["stages"][stage]["busy"]) == 1


def test_each_task_is_drawn_where_it_ran() -> None:
    view, graph = LiveView(), lowered("gpipe", 2, 3, 2)
    record = simulate(graph, Costs(copy=0.25))
    view.step_completed(record)
    timeline = fold(view)["timeline"]
    assert timeline["rows"] == list(graph.devices)
    assert timeline["count"] == len(timeline["tasks"]) == len(graph.tasks)
    assert [0, 0.0, 1000.0, "F", "F0", 0, 0, None] in timeline["tasks"]
    assert [1, 1000.0, 1250.0, "C", "C0", 1, 0, 0] in timeline["tasks"]
    assert [1, 1250.0, 2250.0, "F", "F0", 1, 0, None] in timeline["tasks"]
    assert timeline["kinds"] == {"F": "forward", "B": "backward", "C": "copy"}
    assert timeline["colours"]["F"] == [TaskKind.FORWARD.colour]


def test_rows_are_those_of_replicas_and_reductions_are_drawn_there() -> None:
    view = LiveView()
    wiring = Wiring.chain(2).in_rows(2, [1, 1])
    view.step_completed(simulate(lower(find_schedule("1f1b"), Shape(4, 4, 4), wiring=wiring), Costs(reduce=1.0)))
    timeline = fold(view)["timeline"]
    assert timeline["replica"] == 2
    assert timeline["kinds"]["A"] == "reduce"
    assert {task[0] for task in timeline["tasks"] if task[3] == "A"} == {0, 1, 2, 3}
    view.step_completed(simulate(lowered()))
    assert fold(view)["timeline"]["replica"] == 0


def test_too_many_tasks_are_counted_and_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    view, graph = LiveView(), lowered()
    monkeypatch.setattr(step_data, "MOST_TASKS", len(graph.tasks) - 1)
    view.step_completed(simulate(graph))
    timeline = fold(view)["timeline"]
    assert (timeline["tasks"], timeline["count"]) == ([], len(graph.tasks))
    assert len(fold(view)["step"]["stages"]) == 4


def test_workers_are_shown_with_what_they_have_sent_since_the_run_began() -> None:
    view, record = LiveView(), simulate(lowered("gpipe", 2, 3, 2))
    view.step_completed(record)
    assert fold(view)["workers"] is None
    version = view.version
    view.worker_changed(WorkerChange("a", WorkerState.UP, 7, ("dev:0",)))
    view.worker_changed(WorkerChange("b", WorkerState.UP, 8, ("dev:1",)))
    assert view.version != version
    (_, row) = fold(view)["workers"]
    unknown = {"resident": None, "round_trip": None, "sent": []}
    assert row == {"name": "b", "state": "up", "how": "", "pid": 8, "devices": ["dev:1"], **unknown}
    use = WorkerUse(5000, {"b": EdgeTraffic(3, 300, 0.25)})
    first = WorkerNotes(WorkerState.UP, 7, ("dev:0",), 0.001, 0.0, use)
    second = WorkerNotes(WorkerState.UP, 8, ("dev:1",), inf, 0.0)
    for _ in range(2):
        view.step_completed(replace(record, notes=StepNotes(workers={"a": first, "b": second})))
    row, other = fold(view)["workers"]
    assert row["sent"] == [{"to": "b", "messages": 6, "bytes": 600, "waited": 0.5}]
    assert (row["resident"], row["round_trip"]) == (5000, 0.001)
    assert (other["sent"], other["resident"], other["round_trip"]) == ([], None, None)
    view.worker_changed(WorkerChange("b", WorkerState.LOST, 8, ("dev:1",), how="was killed by SIGKILL"))
    lost = replace(record, outcome=Outcome.FAILED)
    lost = replace(lost, notes=StepNotes(workers={"a": first, "b": replace(second, state=WorkerState.LOST)}))
    view.step_completed(lost)
    assert [(row["state"], row["how"]) for row in fold(view)["workers"]] == [
        ("up", ""),
        ("lost", "was killed by SIGKILL"),
    ]
    view.worker_changed(WorkerChange("b", WorkerState.UP, 9, ("dev:1",), is_restart=True))
    assert [(row["state"], row["how"], row["pid"]) for row in fold(view)["workers"]][1] == ("up", "", 9)


# What is kept


def test_only_the_newest_record_is_kept() -> None:
    class Mark(list[Any]):
        """A journal that can be referred to weakly."""

    view, graph, marks = LiveView(), lowered(), []
    for step in range(3):
        journal = Mark(simulate(graph).journal)
        marks.append(weakref.ref(journal))
        view.step_completed(StepRecord(step, graph, journal, Outcome.OK))
        view.snapshot()
        del journal
    gc.collect()
    assert [mark() is None for mark in marks] == [True, True, False]


def test_nothing_of_a_failed_step_is_kept_but_a_sentence() -> None:
    class Error(ValueError):
        """Can be referred to weakly, with its frames."""

    view, graph = LiveView(), lowered()
    view.step_completed(simulate(graph))
    error = Error("no")
    mark = weakref.ref(error)
    view.step_completed(failed(graph, error))
    del error
    gc.collect()
    assert mark() is None
    state = fold(view)
    assert state["spoiled"] == {"failed": 1, "cancelled": 0, "last": "Step 3 failed in B(2,1) on dev:1: Error."}
    assert state["step"]["number"] == 0
    view.step_completed(StepRecord(7, graph, [(0.0, StepSubmitted(7, graph))], Outcome.CANCELLED))
    assert fold(view)["spoiled"] == {"failed": 1, "cancelled": 1, "last": "Step 7 was cancelled."}


@pytest.mark.parametrize(("before", "done"), [(0, 0), (0, 6), (4, 2)])
def test_a_failed_step_has_the_number_that_the_job_counts_and_not_its_pool(before: int, done: int) -> None:
    view, graph = LiveView("job", steps=100), lowered()
    view.go_on(before)
    for _ in range(done):
        view.training_step(0.5, 8, 0, 0.1)
    view.step_completed(failed(graph, ValueError(), step=178))
    assert fold(view)["spoiled"]["last"] == f"Step {before + done + 1} failed in B(2,1) on dev:1: ValueError."


def test_of_a_hang_the_page_says_what_hung_and_who_waits() -> None:
    view, graph = LiveView(), lowered()
    waits = ["C(0,0>1) on b waits for F(0,0)"]
    view.step_completed(failed(graph, HungTaskError("F(0,0)", "dev:0", 61.0, 2.0, waits)))
    told = "HungTaskError; it has been computing for 61 s; C(0,0>1) on b waits for F(0,0)."
    assert fold(view)["spoiled"]["last"] == f"Step 3 failed in B(2,1) on dev:1: {told}"
    hang = HangError("worker 'b' does not take what worker 'a' sends", "not taking messages", waits=waits)
    for error in (hang, WorkerLostError("b", "was killed by its controller: /secret", hang=hang)):
        view.step_completed(failed(graph, error))
        told = f"{type(error).__name__}; worker 'b' does not take what worker 'a' sends; {waits[0]}."
        assert fold(view)["spoiled"]["last"] == f"Step 3 failed in B(2,1) on dev:1: {told}"


# Training steps


def test_training_steps_make_a_history() -> None:
    view = LiveView()
    for step in range(1, 31):
        view.training_step(10 / step, samples=4, tokens=400, duration=0.5 if step <= 10 else 0.25)
    state = fold(view)
    assert state["training"] == {"steps": 30, "loss": 0.333333, "seconds": 0.25, "unit": "tokens", "rate": 1600}
    assert state["history"][0] == [1, 10, 0.5, 800]
    assert state["history"][-1] == [30, 0.333333, 0.25, 1600]


@pytest.mark.parametrize("loss", [nan, inf, -inf])
def test_a_loss_that_is_not_finite_is_null(loss: float) -> None:
    view = LiveView()
    view.training_step(2.0, 1, 1, 1.0)
    view.training_step(loss, 1, 1, 1.0)
    state = fold(view)
    assert state["training"]["loss"] is None
    assert [point[1] for point in state["history"]] == [2, None]


# Series


@given(st.integers(1, 3000), st.sampled_from([4, 6, 16, 600]))
def test_a_series_of_any_length_is_bounded_and_loses_nothing(count: int, most: int) -> None:
    series = Series(1, most=most)
    for x in range(count):
        series.add(x)
    points = [point[0] for point in series.points()]
    assert len(points) <= most
    assert len(points) >= min(count, most // 2)
    assert points == sorted(points)
    # The mean of each point but the last is of equally many, and so is the whole run's.
    each = max(round(2 * points[0] + 1), 1)
    whole = len(points) - 1
    assert sum(points[:-1]) * each == pytest.approx(sum(range(whole * each)))
    assert points[-1] == pytest.approx((whole * each + count - 1) / 2)
