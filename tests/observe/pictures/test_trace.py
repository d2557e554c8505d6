"""Chrome traces: slices, steps and names. Counters and the format are tested in files of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncpipe.core.engine.events import Dispatch, Outcome, StepCompleted, StepSubmitted, TaskCompleted, TaskFailed
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.pictures.trace import to_chrome, write_trace


def simulated(
    name: str = "gpipe", cost: Callable[[Task], float] | None = None, *, phase: Phase = Phase.STEP
) -> StepRecord:
    shape = Shape(3, 4, 3)
    return simulate(lower(find_schedule(name), shape, checkpoint=CheckpointMode.EXCEPT_LAST, phase=phase), cost)


def moved(record: StepRecord, step: int, seconds: float) -> StepRecord:
    """The same step, under another number and later on the clock."""
    journal: list[Any] = []
    for at, event in record.journal:
        if isinstance(event, StepSubmitted):
            event = StepSubmitted(step, event.graph)
        elif isinstance(event, TaskCompleted):
            event = TaskCompleted(step, event.task, event.started + seconds, event.ended + seconds)
        journal.append((at + seconds, event))
    return StepRecord(step, record.graph, journal, record.outcome)


def phase(trace: dict[str, Any], letter: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == letter]


def tasks(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in phase(trace, "X") if event["cat"] != "step"]


def steps(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in phase(trace, "X") if event["cat"] == "step"]


def test_every_task_is_a_slice_with_its_identity_in_microseconds() -> None:
    slices = {event["name"]: event for event in tasks(to_chrome([simulated(cost=Costs(copy=0.25))]))}
    assert len(slices) == 49
    assert slices["B(3,1)"] == {
        "ph": "X",
        "name": "B(3,1)",
        "cat": "backward",
        "cname": "good",
        "pid": 13,
        "tid": 4,
        "ts": 8_750_000.0,
        "dur": 2_000_000.0,
        "args": {
            "step": 0,
            "microbatch": 3,
            "stage": 1,
            "kind": "B",
            "waited_for": "C(3,2>1)",
            "dependency_us": 3_250_000.0,
            "copy_us": 250_000.0,
        },
    }
    copy = slices["C(2,1>0)"]["args"]
    assert {key: copy[key] for key in ("src", "dst", "waited_for")} == {"src": 1, "dst": 0, "waited_for": "B(2,1)"}


def test_devices_are_processes_and_lanes_are_threads_numbered_from_1() -> None:
    names = [event for event in phase(to_chrome([simulated()]), "M") if event["name"].endswith("_name")]
    assert [(event["pid"], event.get("tid"), event["args"]["name"]) for event in names] == [
        (11, None, "steps"),
        (12, None, "dev:0"),
        (13, None, "dev:1"),
        (14, None, "dev:2"),
        (12, 1, "compute"),
        (12, 2, "copy-in"),
        (12, 3, "grad-in"),
        (13, 4, "compute"),
        (13, 5, "copy-in"),
        (13, 6, "grad-in"),
        (14, 7, "compute"),
        (14, 8, "copy-in"),
        (14, 9, "grad-in"),
        (11, 10, "step"),
    ]


def test_copies_carry_the_bytes_that_they_brought() -> None:
    record = simulated()
    first, second = (record.graph.find(TaskKind.COPY, i, 1, 0).number for i in (0, 1))
    record.notes.copied[first] = 4096
    slices = {event["name"]: event["args"] for event in tasks(to_chrome([record]))}
    assert slices["C(0,0>1)"]["bytes"] == 4096
    assert "bytes" not in slices[record.graph.tasks[second].id]


def test_steps_lie_one_after_the_other_on_their_clock() -> None:
    first, second = moved(simulated(), 7, 1000.0), moved(simulated(), 8, 1030.0)
    trace = to_chrome([first, second])
    begins = {event["args"]["step"]: event["ts"] for event in tasks(trace) if event["name"] == "F(0,0)"}
    assert begins == {7: 0.0, 8: 30_000_000.0}
    assert [(event["name"], event["ts"], event["dur"]) for event in steps(trace)] == [
        ("step 7", 0.0, 21_000_000.0),
        ("step 8", 30_000_000.0, 21_000_000.0),
    ]
    assert len({event["tid"] for event in steps(trace)}) == 1
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)


def test_a_failed_step_shows_the_failure_and_ends_what_was_in_flight() -> None:
    graph = simulated().graph
    first, second = graph.find(TaskKind.FORWARD, 0, 0).number, graph.find(TaskKind.FORWARD, 1, 0).number
    copy = graph.find(TaskKind.COPY, 0, 1, 0).number
    error = ValueError("no")
    journal = [
        (5.0, StepSubmitted(3, graph)),
        (5.0, Dispatch(3, first)),
        (6.0, TaskCompleted(3, first, 5.0, 6.0)),
        (6.5, TaskCompleted(3, copy, 6.0, 6.5)),
        (7.0, TaskFailed(3, second, error)),
        (7.0, StepCompleted(3, Outcome.FAILED, second, error)),
    ]
    trace = to_chrome([StepRecord(3, graph, journal, Outcome.FAILED)])
    (failure,) = phase(trace, "i")
    assert (failure["name"], failure["ts"], failure["tid"]) == ("F(1,0) failed: ValueError", 2e6, 1)
    in_flight = [(event["ts"], event["args"]["micro-batches in flight"]) for event in phase(trace, "C")]
    assert in_flight == [(0.0, 1), (2e6, 0)]
    (step,) = steps(trace)
    assert (step["name"], step["cname"], step["dur"]) == ("step 3 failed", "terrible", 2e6)
    assert (step["args"]["outcome"], step["args"]["error"]) == ("failed", "F(1,0): ValueError")
    assert "bubble_ratio" not in step["args"]


# Steps


def test_steps_that_overlap_get_rows_of_their_own() -> None:
    """Devices that run ahead, or several jobs: at 0, 10 and 25, each 21 long."""
    trace = to_chrome([moved(simulated(), number, seconds) for number, seconds in enumerate((25.0, 0.0, 10.0))])
    rows = {event["name"]: event["tid"] for event in steps(trace)}
    assert rows == {"step 1": 10, "step 2": 11, "step 0": 10}
    names = {e["tid"]: e["args"]["name"] for e in phase(trace, "M") if e["name"] == "thread_name"}
    assert (names[10], names[11]) == ("row 1", "row 2")


# Time


def test_the_file_is_json(tmp_path: Path) -> None:
    record = simulated()
    write_trace([record], tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")) == to_chrome([record])
    assert to_chrome([])["traceEvents"] == []
