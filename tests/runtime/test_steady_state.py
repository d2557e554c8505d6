"""Steps behind each other on emulated devices: real driver and threads keep what the simulator predicts."""

from __future__ import annotations

import pytest

from asyncpipe import Costs, Shape, find_schedule, lower, reports, simulate_steps, steady_state
from asyncpipe.core.engine.events import StepRecord
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.predict.report import SteadyState
from asyncpipe.runtime.driver import Driver
from asyncpipe.testing import EmulatedExecutor

DEVICES = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
UNIT = 0.02
COSTS = Costs(UNIT, None, UNIT, 0.0, UNIT, UNIT)
ATTEMPTS = 3
"""Other processes may take the machine for a moment: then it is measured again."""


def graph_of(name: str) -> TaskGraph:
    """Eight micro-batches, and the optimizer inside the step."""
    wiring = Wiring(Wiring.chain(4).links, updates=(0, 1, 2, 3))
    return lower(find_schedule(name), Shape(4, 8, 4), devices=DEVICES, wiring=wiring)


async def measured(graph: TaskGraph, steps: int) -> SteadyState:
    """``steps`` steps, of which one is always submitted behind the one under way."""
    driver = Driver({device: EmulatedExecutor(device, COSTS) for device in DEVICES})
    driver.open()
    records: list[StepRecord] = []
    last = None
    for _ in range(steps):
        step = driver.start(graph, lambda task: lambda: None, after=last)
        if last is not None:
            records.append((await last.done)[1])
        last = step
    assert last is not None
    records.append((await last.done)[1])
    await driver.drain()
    driver.close()
    driver.join()
    return steady_state(reports(records))


@pytest.mark.parametrize(("name", "bubble"), [("zb-h2", 0.0), ("1f1b", 3 / 11)])
async def test_the_bubble_of_steps_that_overlap(name: str, bubble: float) -> None:
    """zb-h2 has next to none; 1f1b keeps its (p-1)/m of the work, which is (p-1)/(m+p-1) of the time."""
    graph = graph_of(name)
    assert steady_state(reports(simulate_steps(graph, COSTS, steps=3))).bubble_ratio == pytest.approx(bubble)
    found = await measured(graph, 4)
    for _ in range(ATTEMPTS - 1):
        if found.bubble_ratio >= bubble + 0.03:
            found = await measured(graph, 4)
    assert bubble - 0.01 <= found.bubble_ratio < bubble + 0.03, found
