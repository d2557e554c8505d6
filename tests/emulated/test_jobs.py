"""Several jobs on one device, each with streams of its own, and a training loop that runs ahead of the device."""

import asyncio
import threading
import time
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from invariants import check_scheduler
from resume_helpers import Sink, batches, make_job
from run_helpers import with_nan
from torch import nn

from asyncpipe import CallerStreams, DevicePool, Pipeline, Share
from asyncpipe.errors import HungTaskError, TaskError
from asyncpipe.runtime.watchdog import Watchdog
from asyncpipe.train import training_run
from asyncpipe.train.blocking_calls import DedicatedThread, in_thread
from asyncpipe.train.step_failures import NonFiniteLossError
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Workload
from tests.emulated import device as emu
from tests.emulated.helpers import X, layers, squares

ONE = ["emu:0"]


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def workload(make=batches):
    return Workload(model(), squares, make, memoryless=True)


async def finished(job, made=workload, **options):
    sink = Sink()
    summary = await TrainingRun(job, made, progress=sink, **options).run()
    return summary, sink.losses


def on(devices, **tables):
    return make_job(pipeline={"devices": devices}, **tables)


@pytest.mark.promise("GPUs", "A job queues nothing on the default stream.")
async def test_coroutines_of_one_loop_have_streams_of_their_own():
    one, other = CallerStreams(ONE), CallerStreams(ONE)
    met = asyncio.Barrier(2)

    async def seen():
        here = emu.current_stream()
        for _ in range(3):
            await met.wait()
            assert emu.current_stream() is here
        assert await in_thread(emu.current_stream) is here
        return here

    first, second = await asyncio.gather(one.run(seen()), other.run(seen()))
    assert len({first, second, emu.default_stream()}) == 3
    assert emu.current_stream() is emu.default_stream()
    with one.current():
        assert emu.current_stream() is first
    async with DedicatedThread("test", one.current) as thread:
        assert await thread.run(emu.current_stream) is first


class Hanging:
    """A function for a layer. The kernel of its first call, on its task's stream, ends when ``kernels`` is closed."""

    def __init__(self):
        self.begun, self.kernels = threading.Event(), ExitStack()

    def __call__(self, x):
        if not self.begun.is_set():
            self.kernels.enter_context(emu.hold(emu.current_stream()))
            self.begun.set()
        return x * 1


def completions():
    return [thread for thread in threading.enumerate() if thread.name.startswith("asyncpipe emu:0 completions")]


@pytest.mark.promise("GPUs", "On a shared pool, a hung kernel blocks only its own job.")
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("microbatches", [1, 2, 10])
async def test_a_kernel_that_hangs_on_a_shared_pool_holds_its_own_job_only(background, microbatches):
    """It holds no place of the other job on the lane, and no thread that the other's completions wait for."""
    hang, streams = Hanging(), [CallerStreams(ONE), CallerStreams(ONE)]
    async with DevicePool() as pool:
        make = partial(Pipeline, devices=ONE, pool=pool, checkpoint="never", loss_fn=squares)
        stuck = make(layers(hang), microbatches=microbatches, share=Share("a"))
        beside = make(layers(), microbatches=2, share=Share("b", background=background))
        async with stuck, beside:
            step = asyncio.ensure_future(streams[0].run(stuck.step(X)))
            with hang.kernels:
                await asyncio.to_thread(hang.begun.wait, 10)
                for _ in range(3):
                    result = await asyncio.wait_for(streams[1].run(beside.step(X)), 10)
                    await asyncio.wait_for(result.completed(), 10)
            await (await step).completed()
            check_scheduler(pool.driver.scheduler)
        for thread in completions():
            thread.join(10)
        assert not completions()


@pytest.mark.promise("GPUs", "When a hung kernel ends, no thread of its job is left.")
async def test_the_watchdog_gives_up_the_job_that_hangs_and_the_kernel_leaves_nothing_when_it_ends():
    hang, streams = Hanging(), [CallerStreams(ONE), CallerStreams(ONE)]
    clock = [0.0]
    async with DevicePool() as pool:
        make = partial(Pipeline, devices=ONE, microbatches=1, pool=pool, checkpoint="never", loss_fn=squares)
        stuck, beside = make(layers(hang), share=Share("a")), make(layers(), share=Share("b"))
        watchdog = Watchdog(pool.driver, clock=lambda: time.perf_counter() + clock[0])
        async with beside:
            await (await streams[1].run(beside.step(X))).completed()
            (other,) = completions()
            with hang.kernels:
                async with stuck:
                    first = await streams[0].run(stuck.step(X))
                    result = await asyncio.wait_for(streams[1].run(beside.step(X)), 10)
                    await asyncio.wait_for(result.completed(), 10)
                    (running,) = pool.driver.running()
                    assert running.execution.tenant.share.job == "a"
                    ended = asyncio.ensure_future(first.completed())
                    await asyncio.sleep(0)
                    clock[0] = 1e4
                    while pool.driver.running():
                        watchdog.check()
                        await asyncio.sleep(0)
                    with pytest.raises(TaskError, match=r"F\(0,0\) failed") as caught:
                        await ended
                    assert isinstance(caught.value.__cause__, HungTaskError)
                result = await asyncio.wait_for(streams[1].run(beside.step(X)), 10)
                await asyncio.wait_for(result.completed(), 10)
                assert any("given up" in thread.name for thread in completions())
            for thread in completions():
                if thread is not other:
                    thread.join(10)
            assert completions() == [other]
            check_scheduler(pool.driver.scheduler)
            assert pool.driver.scheduler._jobs._jobs.keys() == {"b"}


@pytest.mark.promise("GPUs", "A job queues nothing on the default stream.")
async def test_a_run_queues_nothing_on_the_default_stream():
    default = emu.default_stream()
    before = default.clock.get(default, 0)
    summary, losses = await finished(on(["emu:0", "emu:0"], training={"steps": 3}))
    assert default.clock.get(default, 0) == before
    assert summary.steps == len(losses) == 3


@pytest.mark.promise("GPUs", "A run on accelerators reads losses up to two steps later, and its numbers do not change.")
@pytest.mark.parametrize("ahead", [0, 5])
async def test_running_ahead_changes_no_number(monkeypatch, tmp_path, ahead):
    monkeypatch.setattr(training_run, "AHEAD", ahead)
    tables = {"training": {"steps": 7}, "snapshots": {"folder": str(tmp_path), "every": 3}}
    told = []
    job = on(["emu:0", "emu:0"], **tables)
    sink = Sink(told.append)
    summary = await TrainingRun(job, workload, progress=sink).run()
    _, wanted = await finished(on(["cpu:0", "cpu:1"], training={"steps": 7}))
    assert sink.losses == pytest.approx(wanted, abs=1e-10)
    assert told == [1, 2, 3, 4, 5, 6, 7]
    assert summary.snapshot is not None
    assert summary.snapshot.name == "step-7"


@pytest.mark.promise("GPUs", "A run on accelerators reads losses up to two steps later, and its numbers do not change.")
async def test_a_loss_that_is_not_finite_ends_the_run_at_its_step_with_the_weights_before_it():
    """The host learns of it two steps later. Until then the device makes no update."""
    made = []

    def nan_in_the_third():
        made.append(workload(with_nan(2)))
        return made[0]

    with pytest.raises(NonFiniteLossError) as caught:
        await finished(on(ONE, training={"steps": 9}), nan_in_the_third)
    assert caught.value.step == 3
    weights = [parameter.detach().cpu() for parameter in made[0].model.parameters()]

    def stopped_after_two():
        made.append(workload())
        return made[1]

    sink = Sink(lambda step: step == 2 and run.orders.stop())
    run = TrainingRun(on(["cpu:0"], training={"steps": 9}), stopped_after_two, progress=sink)
    await run.run()
    for ours, theirs in zip(weights, made[1].model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10, rtol=0)


@pytest.mark.promise("GPUs", "A run on accelerators reads losses up to two steps later, and its numbers do not change.")
async def test_the_loop_does_not_wait_for_the_device():
    """Only the threads that wait for completions do, and those that read figures of earlier steps."""
    names = []
    real = emu.Event.synchronize

    def noting(event):
        names.append(threading.current_thread().name)
        real(event)

    emu.Event.synchronize = noting
    try:
        await finished(on(ONE, training={"steps": 4}))
    finally:
        emu.Event.synchronize = real
    assert "MainThread" not in names
