"""Steps behind each other on real threads: their order on each device, and the end of one in the middle."""

from __future__ import annotations

import asyncio
import random
import threading
from functools import partial

import pytest
from driver_helpers import open_driver

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import PipelineClosedError, TaskError
from asyncpipe.runtime.thread_executor import ThreadExecutor

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]
STAGES = len(DEVICES)
GRAPHS = [
    lower(
        find_schedule(name),
        Shape(STAGES, microbatches, STAGES),
        devices=DEVICES,
        checkpoint=CheckpointMode.EXCEPT_LAST,
        wiring=Wiring(Wiring.chain(STAGES).links, (), tuple(range(STAGES))),
    )
    for name in ("1f1b", "gpipe", "zb-h2")
    for microbatches in (3, 6)
]


class Single(ThreadExecutor):
    """Takes one task at a time."""

    submit_program = None  # type: ignore[assignment]


@pytest.fixture(params=["programs", "single"])
async def driver(request, no_leaks):
    kind = ThreadExecutor if request.param == "programs" else Single
    async with open_driver(kind, DEVICES) as made:
        yield made


class Log:
    """What the devices ran: (step, task); ``boom`` is the one that fails."""

    def __init__(self, boom=None):
        self.ran, self.boom, self.at, self.call = [], boom, None, None
        self.submitted = threading.Event()

    def bind(self, step, task):
        return partial(self.run, step, task)

    def run(self, step, task):
        assert self.submitted.wait(30), "a step can only follow one that has not failed"
        self.ran.append((step, task))
        if self.at is not None and len(self.ran) == self.at:
            self.call()
        if (step, task.number) == self.boom:
            raise ValueError("boom")

    def check(self, graphs):
        """No device computes for a later step before it is done with an earlier one; updates come in whole steps."""
        last, updates = {}, []
        for step, task in self.ran:
            if task.source is None:
                assert last.get(task.lane.device, 0) <= step
                last[task.lane.device] = step
            if task.kind == "U":
                updates.append(step)
        assert updates == sorted(updates)
        for step in sorted(set(updates))[:-1]:
            assert updates.count(step) == STAGES


def start(driver, log, graphs):
    executions = []
    for number, graph in enumerate(graphs):
        after = executions[-1] if executions else None
        executions.append(driver.start(graph, partial(log.bind, number), after=after))
    log.submitted.set()
    return executions


def draws(seed):
    draw = random.Random(seed)
    return draw, [draw.choice(GRAPHS) for _ in range(4)]


@pytest.mark.promise(
    "Bit-identical results", "A device starts a step only when it has finished the tasks of the previous step."
)
@pytest.mark.parametrize("seed", range(5))
async def test_every_device_goes_through_the_steps_in_order(driver, seed):
    _, graphs = draws(seed)
    log = Log()
    executions = start(driver, log, graphs)
    for execution in executions:
        await driver.issued(execution)
        await execution.completed()
    log.check(graphs)
    assert len(log.ran) == sum(len(graph.tasks) for graph in graphs)
    assert all(not execution.runs for execution in executions)


@pytest.mark.parametrize("seed", range(15))
async def test_a_failed_step_ends_those_behind_it_and_none_before(driver, seed):
    draw, graphs = draws(seed)
    victim = draw.randrange(len(graphs))
    log = Log((victim, draw.randrange(len(graphs[victim].tasks))))
    executions = start(driver, log, graphs)
    for number, execution in enumerate(executions):
        error = TaskError if number == victim else PipelineClosedError
        if number < victim:
            await driver.issued(execution)
        else:
            with pytest.raises(error):
                await asyncio.wait_for(driver.issued(execution), 30)
        await execution.done
    log.check(graphs)
    with pytest.raises(PipelineClosedError, match="step before this one"):
        driver.start(graphs[0], partial(log.bind, 9), after=executions[-1])
    await (await driver.run(graphs[0], partial(log.bind, len(graphs)))).completed()


@pytest.mark.parametrize("seed", range(15))
async def test_a_cancelled_step_ends_those_behind_it(driver, seed):
    draw, graphs = draws(seed)
    victim, log, loop = draw.randrange(len(graphs)), Log(), asyncio.get_running_loop()
    log.at = draw.randint(1, sum(len(graph.tasks) for graph in graphs))
    log.call = lambda: loop.call_soon_threadsafe(lambda: driver.cancel(executions[victim]))
    executions = start(driver, log, graphs)
    ends = [(await asyncio.wait_for(asyncio.shield(execution.done), 30)).outcome for execution in executions]
    assert ends == sorted(ends, key=[Outcome.OK, Outcome.CANCELLED].index)
    assert set(ends[:victim]) <= {Outcome.OK}
    log.check(graphs)
    await (await driver.run(graphs[0], partial(log.bind, len(graphs)))).completed()
