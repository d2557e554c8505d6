"""What is offloaded, and where its tasks are in a graph."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.offload import LEAST_WAIT, check_offload, offloaded
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.kinds import COMPUTE_KINDS, TaskKind
from asyncpipe.core.predict.costs import Costs, Jitter
from asyncpipe.core.predict.memory import StageMemory, memory_over_time, peak_memory
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import B, F, Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError, ScheduleError

SCHEDULES = ["1f1b", "gpipe", "interleaved", "zb-h1"]


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    name = draw(st.sampled_from(SCHEDULES))
    devices = draw(st.integers(1, 4))
    stages = devices * (2 if name == "interleaved" else 1)
    microbatches = devices * draw(st.integers(1, 3))
    fractions = draw(st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0]), min_size=stages, max_size=stages))
    mode = draw(st.sampled_from(list(CheckpointMode)))
    shape = Shape(stages, microbatches, devices)
    return lower(find_schedule(name), shape, checkpoint=mode, offload=fractions)


@pytest.mark.promise(
    "Memory", "A device waits for an offload if it needs the memory, and for a load before it reads the tensor."
)
@given(graphs(), st.integers(0, 99))
def test_each_offload_is_before_its_load_and_that_before_its_backward(graph: TaskGraph, seed: int) -> None:
    found = report(simulate(graph, Jitter(Costs(copy=0.1), 0.5, seed)))
    times = {(time.task.kind, time.task.microbatch, time.task.stage): time for time in found.tasks}
    for (kind, i, j), leaves in times.items():
        if kind is not TaskKind.OFFLOAD:
            continue
        back = times[TaskKind.LOAD, i, j]
        read = times.get((TaskKind.RECOMPUTE, i, j)) or times.get((TaskKind.BACKWARD, i, j))
        read = read or times[TaskKind.INPUT_GRADIENT, i, j]
        assert times[TaskKind.FORWARD, i, j].end <= leaves.start
        assert leaves.end <= back.start
        assert back.end <= read.start
        between = [
            time
            for time in found.tasks
            if time.task.kind in COMPUTE_KINDS
            and graph.placement[time.task.stage] == graph.placement[j]
            and times[TaskKind.FORWARD, i, j].end <= time.start
            and time.end <= read.start
        ]
        assert len(between) >= LEAST_WAIT
        assert any(leaves.end <= time.start and time.end <= back.start for time in between), "memory is free for one"


@given(graphs(), st.integers(0, 99))
def test_memory_is_never_above_what_the_order_bounds(graph: TaskGraph, seed: int) -> None:
    """However slow the bus is, no more is held than with one that takes no time."""
    stages = graph.shape.stages
    memory = StageMemory(saved=[100] * stages, inputs=[7] * stages, fixed=[1] * stages)
    slow = simulate(graph, Jitter(Costs(offload=5.0, load=5.0), 0.5, seed))
    bound = bound_of(graph, memory)
    assert all(held <= most for held, most in zip(peak_memory(slow, memory), bound, strict=True))
    for _, device, held in memory_over_time(slow, memory):
        assert held >= graph.placement.count(device), "nothing is freed twice"
    ends = [graph.placement.count(device) for device in range(graph.shape.devices)]
    last = {device: held for _, device, held in memory_over_time(slow, memory)}
    assert [last[device] for device in range(graph.shape.devices)] == ends


def bound_of(graph: TaskGraph, memory: StageMemory) -> list[int]:
    """By device: the most that it holds if each load begins as soon as its order lets it, and no copy is ever late."""
    return peak_memory(simulate(graph, Costs(copy=0.0)), memory)


def test_those_that_wait_longest_are_offloaded() -> None:
    order = [*(F(i, 0) for i in range(6)), *(B(i, 0) for i in (5, 4, 1, 0, 2, 3))]
    assert offloaded(order, [1.0]) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert offloaded(order, [0.5]) == [(0, 0), (2, 0), (3, 0)]
    assert offloaded(order, [0.01]) == [(0, 0)]
    assert offloaded(order, [0.0]) == []
    for m in range(1, 60):
        whole = [*(F(i, 0) for i in range(m)), *(B(i, 0) for i in range(m))]
        assert all(len(offloaded(whole, [k / m])) == (k if m > LEAST_WAIT else 0) for k in range(m + 1))


@pytest.mark.promise("Refused, not wrong", "Offload with a schedule that chooses tasks while the step runs is refused.")
def test_only_steps_with_an_order_offload() -> None:
    shape = Shape(2, 8, 2)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        graph = lower(find_schedule("gpipe"), shape, phase=phase, offload=[1.0, 1.0])
        assert not {task.kind for task in graph.tasks} & {TaskKind.OFFLOAD, TaskKind.LOAD}
    with pytest.raises(ScheduleError, match="offload needs an ordered schedule"):
        lower(find_schedule("gpipe", order="hint"), shape, offload=[1.0, 1.0])


@pytest.mark.parametrize("given_", [-0.1, 1.5, "all", True, [0.5, 2], [0.1]])
def test_what_is_no_fraction_is_refused(given_: object) -> None:
    with pytest.raises(OptionError, match="offload"):
        check_offload(given_, 2)
    assert check_offload(1, 2) == (1, 1)
