"""Chrome traces: slices, steps, names, counters, and the format.

A JSON schema describes the format; some tests check rules that a schema cannot express.

``tests/node/perfetto.mjs`` shows a trace in Perfetto's own UI and tells what its importer complains about.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.core.engine.events import Dispatch, Outcome, StepCompleted, StepSubmitted, TaskCompleted, TaskFailed
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import Phase, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.memory import StageMemory
from asyncpipe.core.predict.simulate import simulate, simulate_steps
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import WorkerNotes, WorkerState
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.pictures.trace import to_chrome, write_trace


def simulated(
    name: str = "gpipe",
    cost: Callable[[Task], float] | None = None,
    shape: Shape = Shape(3, 4, 3),  # noqa: B008 # immutable
    checkpoint: str = "except_last",
) -> StepRecord:
    return simulate(lower(find_schedule(name), shape, checkpoint=CheckpointMode(checkpoint)), cost)


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


def phase(trace: dict[str, Any], letters: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] in letters]


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


def test_devices_are_called_after_their_replicas_and_reductions_have_a_lane() -> None:
    graph = lower(find_schedule("gpipe"), Shape(2, 2, 2), wiring=Wiring((), rows=2, reduces=((0, 2),), updates=(0,)))
    trace = to_chrome([simulate(graph, Costs(reduce=1.0))])
    named = [event for event in phase(trace, "M") if event["name"].endswith("_name")]
    names = {(event["pid"], event.get("tid")): event["args"]["name"] for event in named}
    assert {name for (_, thread), name in names.items() if thread is None} == {
        "steps",
        "dev:0 (replica 0)",
        "dev:1 (replica 1)",
    }
    [reduced] = [event for event in tasks(trace) if event["name"] == "A(1,1)"]
    assert names[reduced["pid"], None] == "dev:1 (replica 1)"
    assert names[reduced["pid"], reduced["tid"]] == "reduce"
    assert (reduced["cat"], reduced["args"]["replica"], reduced["args"]["bucket"]) == ("reduce", 1, 1)


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


def test_a_trace_marks_where_devices_begin_a_step() -> None:
    events = to_chrome(simulate_steps(lower(find_schedule("zb-h2"), Shape(2, 4, 2)), steps=2))["traceEvents"]
    marks = [(event["name"], event["ts"]) for event in events if event["ph"] == "i"]
    assert marks == [("step 1 begins", 12e6), ("step 1 begins", 13e6)]
    rows = {event["name"]: event["tid"] for event in events if event.get("cat") == "step"}
    assert len(set(rows.values())) == 2
    one_by_one = [simulate(lower(find_schedule("zb-h2"), Shape(2, 4, 2)))]
    assert not [event for event in to_chrome(one_by_one)["traceEvents"] if event["ph"] == "i"]


def test_the_file_is_json(tmp_path: Path) -> None:
    record = simulated()
    write_trace([record], tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")) == to_chrome([record])
    assert to_chrome([])["traceEvents"] == []


# Counters


def counters(trace: dict[str, Any]) -> dict[tuple[str, str], list[tuple[float, int]]]:
    """(time, value) of each counter, by the process that it is shown in and its name."""
    events = trace["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for event in events:
        if event["ph"] == "C":
            ((key, value),) = event["args"].items()
            found.setdefault((processes[event["pid"]], f"{event['name']} {key}"), []).append((event["ts"], value))
    return found


def test_in_flight_follows_the_micro_batches_of_a_stage() -> None:
    """1F1B: F and B take 1 and 2, copies a quarter; B(0,0) ends and F(3,0) starts at 10."""
    name = "stage {} micro-batches in flight"
    found = counters(to_chrome([simulated("1f1b", Costs(copy=0.25), checkpoint="never")]))
    quarters = {place: [(at / 250_000, value) for at, value in row] for place, row in found.items()}
    assert quarters == {
        ("dev:0", name.format(0)): [(0, 1), (4, 2), (8, 3), (52, 2), (66, 1), (80, 0)],
        ("dev:1", name.format(1)): [(5, 1), (9, 2), (43, 1), (45, 2), (57, 1), (71, 0)],
        ("dev:2", name.format(2)): [(10, 1), (34, 0), (36, 1), (48, 0), (50, 1), (62, 0)],
    }


# Measured memory


def sampled(samples: list[tuple[float, str, int]]) -> StepRecord:
    """A step submitted at time 10 in which memory was sampled."""
    graph = lower(find_schedule("gpipe"), Shape(2, 4, 2), devices=("cpu:0", "cpu:1"))
    notes = StepNotes(samples=samples)
    return StepRecord(0, graph, [(10.0, StepSubmitted(0, graph))], Outcome.OK, notes)


def test_memory_of_the_process_has_a_place_of_its_own() -> None:
    record = sampled([(10.5, "cpu", 100), (10.75, "cpu", 300), (11.0, "cpu", 200)])
    assert counters(to_chrome([record])) == {
        ("cpu memory", "memory bytes"): [(500_000.0, 100), (750_000.0, 300), (1_000_000.0, 200)]
    }


# Predicted memory

MEMORY = StageMemory(saved=[10, 1000], inputs=[3, 500], fixed=[100_000, 200_000])


def test_predicted_memory_goes_up_with_forwards_and_down_with_backwards() -> None:
    """1F1B, two micro-batches: F F B B on the first device, F B F B on the second."""
    found = counters(to_chrome([simulated("1f1b", shape=Shape(2, 2, 2), checkpoint="never")], memory=MEMORY, unit=1e-3))
    assert found["dev:0", "predicted memory bytes"] == [
        (0.0, 100_010),
        (1000.0, 100_020),
        (6000.0, 100_010),
        (9000.0, 100_000),
    ]
    assert found["dev:1", "predicted memory bytes"] == [(0.0, 200_000), (1000.0, 201_000), (7000.0, 200_000)]


# The format

SCHEMA = json.loads(Path(__file__).with_name("trace_schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
Trace = dict[str, Any]


class Recorder:
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step_completed(self, record: StepRecord) -> None:
        self.records.append(record)


class Fails(nn.Module):
    """Raises for micro-batches that contain a NaN."""

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return x


def measured_records() -> dict[str, list[StepRecord]]:
    """Real steps on four CPU devices: whole ones, a failed one, a drop-in one."""
    layers = [nn.Linear(8, 8), nn.Tanh(), Fails(), nn.Linear(8, 2)]
    recorder = Recorder()
    with asyncpipe.Pipeline(
        nn.Sequential(*layers),
        [f"cpu:{index}" for index in range(4)],
        microbatches=8,
        balance=[1, 1, 1, 1],
        schedule="1f1b",
        checkpoint="always",
        loss_fn=nn.functional.mse_loss,
        observers=[recorder],
        sample_memory=True,
    ).sync() as pipe:
        x, target = torch.randn(16, 8), torch.randn(16, 2)
        for _ in range(3):
            pipe.step(x, target)
        with pytest.raises(asyncpipe.TaskError):
            pipe.step(x.where(torch.arange(16).unsqueeze(1) != 15, torch.nan), target)
        pipe(x).sum().backward()
    whole, failed, drop_in = recorder.records[:3], recorder.records[3], recorder.records[4:]
    assert [record.outcome for record in recorder.records] == [Outcome.OK] * 3 + [Outcome.FAILED] + [Outcome.OK] * 2
    assert [record.graph.phase for record in drop_in] == [Phase.FORWARD, Phase.BACKWARD]
    return {"one": whole[-1:], "several": whole, "failed": [failed], "drop-in": drop_in, "all": recorder.records}


@pytest.fixture(scope="module")
def measured() -> dict[str, list[StepRecord]]:
    return measured_records()


def whole(name: str) -> Trace:
    """Traces of simulated steps: with skips, ties and updates, and with free copies."""
    wiring = Wiring(((0, 1), (1, 2), (2, 3), (0, 3)), ties=((0, 3),), updates=(0, 1, 2, 3))
    graph = lower(find_schedule(name), Shape(4, 6, 4), checkpoint=CheckpointMode.EXCEPT_LAST, wiring=wiring)
    memory = StageMemory([100] * 4, [10] * 4, [1000] * 4)
    return to_chrome([simulate(graph, Costs(copy=0.25))], memory=memory, unit=1e-3)


@pytest.fixture(scope="module")
def traces(measured: dict[str, list[StepRecord]]) -> list[Trace]:
    return [
        *(to_chrome(records) for records in measured.values()),
        *(whole(name) for name in ("gpipe", "1f1b", "zb-h1")),
        to_chrome([simulate(lower(find_schedule("interleaved"), Shape(8, 4, 4)))]),
        to_chrome([in_workers()]),
        to_chrome([]),
    ]


def in_workers() -> StepRecord:
    """A step of three devices in two workers: each copy begins a quarter of a second behind its message."""
    graph = lower(find_schedule("1f1b"), Shape(3, 2, 3), checkpoint=CheckpointMode.NEVER)
    record = simulate(graph, lambda task: 0.75 if task.kind is TaskKind.COPY else 1.0)
    began = {event.task: event.started for _, event in record.journal if isinstance(event, TaskCompleted)}
    crossing = [task for task in graph.tasks if task.source is not None and 2 in (task.source, task.stage)]
    notes = StepNotes(
        arrived={task.number: began[task.number] + 0.25 for task in crossing},
        workers={
            name: WorkerNotes(WorkerState.UP, pid, devices, 0.0, 0.0)
            for name, pid, devices in (("left", 71, ("dev:0", "dev:1")), ("right", 72, ("dev:2",)))
        },
    )
    return replace(record, notes=notes)


def test_workers_are_processes_and_devices_are_threads() -> None:
    trace = to_chrome([in_workers()])
    names = [event for event in phase(trace, "M") if event["name"].endswith("_name")]
    assert [(event["pid"], event.get("tid"), event["args"]["name"]) for event in names] == [
        (11, None, "steps"),
        (12, None, "worker left (pid 71)"),
        (13, None, "worker right (pid 72)"),
        (12, 1, "dev:0"),
        (12, 2, "dev:0 copy-in"),
        (12, 3, "dev:0 grad-in"),
        (12, 4, "dev:1"),
        (12, 5, "dev:1 copy-in"),
        (12, 6, "dev:1 grad-in"),
        (13, 7, "dev:2"),
        (13, 8, "dev:2 copy-in"),
        (13, 9, "dev:2 grad-in"),
        (11, 10, "step"),
    ]
    edges = {event["name"] for event in phase(trace, "X") if event["args"].get("edge_us") == 250_000.0}
    assert edges == {"F(0,2)", "B(0,1)", "B(1,1)"}  # The others were computed while their device was busy.
    waited = {event["args"].get("waited_for") for event in phase(trace, "X") if event["name"] == "C(0,1>2)"}
    assert waited == {"F(0,1) of another worker, on its way"}
    counters = {(event["pid"], event["name"]) for event in phase(trace, "C")}
    assert counters == {(12, "stage 0"), (12, "stage 1"), (13, "stage 2")}


def test_every_trace_is_of_the_schema(traces: list[Trace]) -> None:
    for trace in traces:
        errors = list(VALIDATOR.iter_errors(json.loads(json.dumps(trace))))
        assert not errors, errors[0]


def test_every_kind_of_event_is_there(measured: dict[str, list[StepRecord]]) -> None:
    """Otherwise the schema's rules about events would be checked on nothing."""
    assert {event["ph"] for event in to_chrome(measured["one"])["traceEvents"]} == set("XMC")
    assert {event["ph"] for event in to_chrome(measured["failed"])["traceEvents"]} == set("XMCi")
    categories = {event["cat"] for name in ("1f1b", "zb-h1") for event in phase(whole(name), "X")}
    assert categories == set("step forward recompute backward input_gradient weight_gradient copy update sum".split())


def test_slices_of_a_thread_do_not_overlap(traces: list[Trace]) -> None:
    for trace in traces:
        threads: dict[int, list[tuple[int, int]]] = {}
        for event in phase(trace, "X"):
            begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            threads.setdefault(event["tid"], []).append((begin, begin + length))
        for slices in threads.values():
            assert all(first[1] <= second[0] for first, second in pairwise(sorted(slices)))
