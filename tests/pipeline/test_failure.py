"""A step that fails or is cancelled raises one clear error and leaves nothing behind; the next step works."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
import torch
from fault_helpers import Boom, fault_at, interrupt_at, live_tensors, nothing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thread_helpers import join_all, threads_of_asyncpipe
from torch import nn

from asyncpipe import Pipeline, TaskError

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]
mse = nn.functional.mse_loss

# A task of each kind at the first, a middle and the last stage; copies into each stage that has one, both ways.
TASKS = [
    *(f"{kind}(1,{stage})" for kind in "FRB" for stage in (0, 1, 2)),
    "C(1,0>1)",
    "C(1,1>2)",
    "C(1,2>1)",
    "C(1,1>0)",
]


def pipeline(model, **options):
    options = {"schedule": "1f1b", "checkpoint": "always", "microbatches": 4, "loss_fn": mse} | options
    return Pipeline(model, DEVICES[: options.pop("devices", 3)], **options)


@pytest.mark.promise(
    "A step that fails",
    "A task that raises ends its step with a `TaskError` that names it; the gradients stay as they were.",
)
@pytest.mark.parametrize(
    ("schedule", "tasks"),
    [
        ("1f1b", TASKS),
        ("gpipe", ("R(1,1)", "C(1,1>0)")),
        ("backward-first", ("F(1,1)", "B(1,2)")),
        ("zb-h1", ("I(1,0)", "I(1,1)", "W(1,0)", "W(1,2)", "C(1,1>0)")),
    ],
)
async def test_a_fault_in_any_task(workload, before_task, no_leaks, schedule, tasks):
    model = workload.model()
    async with pipeline(model, schedule=schedule) as pipe:
        for task_id in tasks:
            before_task(fault_at(task_id))
            with pytest.raises(TaskError) as caught:
                await pipe.step(workload.x, workload.target)
            assert isinstance(caught.value.__cause__, Boom)
            assert task_id in str(caught.value)
            assert caught.value.kind == task_id[0]
            assert caught.value.microbatch == 1
            assert all(p.grad is None for p in model.parameters())
            del caught
            before_task(nothing)
            await pipe.step(workload.x, workload.target)
            assert workload.worst(model) < 1e-10
            model.zero_grad()


async def test_a_failed_step_leaves_earlier_gradients_alone(workload, before_task):
    model = workload.model()
    async with pipeline(model) as pipe:
        await pipe.step(workload.x, workload.target)
        grads = [p.grad for p in model.parameters()]
        values = [grad.clone() for grad in grads]
        before_task(fault_at("B(3,0)"))
        with pytest.raises(TaskError):
            await pipe.step(workload.x, workload.target)
    for parameter, grad, value in zip(model.parameters(), grads, values, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, value)


# Cancellation


async def cancelled_step(pipe, workload, before_task, nth):
    """Cancel the step from within its nth task; whether it was cancelled."""
    coroutine = asyncio.ensure_future(pipe.step(workload.x, workload.target))
    loop = asyncio.get_running_loop()
    seen = iter(range(10_000))
    cancelled = threading.Event()

    def cancel():
        coroutine.cancel()
        cancelled.set()

    def hook(task):
        if next(seen) == nth:
            loop.call_soon_threadsafe(cancel)
            cancelled.wait(30)

    before_task(hook)
    try:
        await coroutine
    except asyncio.CancelledError:
        return True
    return False


@pytest.mark.promise("A step that fails", "A cancellation at any point leaves the gradients as they were.")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_cancellation_at_any_point(workload, before_task, no_leaks, schedule):
    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(nth=st.integers(0, 60), checkpoint=st.sampled_from(["always", "except_last", "never"]))
    def check(nth, checkpoint):
        async def main():
            model = workload.model()
            async with pipeline(model, schedule=schedule, checkpoint=checkpoint) as pipe:
                if await cancelled_step(pipe, workload, before_task, nth):
                    assert all(p.grad is None for p in model.parameters())
                else:
                    model.zero_grad()
                before_task(nothing)
                await pipe.step(workload.x, workload.target)
            assert workload.worst(model) < 1e-10

        asyncio.run(main())

    check()


async def test_cancellation_waits_for_the_running_task(workload, before_task):
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def hook(task):
        if task.id == "F(1,1)":
            started.set()
            assert release.wait(30)
            ended.set()

    before_task(hook)
    async with pipeline(workload.model()) as pipe:
        coroutine = asyncio.ensure_future(pipe.step(workload.x, workload.target))
        await asyncio.to_thread(started.wait, 30)
        coroutine.cancel()
        done, _ = await asyncio.wait([coroutine], timeout=0)
        assert not done
        coroutine.cancel()  # Impatience changes nothing.
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await coroutine
        assert ended.is_set()


def test_keyboard_interrupt_in_a_blocking_step(workload, before_task, no_leaks, cancelled):
    model = workload.model()
    with pipeline(model).sync() as pipe:
        for task_id in ("F(0,0)", "C(1,0>1)", "R(2,1)", "B(3,0)"):
            cancelled.clear()
            before_task(interrupt_at(task_id, cancelled))
            with pytest.raises(KeyboardInterrupt):
                pipe.step(workload.x, workload.target)
            assert all(p.grad is None for p in model.parameters())
            before_task(nothing)
            pipe.step(workload.x, workload.target)
            assert workload.worst(model) < 1e-10
            model.zero_grad()


# A caller that drops the pipeline


@pytest.mark.promise(
    "Everything ends", "Closing or dropping a pipeline, also during a step, ends and leaves no thread."
)
async def test_dropped_without_closing(workload, no_leaks):
    pipe = await pipeline(workload.model()).__aenter__()
    await pipe.step(workload.x, workload.target)
    threads = threads_of_asyncpipe()
    assert len(threads) == 4
    dead = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert dead() is None
    await asyncio.to_thread(join_all, threads)


def test_dropped_with_its_loop_during_a_step(workload, before_task, no_leaks):
    started, release = threading.Event(), threading.Event()

    def hook(task):
        if task.id == "F(1,1)":
            started.set()
            assert release.wait(30)

    before_task(hook)
    threads = []

    async def main():
        pipe = await pipeline(workload.model()).__aenter__()
        coroutine = asyncio.ensure_future(pipe.step(workload.x, workload.target))
        await asyncio.to_thread(started.wait, 30)
        threads.extend(threads_of_asyncpipe())
        asyncio.get_running_loop().call_later(0.01, release.set)
        assert not coroutine.done()  # asyncio.run cancels it when main returns.

    asyncio.run(main())
    gc.collect()
    join_all(threads)


def test_many_faults_leave_nothing_behind(workload, before_task, new_threads, no_leaks):
    async def main():
        model = workload.model()
        async with pipeline(model) as pipe:
            await pipe.step(workload.x, workload.target)
            model.zero_grad()
            for number in range(80):
                if number % 4 == 3:
                    await cancelled_step(pipe, workload, before_task, number % 50)
                else:
                    before_task(fault_at(TASKS[number % len(TASKS)]))
                    with pytest.raises(TaskError):
                        await pipe.step(workload.x, workload.target)
                model.zero_grad()
                before_task(nothing)
                if number == 20:
                    gc.collect()
                    before = live_tensors(), new_threads(), len(asyncio.all_tasks())
            gc.collect()
            assert (live_tensors(), new_threads(), len(asyncio.all_tasks())) == before
            await pipe.step(workload.x, workload.target)
        assert workload.worst(model) < 1e-10

    asyncio.run(main())
