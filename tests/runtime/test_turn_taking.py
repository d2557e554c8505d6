"""Two drivers on the same devices: each runs in its turn, whatever becomes of a step, the other one, or the arbiter."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from functools import partial

import pytest
from driver_helpers import open_driver

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Wiring
from asyncpipe.core.policies.share import Share
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import PipelineClosedError, TaskError
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.turn_taking import ServedArbiter

STEPS = 6
DEVICES = ["cpu:0", "cpu:1", "cpu:2"]
GRAPHS = [
    lower(find_schedule(name), Shape(3, 4, 3), devices=DEVICES, wiring=Wiring(Wiring.chain(3).links, (), (0, 1, 2)))
    for name in ("1f1b", "gpipe", "zb-h2")
]


class Devices:
    """What ran where. ``happens`` is called in the task of ``a`` that is the ``nth``; it may raise."""

    def __init__(self, nth=-1, happens=lambda: None):
        self.ran, self.on, self.nth, self.happens = [], {}, nth, happens
        self.lock, self.shared = threading.Lock(), True

    def bind(self, key, step, task):
        return partial(self.run, key, step, task)

    def run(self, key, step, task):
        device = task.lane.device
        with self.lock:
            if self.shared:
                assert self.on.setdefault(device, key) == key, "the other one has the device"
            self.ran.append((key, step, task))
            is_it = sum(who == "a" for who, _, _ in self.ran) == self.nth and key == "a"
        try:
            if is_it:
                self.happens()
        finally:
            with self.lock:
                self.on.pop(device, None)

    def has_run(self, key, step, tasks):
        with self.lock:
            return sum((who, number) == (key, step) for who, number, _ in self.ran) >= 4 * tasks

    def check(self, key, graph, steps):
        """Every task of the first ``steps`` has run once, behind what it depends on, and steps one after the other."""
        counts = Counter((step, task.number) for who, step, task in self.ran if who == key)
        assert set(counts.values()) <= {1}
        places = {(step, task): place for place, (step, task) in enumerate(counts)}
        for (step, task), place in places.items():
            assert all(places[step, before] < place for before in graph.dependencies[task])
        last = {}
        for who, step, task in self.ran:
            if who == key and task.source is None:
                assert last.get(task.lane.device, 0) <= step
                last[task.lane.device] = step
        assert len({step for step, _ in counts}) >= steps


def sit_down(driver, arbiter):
    """The seat, and the name of the driver at the arbiter."""

    def answer(answers):
        seat.answered(answers)

    seat = driver.sit_down(partial(arbiter.hear, answer))
    arbiter.join(answer, DEVICES)
    return seat, answer


async def train(driver, key, devices, graph):
    """Steps in a row, each begun before the one before has ended; how many were whole."""
    tenant, steps = Tenant(Share(key)), []
    for number in range(STEPS):
        before = steps[-1] if steps else None
        try:
            steps.append(driver.start(graph, partial(devices.bind, key, number), tenant=tenant, after=before))
        except PipelineClosedError:
            break
        while not (devices.has_run(key, number, number % 3) or steps[-1].done.done()):  # noqa: ASYNC110 - a thread says so
            await asyncio.sleep(0.0005)  # So that steps begin before and after what happens.
    ends = await asyncio.gather(*(driver.issued(step) for step in steps), return_exceptions=True)
    await asyncio.gather(*(step.done for step in steps))
    assert all(isinstance(end, PipelineClosedError | TaskError) for end in ends if isinstance(end, BaseException))
    await driver.drain(tenant)
    return sum(not isinstance(end, BaseException) for end in ends), steps


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("what", ["nothing", "the arbiter goes", "b goes", "b comes", "a task fails", "a is cancelled"])
async def test_each_driver_runs_in_its_turn_and_every_task_once(what, seed, no_leaks):
    loop, arbiter, draw = asyncio.get_running_loop(), ServedArbiter(), random.Random(seed)
    mine, others = draw.choice(GRAPHS), draw.choice(GRAPHS)
    devices = Devices(draw.randrange(1, 4 * len(mine.tasks)))
    happened = asyncio.Event()
    async with open_driver(devices=DEVICES) as a, open_driver(devices=DEVICES) as b:
        for driver in (a, b):
            driver.sit_down()
        seat, own = sit_down(a, arbiter)
        devices.shared = what in ("nothing", "a task fails", "a is cancelled")
        others_seat, other = None, None
        if what != "b comes":
            others_seat, other = sit_down(b, arbiter)
        assert seat.is_shared == (what != "b comes"), "alone it decides by itself"

        def happens():
            if what == "a task fails":
                raise ValueError("boom")
            loop.call_soon_threadsafe(change)

        def change():
            match what:
                case "the arbiter goes":
                    arbiter.leave(own)
                    seat.lost()
                case "b goes":
                    arbiter.leave(other)
                    others_seat.lost()
                case "b comes":
                    sit_down(b, arbiter)
                case "a is cancelled":
                    a.cancel(next(iter(a._under_way.values())))
            happened.set()

        devices.happens = happens
        training = asyncio.gather(train(a, "a", devices, mine), train(b, "b", devices, others))
        (whole, _), (whole_b, _) = await asyncio.wait_for(training, 30)
        assert whole_b == STEPS
        devices.check("b", others, STEPS)
        devices.check("a", mine, 1)
        assert whole == STEPS or what in ("a task fails", "a is cancelled")
        assert not seat._steps
        for key in list(arbiter._arbiter._parties):
            arbiter.leave(key)
        assert not arbiter._arbiter._scheduler._steps
        assert not arbiter._arbiter._steps
