"""Predicted memory: small steps by hand, and random ones beside the micro-batches that the report counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.memory import StageMemory, peak_memory
from asyncpipe.core.predict.report import peak_per_device, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError


def step(name: Any, shape: Shape, mode: CheckpointMode = CheckpointMode.NEVER, **costs: float) -> StepRecord:
    return simulate(lower(find_schedule(name), shape, checkpoint=mode), Costs(**costs))


def test_what_is_saved_counts_from_the_forward_to_the_backward() -> None:
    """1F1B holds two micro-batches on the first device, one on the second."""
    memory = StageMemory(saved=[10, 1000], inputs=[3, 5], fixed=[100_000, 200_000])
    assert peak_memory(step("1f1b", Shape(2, 4, 2)), memory) == [100_020, 201_000]
    assert peak_memory(step("gpipe", Shape(2, 4, 2)), memory) == [100_040, 204_000]


def test_a_recomputed_micro_batch_keeps_its_input_until_it_is_recomputed() -> None:
    """GPipe, m = 3: at R of the last, that one is whole again and two are inputs."""
    memory = StageMemory(saved=[100], inputs=[7], fixed=[1000])
    assert peak_memory(step("gpipe", Shape(1, 3, 1), CheckpointMode.ALWAYS), memory) == [1000 + 100 + 2 * 7]


@pytest.mark.parametrize(
    ("schedule", "peaks"), [("1f1b", [1_000 + 20 + 7, 2_000 + 1000 + 70]), ("gpipe", [1047, 6070])]
)
def test_while_a_task_runs_its_stage_needs_more(schedule: str, peaks: list[int]) -> None:
    memory = StageMemory(saved=[10, 1000], inputs=[3, 5], fixed=[1000, 2000], working=[7, 70])
    assert peak_memory(step(schedule, Shape(2, 4, 2)), memory) == peaks


def test_each_replica_holds_the_same() -> None:
    graph = lower(find_schedule("1f1b"), Shape(4, 8, 4), wiring=Wiring.chain(2).in_rows(2, [1, 1]))
    memory = StageMemory(saved=[10, 1000], inputs=[3, 5], fixed=[100_000, 200_000])
    assert peak_memory(simulate(graph), memory) == [100_020, 201_000] * 2


def test_a_step_of_another_size_is_refused() -> None:
    with pytest.raises(OptionError, match="memory is that of 3 stages, the step has 2"):
        peak_memory(step("gpipe", Shape(2, 1, 2)), StageMemory([1] * 3, [1] * 3, [1] * 3))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (([1, 2], [1], [1, 2]), r"inputs must have a number for each of 2 stages, got \[1\]"),
        (([1, 2], [1, 2], [1, 2, 3]), r"fixed must have a number for each of 2 stages, got \[1, 2, 3\]"),
        (([1, -2], [1, 2], [1, 2]), r"saved must be bytes, zero or more, got \[1, -2\]"),
        (([1, 2], [1, 2], [1, float("nan")]), r"fixed must be bytes, zero or more, got \[1, nan\]"),
    ],
)
def test_wrong_sizes_are_refused(rows: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        StageMemory(*rows)


# Random steps

COST = st.integers(1, 5)
STEPS = st.builds(
    lambda name, p, v, m, f, b, c: step(
        name, Shape(p * (v if name == "interleaved" else 1), m, p), forward=f, backward=b, copy=c
    ),
    st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 8),
    COST,
    COST,
    st.integers(0, 5),
)


@settings(max_examples=60)
@given(STEPS, st.integers(0, 10**9))
def test_equal_sizes_make_bytes_of_micro_batches(record: StepRecord, size: int) -> None:
    graph = record.graph
    stages = graph.shape.stages
    found = peak_memory(record, StageMemory([size] * stages, [1] * stages, [0] * stages))
    held = peak_per_device(report(record), graph)
    per_device = stages // graph.shape.devices
    assert found == [round(peak * per_device) * size for peak in held]
    if per_device == 1:
        assert found == [peak * size for peak in report(record).peak_in_flight]
