"""Closing a pipeline or a pool that is in use: running steps end normally, and no step begins."""

from __future__ import annotations

import asyncio
import atexit
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from asyncpipe import DevicePool, Pipeline, Share
from asyncpipe.errors import PipelineClosedError
from asyncpipe.pipeline.call_backward import CallBackward
from asyncpipe.runtime.driver import Driver

SECONDS = 10.0
"""Closing takes milliseconds; whoever closes without an end is told after so many seconds."""
mse = nn.functional.mse_loss


def pipeline(model, pool=None, **options):
    options = {"microbatches": 4, "loss_fn": mse, "checkpoint": "except_last"} | options
    return Pipeline(model, ["cpu:0", "cpu:1"], pool=pool, **options)


class Hold:
    """Holds the first task called ``task_id`` until the driver drains and ``let_go`` is set."""

    def __init__(self, before_task, monkeypatch):
        self.begun, self.draining, self.let_go = threading.Event(), threading.Event(), threading.Event()
        self.task_id = None
        before_task(self._hold)
        drain, told = Driver.drain, self.draining

        async def noting(self, *tenant):
            draining = asyncio.ensure_future(drain(self, *tenant))
            await asyncio.sleep(0)
            told.set()
            await draining

        monkeypatch.setattr(Driver, "drain", noting)

    def _hold(self, task):
        if task.id == self.task_id and not self.begun.is_set():
            self.begun.set()
            assert self.draining.wait(30)
            assert self.let_go.wait(30)


@pytest.fixture
def hold(before_task, monkeypatch):
    return Hold(before_task, monkeypatch)


async def train(pipe, workload, begun):
    while True:
        await pipe.step(workload.x, workload.target)
        begun.set()


async def is_refused(training):
    with pytest.raises(PipelineClosedError, match="the pipeline is closed"):
        await training


@pytest.mark.promise(
    "Everything ends", "Closing or dropping a pipeline, also during a step, ends and leaves no thread."
)
@pytest.mark.parametrize("shared", [False, True])
async def test_a_pipeline_is_closed_while_somebody_steps(workload, no_leaks, shared):
    async with DevicePool() as pool:
        pipe = await pipeline(workload.model(), pool if shared else None).__aenter__()
        begun = asyncio.Event()
        training = asyncio.ensure_future(train(pipe, workload, begun))
        await begun.wait()
        try:
            await asyncio.wait_for(pipe.aclose(), SECONDS)
            await is_refused(training)
        finally:
            training.cancel()
        await pipe.aclose()


@pytest.mark.promise(
    "Everything ends", "Closing or dropping a pipeline, also during a step, ends and leaves no thread."
)
async def test_a_pool_is_closed_while_two_pipelines_step(workload, no_leaks):
    pool = DevicePool()
    await pool.__aenter__()
    pipes = [await pipeline(workload.model(), pool, share=Share(name)).__aenter__() for name in "ab"]
    begun = [asyncio.Event() for _ in pipes]
    training = [asyncio.ensure_future(train(pipe, workload, event)) for pipe, event in zip(pipes, begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    try:
        await asyncio.wait_for(pool.aclose(), SECONDS)
        await asyncio.gather(*map(is_refused, training))
    finally:
        for each in training:
            each.cancel()


def test_a_backward_that_has_not_begun_is_refused_while_a_step_ends_well(workload, hold, no_leaks):
    model = workload.model()
    with ThreadPoolExecutor() as threads, pipeline(model).sync() as pipe:
        loss = mse(pipe(workload.x), workload.target)
        hold.task_id = "B(0,0)"
        step = threads.submit(pipe.step, workload.x, workload.target)
        assert hold.begun.wait(30)
        closing = threads.submit(pipe.close)
        assert hold.draining.wait(30)
        try:
            with pytest.raises(PipelineClosedError, match="and with it the backward of its outputs"):
                loss.backward()
            assert not closing.done()
        finally:
            hold.let_go.set()
        with pytest.raises(PipelineClosedError, match="the pipeline is closed"):
            pipe(workload.x)
        step.result(30)
        closing.result(30)
    assert workload.worst(model) < 1e-10


@pytest.mark.parametrize("late", [False, True])
def test_a_backward_under_way_ends_well(workload, hold, no_leaks, monkeypatch, late):
    """All gates are open, so closing waits for the backward, even if autograd ends later."""
    closed = threading.Event()
    finish = CallBackward.finish

    def finish_late(self):
        assert closed.wait(30)
        return finish(self)

    if late:
        monkeypatch.setattr(CallBackward, "finish", finish_late)
    model = workload.model()
    hold.let_go.set()
    with ThreadPoolExecutor() as threads, pipeline(model).sync() as pipe:
        loss = mse(pipe(workload.x), workload.target)
        hold.task_id = "B(0,0)"
        backward = threads.submit(loss.backward)
        assert hold.begun.wait(30)
        pipe.close()
        closed.set()
        backward.result(30)
        del loss, backward
    assert workload.worst(model) < 1e-10


async def test_a_backward_after_the_end_on_a_shared_pool(workload, no_leaks):
    model = workload.model()
    async with DevicePool() as pool:
        with pipeline(model, pool, share=Share("job")).sync() as pipe:
            mse(pipe(workload.x), workload.target).backward()
            loss = mse(pipe(workload.x), workload.target)
        with pytest.raises(PipelineClosedError, match="and with it the backward of its outputs"):
            loss.backward()
        assert not pool.driver.scheduler._jobs._jobs
    assert workload.worst(model) < 1e-10


async def test_at_the_interpreters_end_the_task_that_runs_comes_to_its_own(monkeypatch, workload, no_leaks):
    """A thread that is in torch when Python is taken apart aborts the process."""
    at_exit, inside, let_go = [], threading.Event(), threading.Event()
    monkeypatch.setattr(atexit, "register", lambda function: at_exit.append(function) or function)

    def long(output, target):
        inside.set()
        assert let_go.wait(30)
        return mse(output, target)

    pipe = await pipeline(workload.model(), loss_fn=long).__aenter__()
    step = asyncio.ensure_future(pipe.step(workload.x, workload.target))
    await asyncio.to_thread(inside.wait, 30)
    end = threading.Timer(0.1, let_go.set)
    end.start()
    at_exit.pop()()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("asyncpipe cpu")]
    with pytest.raises(PipelineClosedError, match=r"closed during this step|the loop that drove it has ended"):
        await step
    end.join()
