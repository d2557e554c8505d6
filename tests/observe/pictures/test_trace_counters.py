"""The counters of Chrome traces: micro-batches in flight, and memory, measured and predicted."""

from __future__ import annotations

from typing import Any

from asyncpipe.core.engine.events import Outcome, StepSubmitted
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.memory import StageMemory
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.pictures.trace import to_chrome


def step(
    name: str = "gpipe",
    stages: int = 3,
    microbatches: int = 4,
    *,
    devices: tuple[str, ...] | None = None,
    phase: Phase = Phase.STEP,
    mode: CheckpointMode = CheckpointMode.NEVER,
    copy: float = 0.0,
) -> StepRecord:
    shape = Shape(stages, microbatches, stages)
    return simulate(lower(find_schedule(name), shape, devices=devices, checkpoint=mode, phase=phase), Costs(copy=copy))


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


def values(trace: dict[str, Any], process: str, name: str) -> list[int]:
    return [value for _, value in counters(trace)[process, name]]


def test_in_flight_follows_the_micro_batches_of_a_stage() -> None:
    """1F1B: F and B take 1 and 2, copies a quarter; B(0,0) ends and F(3,0) starts at 10."""
    name = "stage {} micro-batches in flight"
    found = counters(to_chrome([step("1f1b", copy=0.25)]))
    quarters = {place: [(at / 250_000, value) for at, value in row] for place, row in found.items()}
    assert quarters == {
        ("dev:0", name.format(0)): [(0, 1), (4, 2), (8, 3), (52, 2), (66, 1), (80, 0)],
        ("dev:1", name.format(1)): [(5, 1), (9, 2), (43, 1), (45, 2), (57, 1), (71, 0)],
        ("dev:2", name.format(2)): [(10, 1), (34, 0), (36, 1), (48, 0), (50, 1), (62, 0)],
    }


# Measured memory


def measured(samples: list[tuple[float, str, int]], devices: tuple[str, ...] = ("cpu:0", "cpu:1")) -> StepRecord:
    """A step submitted at time 10 in which memory was sampled."""
    graph = step(stages=len(devices), devices=devices).graph
    notes = StepNotes(samples=samples)
    return StepRecord(0, graph, [(10.0, StepSubmitted(0, graph))], Outcome.OK, notes)


def test_memory_of_the_process_has_a_place_of_its_own() -> None:
    record = measured([(10.5, "cpu", 100), (10.75, "cpu", 300), (11.0, "cpu", 200)])
    assert counters(to_chrome([record])) == {
        ("cpu memory", "memory bytes"): [(500_000.0, 100), (750_000.0, 300), (1_000_000.0, 200)]
    }


# Predicted memory

MEMORY = StageMemory(saved=[10, 1000], inputs=[3, 500], fixed=[100_000, 200_000])


def test_predicted_memory_goes_up_with_forwards_and_down_with_backwards() -> None:
    """1F1B, two micro-batches: F F B B on the first device, F B F B on the second."""
    found = counters(to_chrome([step("1f1b", 2, 2)], memory=MEMORY, unit=1e-3))
    assert found["dev:0", "predicted memory bytes"] == [
        (0.0, 100_010),
        (1000.0, 100_020),
        (6000.0, 100_010),
        (9000.0, 100_000),
    ]
    assert found["dev:1", "predicted memory bytes"] == [(0.0, 200_000), (1000.0, 201_000), (7000.0, 200_000)]
