"""Gates: opened from any thread, before a step is under way, during it and after it; no device waits for the loop."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from driver_helpers import DEVICES, bind_nothing, open_driver
from thread_helpers import Threads

from asyncpipe.core.engine.events import GateOpened, TaskCompleted
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.policies.share import Share
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import PipelineClosedError
from asyncpipe.runtime.execution import Gates
from asyncpipe.runtime.step_driver import Tenant

BACKWARD = lower(find_schedule("gpipe"), Shape(2, 8, 2), devices=DEVICES, phase=Phase.BACKWARD)


@pytest.fixture
async def driver(no_leaks):
    async with open_driver() as made:
        yield made


def checked(record):
    """The record of a step in which every task ran, each after what held it."""
    opened, done = [], []
    for _, event in record.journal:
        if isinstance(event, GateOpened):
            opened.append(event.gate)
        elif isinstance(event, TaskCompleted):
            gates = {gate for gate, task in enumerate(record.graph.gates) if task == event.task}
            assert gates <= set(opened), "a gate's event comes before that of what it held"
            done.append(event.task)
    assert sorted(opened) == list(range(len(record.graph.gates)))
    assert sorted(done) == list(range(len(record.graph.tasks)))
    return record


def tenant(by_program):
    return None if by_program else Tenant(Share("job"))


@pytest.mark.parametrize("by_program", [True, False])
@pytest.mark.parametrize("attempt", range(10))
async def test_threads_open_gates_while_the_step_is_begun(driver, by_program, attempt):
    gates, together = Gates(), threading.Barrier(3)

    def opens(mine):
        together.wait()
        for gate in mine:
            gates.open([gate])

    opening = Threads(lambda: opens([7, 5, 3, 1]), lambda: opens([0, 2, 4, 6]))
    together.wait()
    execution = driver.start(BACKWARD, bind_nothing, gates=gates, tenant=tenant(by_program))
    checked(await execution.completed())
    assert opening.join() == [None, None]


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.STEP])
async def test_draining_cancels_what_waits_for_its_caller_and_nothing_else(driver, phase):
    """A whole step with gates is one of several parts: what it waits for comes, or its step ends."""
    graph = BACKWARD
    if phase is Phase.STEP:
        graph = replace(lower(find_schedule("1f1b"), Shape(2, 2, 2), devices=DEVICES), gates=(0,))
    gates = Gates()
    execution = driver.start(graph, bind_nothing, gates=gates)
    draining = asyncio.ensure_future(driver.drain())
    await asyncio.sleep(0)
    gates.open([0])
    if phase is Phase.BACKWARD:
        with pytest.raises(PipelineClosedError):
            await execution.completed()
    else:
        checked(await execution.completed())
    await draining
