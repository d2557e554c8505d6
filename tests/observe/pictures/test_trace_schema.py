"""Traces of every kind of step, checked by a JSON schema of the format and by rules that a schema cannot express.

``tests/node/perfetto.mjs`` shows a trace in Perfetto's own UI and tells what its importer complains about.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.core.engine.events import Outcome, TaskCompleted
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task_graph import Phase, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.memory import StageMemory
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import WorkerNotes, WorkerState
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.pictures.trace import to_chrome

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


def simulated(name: str) -> Trace:
    """Traces of simulated steps: with skips, ties and updates, and with free copies."""
    wiring = Wiring(((0, 1), (1, 2), (2, 3), (0, 3)), ties=((0, 3),), updates=(0, 1, 2, 3))
    graph = lower(find_schedule(name), Shape(4, 6, 4), checkpoint=CheckpointMode.EXCEPT_LAST, wiring=wiring)
    memory = StageMemory([100] * 4, [10] * 4, [1000] * 4)
    return to_chrome([simulate(graph, Costs(copy=0.25))], memory=memory, unit=1e-3)


@pytest.fixture(scope="module")
def traces(measured: dict[str, list[StepRecord]]) -> list[Trace]:
    return [
        *(to_chrome(records) for records in measured.values()),
        *(simulated(name) for name in ("gpipe", "1f1b", "zb-h1")),
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
    names = [event for event in of_phase(trace, "M") if event["name"].endswith("_name")]
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
    edges = {event["name"] for event in of_phase(trace, "X") if event["args"].get("edge_us") == 250_000.0}
    assert edges == {"F(0,2)", "B(0,1)", "B(1,1)"}  # The others were computed while their device was busy.
    waited = {event["args"].get("waited_for") for event in of_phase(trace, "X") if event["name"] == "C(0,1>2)"}
    assert waited == {"F(0,1) of another worker, on its way"}
    counters = {(event["pid"], event["name"]) for event in of_phase(trace, "C")}
    assert counters == {(12, "stage 0"), (12, "stage 1"), (13, "stage 2")}


def of_phase(trace: Trace, letters: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] in letters]


def test_every_trace_is_of_the_schema(traces: list[Trace]) -> None:
    for trace in traces:
        errors = list(VALIDATOR.iter_errors(json.loads(json.dumps(trace))))
        assert not errors, errors[0]


def test_every_kind_of_event_is_there(measured: dict[str, list[StepRecord]]) -> None:
    """Otherwise the schema's rules about events would be checked on nothing."""
    assert {event["ph"] for event in to_chrome(measured["one"])["traceEvents"]} == set("XMC")
    assert {event["ph"] for event in to_chrome(measured["failed"])["traceEvents"]} == set("XMCi")
    categories = {event["cat"] for name in ("1f1b", "zb-h1") for event in of_phase(simulated(name), "X")}
    assert categories == set("step forward recompute backward input_gradient weight_gradient copy update sum".split())


def test_slices_of_a_thread_do_not_overlap(traces: list[Trace]) -> None:
    for trace in traces:
        threads: dict[int, list[tuple[int, int]]] = {}
        for event in of_phase(trace, "X"):
            begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            threads.setdefault(event["tid"], []).append((begin, begin + length))
        for slices in threads.values():
            assert all(first[1] <= second[0] for first, second in pairwise(sorted(slices)))
