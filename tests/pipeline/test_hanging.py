"""A task that does not end: who waits for its step gets an error that names it, and a cancellation has an end, too."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from asyncpipe import DevicePool, Pipeline, TaskError
from asyncpipe.errors import HungTaskError, PipelineClosedError, WorkerLostError
from asyncpipe.runtime import parts_driver, step_driver

mse = nn.functional.mse_loss
X = torch.randn(8, 4)
GRACE = 0.3
ROUNDS = int(os.environ.get("ASYNCPIPE_CANCELLATIONS", "4"))

pytestmark = pytest.mark.timeout(90 + 5 * ROUNDS)


class Hangs(nn.Module):
    """Waits while there is a file at ``path``; in this process also until it is ``released``."""

    released = threading.Event()

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        while self.path.exists() and not Hangs.released.wait(0.002):
            pass
        return self.linear(x)


@pytest.fixture(autouse=True)
def _released():
    Hangs.released.clear()
    yield
    Hangs.released.set()


def pipeline(path: Path, workers: str, **options) -> Pipeline:
    model = nn.Sequential(nn.Linear(4, 4), Hangs(path))
    if workers == "processes":
        options["optimizer"] = torch.optim.SGD
    if "pool" not in options:
        options["workers"] = workers
    return Pipeline(model, ["cpu:0", "cpu:1"], microbatches=4, loss_fn=mse, **options)


@pytest.mark.promise("Everything ends", "A task that hangs ends its step with an error that names the task.")
@pytest.mark.parametrize("workers", ["threads", "processes"])
async def test_a_step_that_hangs_ends_with_the_name_of_its_task(tmp_path, workers):
    path = tmp_path / "hangs"
    async with pipeline(path, workers, hang_seconds=1.5) as pipe:
        await pipe.step(X, X)
        path.touch()
        with pytest.raises((TaskError, WorkerLostError), match=r"F\(0,1\)") as caught:
            await pipe.step(X, X)
        if workers == "threads":
            assert isinstance(caught.value.__cause__, HungTaskError)
            with pytest.raises(PipelineClosedError, match="its thread may still write to the model"):
                await pipe.step(X, X)
        else:
            with pytest.raises(WorkerLostError):
                await pipe.step(X, X)


@pytest.mark.promise("Everything ends", "A task that takes as long as it always does is not reported as hung.")
async def test_a_task_that_is_as_slow_as_ever_does_not_hang(tmp_path):
    """Of a pipeline without a job, tasks are not measured: it is the time of its last step that counts."""
    async with pipeline(tmp_path / "none", "threads", hang_seconds=1) as pipe:
        await pipe.step(X, X)
        driver = pipe._tenancy.pool.threads
        (graph,) = [graph for graph in driver._seconds if graph is pipe.graph]
        driver._seconds[graph] = 10.0
        execution = SimpleNamespace(number=-1, graph=graph)
        assert driver._expected(execution, 0) == 10.0
        assert pipe._tenancy.pool.watchdog._limit(10.0) == 200.0


@pytest.mark.promise("Everything ends", "A cancellation ends even if a stage hangs.")
@pytest.mark.parametrize("workers", ["threads", "processes"])
async def test_a_cancellation_ends_though_a_stage_hangs(tmp_path, monkeypatch, workers):
    """At random instants of steps, some of which hang; new pipelines go on on the same pool, with new workers."""
    for module in (step_driver, parts_driver):
        monkeypatch.setattr(module, "CANCEL_SECONDS", GRACE)
    chance = random.Random(7)
    path = tmp_path / "hangs"
    ended = dict.fromkeys(("in time", "cancelled", "given up"), 0)
    async with DevicePool(workers=workers) as pool:
        for _ in range(ROUNDS):
            path.unlink(missing_ok=True)
            Hangs.released.clear()
            async with pipeline(path, workers, pool=pool) as pipe:
                await pipe.step(X, X)
                if chance.random() < 0.8:
                    path.touch()
                began = time.perf_counter()
                try:
                    async with asyncio.timeout(chance.random() * 0.05):
                        await pipe.step(X, X)
                    ended["in time"] += 1
                except TimeoutError:
                    ended["cancelled"] += 1
                assert time.perf_counter() - began < GRACE + 5
                path.unlink(missing_ok=True)
                (after,) = await asyncio.gather(pipe.step(X, X), return_exceptions=True)
                if isinstance(after, Exception):
                    assert isinstance(after, PipelineClosedError | WorkerLostError)
                    assert any(text in str(after) for text in ("was given up", "of a cancelled step")), after
                    ended["given up"] += 1
            Hangs.released.set()
    assert ended["given up"] > ROUNDS / 4, ended
