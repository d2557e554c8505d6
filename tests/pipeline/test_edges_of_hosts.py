"""Workers that stand for hosts: edges by TCP, and edges that are slow, hold everything back, or are cut."""

from __future__ import annotations

import asyncio

import pytest
import torch
from host_launcher import SKEW, OnHosts
from torch import nn

from asyncpipe import DevicePool, Pipeline
from asyncpipe.core.engine.events import TaskCompleted
from asyncpipe.errors import EdgeError
from asyncpipe.observe.pictures.trace import to_chrome
from asyncpipe.pipeline import workers
from tests.support.shaped_edges import EdgeShape, EdgeState, reshape, shape_edges

pytestmark = [pytest.mark.timeout(120)]

DEVICES = ("cpu:0", "cpu:1")
HOSTS = {"cpu:0": "one", "cpu:1": "another", "cpu:2": "one"}
LATENCY = 0.01


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "ENTRY", "host_launcher:serve_with_another_clock")
        pool = shape_edges(DevicePool(workers=OnHosts(HOSTS)))
    asyncio.run(pool.__aenter__())
    yield pool
    asyncio.run(pool.aclose())


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    ).double()


async def all_answer(pool):
    """Wait until the workers have handled what they were told."""
    for worker in pool.workers.up.values():
        await worker.ask(None)


class Records:
    def __init__(self):
        self.seen = []

    def step_completed(self, record):
        self.seen.append(record)


def pipeline(pool=None, *, model=None, devices=DEVICES, **options):
    options = {
        "microbatches": 4,
        "balance": [3, 3],
        "loss_fn": nn.functional.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    } | options
    return Pipeline(model or make_model(), devices, pool=pool, **options)


def batch():
    return torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)


async def train(pool=None, **options):
    async with pipeline(pool, **options) as pipe:
        torch.manual_seed(1)
        losses = [result.loss async for result in pipe.steps([batch() for _ in range(3)])]
        return losses, {name: value.clone() for name, value in pipe.state_dict().items()}


def wide_model():
    """Its activations are too large to go with their headers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 70_000), nn.Tanh(), nn.Linear(70_000, 4)).double()


@pytest.mark.parametrize(
    "options",
    [
        {
            "devices": ("cpu:0", "cpu:1", "cpu:2"),
            "balance": [1, 1, 1, 1, 1, 1],
            "schedule": "interleaved",
            "microbatches": 6,
        },
        {"balance": [1, 2], "model": wide_model},
    ],
    ids=["small", "wide"],
)
async def test_the_same_bits_between_machines(pool, options):
    """Two of three workers are on one machine, whose edges are by shared memory."""
    make = options.get("model", make_model)
    losses, state = await train(pool, **(options | {"model": make()}))
    expected, there = await train(**(options | {"model": make()}))
    assert all(map(torch.equal, losses, expected))
    assert all(torch.equal(state[name], there[name]) for name in there)
    places = {name: each.place for name, each in pool.workers.up.items()}
    assert {name: place.machine for name, place in places.items()} == {name: HOSTS[name] for name in places}
    assert {place.address for place in places.values()} == {"127.0.0.1"}


async def test_slow_edges_change_when_messages_arrive_and_no_bit(pool):
    slow = EdgeShape(LATENCY, bandwidth=256 / 0.005)  # A micro-batch has 2 rows of 16 numbers of 8 bytes.
    await reshape(pool, {DEVICES: slow})
    records = Records()
    losses, state = await train(pool, observers=[records])
    expected, there = await train()
    assert all(map(torch.equal, losses, expected))
    assert all(torch.equal(state[name], there[name]) for name in there)
    for record in records.seen:
        began = {event.task: event.started for _, event in record.journal if isinstance(event, TaskCompleted)}
        arrived = record.notes.arrived
        # A task ends when what it has made is sent, so only its beginning is surely before.
        made = {
            task: max(began[each] for each in record.graph.dependencies[task] if each in began)
            for task in arrived
            if record.graph.tasks[task].lane.device == "cpu:1"
        }
        assert all(arrived[task] - made[task] > LATENCY for task in made)
        # They pass one behind the other, with 5 ms each.
        assert max(arrived[task] for task in made) - min(made.values()) > LATENCY + len(made) * 0.005
    await reshape(pool, {DEVICES: EdgeShape()})


async def test_workers_with_other_clocks_make_one_record(pool):
    records = Records()
    await train(pool, observers=[records])
    for record in records.seen:
        notes = record.notes
        clocks = {name: (each.clock_offset, each.clock_error) for name, each in notes.workers.items()}
        assert all(0 < error < 1 for _, error in clocks.values())
        assert abs(clocks["cpu:0"][0]) <= clocks["cpu:0"][1]
        assert abs(clocks["cpu:1"][0] - SKEW) <= clocks["cpu:1"][1]
        assert notes.left
        assert all(notes.arrived[task] >= left - 1e-8 for (task, _), left in notes.left.items())
        begin, end = record.journal[0][0], record.journal[-1][0]
        slack = max(error for _, error in clocks.values())
        ran = [event for _, event in record.journal if isinstance(event, TaskCompleted)]
        assert all(begin - slack <= event.started <= event.ended <= end + slack for event in ran)
    labels = [event["args"] for event in to_chrome(records.seen)["traceEvents"] if event["name"] == "process_labels"]
    assert len(labels) == 2
    assert labels[1]["labels"].startswith(("clock +1000.0", "clock +999.9"))


async def test_a_step_that_waits_at_a_black_hole_can_be_cancelled(pool):
    async with pipeline(pool) as pipe:
        await reshape(pool, {DEVICES: EdgeShape(state=EdgeState.BLACK_HOLE)})
        step = asyncio.ensure_future(pipe.step(*batch()))
        await pool.run(all_answer(pool))
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await reshape(pool, {DEVICES: EdgeShape()})
        await pipe.step(*batch())


async def test_a_cut_edge_ends_the_step_with_its_name_and_the_next_pipeline_has_another(pool):
    async with pipeline(pool) as pipe:
        await pipe.step(*batch())
        await reshape(pool, {DEVICES: EdgeShape(state=EdgeState.BLACK_HOLE)})
        step = asyncio.ensure_future(pipe.step(*batch()))
        await reshape(pool, {DEVICES: EdgeShape(state=EdgeState.CUT)})
        for _ in range(2):
            with pytest.raises(EdgeError, match=r"^the edge from worker 'cpu:0' to worker 'cpu:1' broke \(") as raised:
                await step
            assert raised.value.edge == DEVICES
            step = asyncio.ensure_future(pipe.step(*batch()))
        with pytest.raises(EdgeError):
            await step
    await reshape(pool, {DEVICES: EdgeShape()})
    await train(pool)
