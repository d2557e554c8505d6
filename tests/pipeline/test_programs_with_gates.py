"""Backwards of ``pipe(x)`` wait, as programs, for their caller's gradients, while their devices do other things."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from dropin_helpers import parts
from fault_helpers import Boom
from invariants import check_scheduler
from thread_helpers import Threads
from torch import nn

from asyncpipe import DevicePool, Pipeline, Share, TaskError

mse = nn.functional.mse_loss
DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


def pipeline(model, **options):
    return Pipeline(model, DEVICES, **{"microbatches": 4, "schedule": "gpipe", "checkpoint": "except_last"} | options)


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_while_a_backward_waits(workload, no_leaks, fails):
    """A hook of the caller's graph calls the pipeline, whose backward waits for the hook on every device."""
    model, seen = workload.model(), []

    def hook(_):
        with torch.no_grad():
            seen.append(pipe(workload.x))
        if fails:
            raise Boom("after it")

    with pipeline(model).sync() as pipe:
        outputs = pipe(parts(workload))
        handle = outputs[1].register_hook(hook)
        if fails:
            with pytest.raises(Boom):
                mse(torch.cat(outputs), workload.target).backward()
            handle.remove()
            del outputs
            model.zero_grad()
            outputs = pipe(parts(workload))
        mse(torch.cat(outputs), workload.target).backward()
        del outputs
        assert workload.worst(model) < 1e-10
    assert (seen.pop() - workload.outputs).abs().max() < 1e-10


async def test_a_fault_in_one_of_two_backwards_that_wait(workload, before_task, no_leaks):
    """On the same devices, of two threads; one's backward fails while the other's waits at its gates."""
    models = [workload.model(), workload.model()]
    failed, waiting = threading.Event(), threading.Event()

    def hook(_):
        waiting.set()
        assert failed.wait(30)

    def fault(task):
        if task.id == "B(0,2)" and not failed.is_set():
            raise Boom("in B(0,2)")

    async with DevicePool() as pool:
        with pipeline(models[0], pool=pool).sync() as good, pipeline(models[1], pool=pool).sync() as bad:
            _fail_beside(good, bad, workload, waiting, failed, hook, lambda: before_task(fault))
            models[1].zero_grad()
            mse(bad(workload.x), workload.target).backward()
    assert [workload.worst(model) < 1e-10 for model in models] == [True, True]


def _fail_beside(good, bad, workload, waiting, failed, hook, spoil):
    outputs, loss = good(parts(workload)), mse(bad(workload.x), workload.target)
    outputs[2].register_hook(hook)
    spoil()
    thread = Threads(mse(torch.cat(outputs), workload.target).backward)
    assert waiting.wait(30)
    with pytest.raises(TaskError, match=r"B\(0,2\) failed"):
        loss.backward()
    failed.set()
    assert thread.join() == [None]


async def _steps(pipe, model, workload, count, *, faults=False):
    for number in range(count):
        model.zero_grad()
        if faults and number % 2:
            with pytest.raises(TaskError):
                await pipe.step(workload.x, workload.target[:, :-1])
            continue
        await (await pipe.step(workload.x, workload.target)).completed()
        assert workload.worst(model) < 1e-10


@pytest.mark.parametrize("job", ["", "a job"])
async def test_two_pipelines_on_one_pool_while_one_fails(workload, no_leaks, job):
    """Without names both run by programs; a job with a name comes while a program runs, and goes task by task."""
    models = [workload.model() for _ in range(2)]
    options = {"schedule": "1f1b", "loss_fn": _mse_of_equals}
    async with DevicePool() as pool, pipeline(models[0], pool=pool, **options) as first:
        share = {"share": Share(job)} if job else {}
        async with pipeline(models[1], pool=pool, **options, **share) as second:
            await asyncio.gather(
                _steps(first, models[0], workload, 6), _steps(second, models[1], workload, 6, faults=True)
            )
        check_scheduler(pool.driver.scheduler)
        assert not pool.driver.scheduler._steps


def _mse_of_equals(outputs, target):
    if outputs.shape != target.shape:
        raise Boom("of other shapes")
    return mse(outputs, target)
