"""Idle time: every idle second of a device has one reason, and busy and idle seconds add up to the step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.core.engine.events import Outcome, StepSubmitted, TaskCompleted
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.idle_reasons import IdleReason, stage_idle, waits
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import SimulatedJob, simulate, simulate_jobs
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.metrics.fold import fold
from asyncpipe.observe.metrics.graph_arrays import GraphArrays
from asyncpipe.observe.metrics.step_arrays import StepArrays
from asyncpipe.observe.metrics.totals import Totals
from asyncpipe.observe.pictures.svg import svg_timeline
from asyncpipe.observe.pictures.timeline import text_timeline
from asyncpipe.observe.pictures.trace import to_chrome


def lowered(name: str = "gpipe", shape: Shape = Shape(3, 4, 3), checkpoint: str = "never") -> TaskGraph:  # noqa: B008
    return lower(find_schedule(name), shape, checkpoint=CheckpointMode(checkpoint))


def folded(record: StepRecord) -> Totals:
    totals = Totals()
    fold(totals, [StepArrays(record, 0.0)], GraphArrays(record.graph))
    return totals


def busy(record: StepRecord) -> dict[tuple[int, str], float]:
    """Seconds by stage and device."""
    found = folded(record).counters["stage_busy_seconds"]
    return {(int(stage), device): seconds for (stage, device), seconds in found.items()}


def idle(record: StepRecord) -> dict[tuple[int, str, IdleReason], float]:
    """Seconds by stage, device and reason, where there are any; the same in metrics, pictures and page."""
    found = folded(record).counters["stage_idle_seconds"]
    assert min(found.values()) >= 0
    assert {reason for _, _, reason in found} == set(IdleReason)
    for stage, shown in enumerate(stage_idle(record, report(record))):
        for reason, seconds in shown.items():
            counted = sum(value for (at, _, why), value in found.items() if (at, why) == (str(stage), reason))
            assert seconds == pytest.approx(counted, abs=1e-9), (stage, reason)
    return {
        (int(stage), device, IdleReason(reason)): seconds
        for (stage, device, reason), seconds in found.items()
        if seconds
    }


def seconds_by_reason(cost: Costs) -> dict[str, dict[str, float]]:
    """GPipe, 2 stages, 1 micro-batch: F(0,0) C F(0,1) B(0,1) C B(0,0)."""
    graph = lowered(shape=Shape(2, 1, 2))
    found: dict[str, dict[str, float]] = {device: {} for device in graph.devices}
    for (_, device, reason), seconds in idle(simulate(graph, cost)).items():
        found[device][reason.value] = seconds
    return found


def test_a_gap_is_divided_between_dependency_and_copy() -> None:
    assert seconds_by_reason(Costs(forward=1, backward=2, copy=0.5)) == {
        "dev:0": {"dependency": 0.5 + 1 + 2, "copy": 0.5},
        "dev:1": {"dependency": 1, "copy": 0.5, "drain": 0.5 + 2},
    }
    assert seconds_by_reason(Costs(forward=1, backward=2, copy=0)) == {
        "dev:0": {"dependency": 3},
        "dev:1": {"dependency": 1, "drain": 2},
    }


def test_a_task_that_starts_late_waited_for_its_dispatch() -> None:
    graph = lowered(shape=Shape(2, 1, 2))
    forward, copy, second = (
        graph.find(TaskKind.FORWARD, 0, 0).number,
        graph.find(TaskKind.COPY, 0, 1, 0).number,
        graph.find(TaskKind.FORWARD, 0, 1).number,
    )
    journal = [
        (10.0, StepSubmitted(0, graph)),
        (12.0, TaskCompleted(0, forward, 10.25, 12.0)),
        (13.0, TaskCompleted(0, copy, 12.5, 13.0)),
        (15.0, TaskCompleted(0, second, 13.5, 15.0)),
    ]
    assert idle(StepRecord(0, graph, journal, Outcome.CANCELLED)) == {
        (0, "dev:0", IdleReason.DISPATCH): 0.25,
        (0, "dev:0", IdleReason.DRAIN): 3.0,
        (1, "dev:1", IdleReason.DEPENDENCY): 2.0,
        (1, "dev:1", IdleReason.COPY): 0.5,
        (1, "dev:1", IdleReason.DISPATCH): 1.0,
    }


def test_what_is_on_its_way_between_workers_is_an_edge() -> None:
    """A message is here at 1.75, and its copy begins at 2; one without a copy is here at 3 and goes before it."""
    graph = lowered(shape=Shape(2, 1, 2))
    onward, back = (graph.find(TaskKind.COPY, 0, stage, 1 - stage).number for stage in (1, 0))
    numbers = [graph.find(TaskKind.FORWARD, 0, 0).number, onward, graph.find(TaskKind.FORWARD, 0, 1).number]
    numbers += [graph.find(TaskKind.BACKWARD, 0, 1).number, back, graph.find(TaskKind.BACKWARD, 0, 0).number]
    spans = [(0, 1), (2, 2.25), (2.5, 3.5), (3.5, 5.5), (6.25, 6.5), (8, 9)]
    done = [TaskCompleted(0, task, 10 + start, 10 + end) for task, (start, end) in zip(numbers, spans, strict=True)]
    journal = [(10.0, StepSubmitted(0, graph)), *((event.ended, event) for event in done)]
    # The backward also waits for a word from the other worker, which comes behind its gradient.
    notes = StepNotes(arrived={onward: 11.75, back: 16.0, numbers[-1]: 17.0})
    record = StepRecord(0, graph, journal, Outcome.OK, notes)
    assert idle(record) == {
        (1, "dev:1", IdleReason.DEPENDENCY): 1.0,
        (1, "dev:1", IdleReason.EDGE): 0.75,
        (1, "dev:1", IdleReason.DISPATCH): 0.25 + 0.25,
        (1, "dev:1", IdleReason.COPY): 0.25,
        (1, "dev:1", IdleReason.DRAIN): 3.5,
        (0, "dev:0", IdleReason.DEPENDENCY): 4.5,
        (0, "dev:0", IdleReason.EDGE): 1.5,
        (0, "dev:0", IdleReason.DISPATCH): 1.0,
    }
    assert report(record).arrived == {onward: 11.75 - 10, back: 6.0, numbers[-1]: 7.0}
    told = waits(record, report(record))
    assert (told[onward].name, told[onward].until) == ("F(0,0) of another worker, on its way", 1.75)


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    st.sampled_from(["never", "always", "except_last"]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.data(),
)
def test_busy_and_idle_of_a_device_add_up_to_the_step(
    name: str, checkpoint: str, devices: int, microbatches: int, data: st.DataObject
) -> None:
    stages = 2 * devices if name == "interleaved" else devices
    graph = lowered(name, Shape(stages, microbatches, devices), checkpoint)
    cost = st.floats(0, 10)
    costs = data.draw(st.lists(cost, min_size=len(graph.tasks), max_size=len(graph.tasks)))
    record = simulate(graph, lambda task: costs[task.number])
    result, computed, stood = report(record), busy(record), idle(record)
    for device in graph.devices:
        working = sum(seconds for (_, where), seconds in computed.items() if where == device)
        waiting = sum(seconds for (_, where, _), seconds in stood.items() if where == device)
        assert working == pytest.approx(result.device_busy[device])
        assert working + waiting == pytest.approx(result.seconds)


@pytest.mark.promise(
    "Reported, not silent", "Time in which another job had the device is not counted as a delay of the scheduler."
)
@pytest.mark.parametrize("copy", [0.0, 0.002])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_what_waits_for_another_job_is_no_fault_of_the_scheduler(schedule: str, background: bool, copy: float) -> None:
    """In virtual time the scheduler takes none: all that one of two jobs loses beyond what it loses alone is shared."""
    graph = lowered(schedule, Shape(3, 6, 3))
    costs = Costs(0.01, 0.02, copy=copy), Costs(0.013, 0.021, copy=copy)
    shares = Share("a"), Share("b", 3.0, background=background)
    both = [SimulatedJob(graph, *each, steps=6, pause=0.01) for each in zip(costs, shares, strict=True)]
    lost = []
    for run in simulate_jobs(both):
        records = [record for record in run.records if record.outcome is Outcome.OK]
        found = [seconds for record in records for seconds in idle(record).items()]
        assert sum(seconds for (_, _, reason), seconds in found if reason is IdleReason.DISPATCH) < 1e-9
        lost.append(sum(seconds for (_, _, reason), seconds in found if reason is IdleReason.SHARED))
        for record in records:
            whole = sum(busy(record).values()) + sum(idle(record).values())
            assert whole == pytest.approx(len(graph.devices) * report(record).seconds)
    assert all(seconds > 0.01 for seconds in lost)
    (alone,) = simulate_jobs(both[:1])
    assert all(reason is not IdleReason.SHARED for record in alone.records for _, _, reason in idle(record))


def test_pictures_show_where_another_job_had_the_device() -> None:
    graph = lowered(shape=Shape(1, 2, 1))
    lane = graph.lanes[0]
    journal = [
        (10.0, StepSubmitted(0, graph)),
        (12.0, TaskCompleted(0, 0, 10.0, 12.0)),
        (17.0, TaskCompleted(0, 1, 16.0, 17.0)),
    ]
    # Another job has the device from 8 to 10 and from 12 to 15.
    notes = StepNotes(taken={lane: ((8.0, 0.0), (10.0, 2.0), (12.0, 2.0), (15.0, 5.0))})
    record = StepRecord(0, graph, journal, Outcome.CANCELLED, notes)
    assert idle(record) == {(0, "dev:0", IdleReason.SHARED): 3.0, (0, "dev:0", IdleReason.DISPATCH): 1.0}
    result = report(record)
    assert result.taken == {"dev:0": ((2.0, 5.0),)}
    told = waits(record, result)[1]
    assert (told.name, told.until) == ("another job, which had the device", 5.0)
    assert told.idle[IdleReason.SHARED] == 3.0
    text = text_timeline(record, virtual=True)
    assert "dev:0  F0─── ░░░░░░░░░···F1" in text
    assert "░ another job had the device" in text
    assert 'class="taken"' in svg_timeline(record, virtual=True)
    [slice_] = [event for event in to_chrome([record])["traceEvents"] if event.get("cat") == "shared"]
    assert (slice_["name"], slice_["ts"], slice_["dur"]) == ("another job", 2e6, 3e6)
