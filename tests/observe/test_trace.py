"""Chrome traces: slices, arrows, counters and names."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.core.costs import Costs
from asyncpipe.core.events import Dispatch, Outcome, StepCompleted, StepRecord, StepSubmitted, TaskCompleted, TaskFailed
from asyncpipe.core.graph import Phase
from asyncpipe.core.lower import CheckpointMode, lower
from asyncpipe.core.registry import find_schedule
from asyncpipe.core.schedule import Shape
from asyncpipe.core.simulate import simulate
from asyncpipe.core.task import Task, TaskKind
from asyncpipe.observe.trace import to_chrome, write_trace


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


def test_every_task_is_a_slice_with_its_identity_in_microseconds() -> None:
    slices = {event["name"]: event for event in phase(to_chrome([simulated(cost=Costs(copy=0.25))]), "X")}
    assert len(slices) == 49
    assert slices["B(3,1)"] == {
        "ph": "X",
        "name": "B(3,1)",
        "cat": "backward",
        "cname": "good",
        "pid": 2,
        "tid": 4,
        "ts": 8_750_000.0,
        "dur": 2_000_000.0,
        "args": {"step": 0, "microbatch": 3, "stage": 1, "kind": "B"},
    }
    assert slices["C(2,1>0)"]["args"] == {"step": 0, "microbatch": 2, "stage": 0, "kind": "C", "src": 1, "dst": 0}


def test_devices_are_processes_and_lanes_are_threads_numbered_from_1() -> None:
    names = [event for event in phase(to_chrome([simulated()]), "M") if event["name"].endswith("_name")]
    assert [(event["pid"], event.get("tid"), event["args"]["name"]) for event in names] == [
        (1, None, "dev:0"),
        (2, None, "dev:1"),
        (3, None, "dev:2"),
        (1, 1, "compute"),
        (1, 2, "copy-in"),
        (1, 3, "grad-in"),
        (2, 4, "compute"),
        (2, 5, "copy-in"),
        (2, 6, "grad-in"),
        (3, 7, "compute"),
        (3, 8, "copy-in"),
        (3, 9, "grad-in"),
    ]


@given(st.sampled_from(["gpipe", "1f1b"]), st.lists(st.floats(0, 3), min_size=49, max_size=49))
def test_slices_of_a_lane_do_not_overlap(name: str, costs: list[float]) -> None:
    trace = to_chrome([simulated(name, lambda task: costs[task.number])])
    lanes: dict[int, list[dict[str, Any]]] = {}
    for event in phase(trace, "X"):
        lanes.setdefault(event["tid"], []).append(event)
    for slices in lanes.values():
        for first, second in pairwise(sorted(slices, key=lambda event: (event["ts"], event["dur"]))):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-3


def test_an_arrow_leads_from_producer_over_copy_to_consumer() -> None:
    trace = to_chrome([simulated(cost=Costs(copy=0.25))])

    def inside(event: dict[str, Any]) -> str:
        """The slice that a viewer ties the event to: the one around its time on its thread."""
        (found,) = [
            piece["name"]
            for piece in phase(trace, "X")
            if piece["tid"] == event["tid"] and piece["ts"] <= event["ts"] < piece["ts"] + piece["dur"]
        ]
        return str(found)

    arrows: dict[str, list[str]] = {}
    for letter in "stf":
        for event in phase(trace, letter):
            arrows.setdefault(event["id"], []).append(inside(event))
    assert len(arrows) == 16
    assert ["F(2,0)", "C(2,0>1)", "F(2,1)"] in arrows.values()
    assert ["B(0,2)", "C(0,2>1)", "B(0,1)"] in arrows.values()
    assert all(event["bp"] == "e" for event in phase(trace, "f"))


def test_the_counter_follows_the_micro_batches_of_a_stage() -> None:
    trace = to_chrome([simulated("1f1b")])
    counts: dict[str, list[int]] = {}
    for event in phase(trace, "C"):
        counts.setdefault(event["name"], []).append(event["args"]["micro-batches"])
    assert counts == {
        "in flight, stage 0": [1, 2, 3, 2, 3, 2, 1, 0],
        "in flight, stage 1": [1, 2, 1, 2, 1, 2, 1, 0],
        "in flight, stage 2": [1, 0, 1, 0, 1, 0, 1, 0],
    }


def test_a_forward_step_leaves_nothing_in_flight() -> None:
    trace = to_chrome([simulated(phase=Phase.FORWARD)])
    assert {event["args"]["micro-batches"] for event in phase(trace, "C")} == {0, 1}


def test_steps_lie_one_after_the_other_on_their_clock() -> None:
    first, second = moved(simulated(), 7, 1000.0), moved(simulated(), 8, 1030.0)
    trace = to_chrome([first, second])
    begins = {event["args"]["step"]: event["ts"] for event in phase(trace, "X") if event["name"] == "F(0,0)"}
    assert begins == {7: 0.0, 8: 30_000_000.0}
    assert len({event["id"] for event in phase(trace, "s")}) == 32
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
    assert [(event["ts"], event["args"]["micro-batches"]) for event in phase(trace, "C")] == [(0.0, 1), (2e6, 0)]
    assert phase(trace, "s") == []


def test_the_file_is_json(tmp_path: Path) -> None:
    record = simulated()
    write_trace([record], tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")) == to_chrome([record])
    assert to_chrome([])["traceEvents"] == []
