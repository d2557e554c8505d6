"""The facade: sync and async, evaluation, state, loops, threads, reports."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline

mse = nn.functional.mse_loss
DEVICES = ["cpu:0", "cpu:1"]


def pipeline(model, **options):
    return Pipeline(model, DEVICES, **{"microbatches": 4, "loss_fn": mse} | options)


def test_sync(workload, no_leaks):
    model = workload.model()
    with pipeline(model).sync() as pipe:
        result = pipe.step(workload.x, workload.target)
        assert result.wait() is result
        assert abs(result.loss - workload.loss) < 1e-10
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
        outputs = pipe.eval().step(workload.x).outputs
        assert (outputs - workload.outputs).abs().max() < 1e-10
    assert workload.worst(model) < 1e-10


async def test_sync_inside_a_running_loop(workload):
    model = workload.model()
    with pipeline(model).sync() as pipe:
        pipe.step(workload.x, workload.target)
    assert workload.worst(model) < 1e-10


async def test_evaluation_runs_forwards_only(workload):
    model = workload.model()
    async with pipeline(model) as pipe:
        result = await pipe.eval().step(workload.x, workload.target)
        assert {time.task.kind.value for time in result.report.tasks} == {"F", "C"}
        assert abs(result.loss - workload.loss) < 1e-10
        assert not result.outputs.requires_grad
        assert result.report.peak_in_flight == (1, 1)
        assert (await pipe.step(workload.x)).loss is None
        pipe.train()
        with torch.no_grad():
            await pipe.step(workload.x, workload.target)
        assert all(p.grad is None for p in model.parameters())
        with torch.inference_mode():
            result = await pipe.step(workload.x)
        assert result.outputs.is_inference()
        await pipe.step(workload.x, workload.target)
    assert workload.worst(model) < 1e-10


async def test_a_list_of_modules_gets_numbered_keys():
    async with pipeline([nn.Linear(3, 3), nn.Linear(3, 3)]) as pipe:
        assert list(pipe.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


async def test_training_with_an_optimizer_follows_the_unsplit_model(workload):
    model, bare = workload.model(), workload.model()
    ours, theirs = torch.optim.Adam(model.parameters()), torch.optim.Adam(bare.parameters())
    async with pipeline(model, schedule="gpipe") as pipe:
        for _ in range(5):
            await pipe.step(workload.x, workload.target)
            mse(bare(workload.x), workload.target).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(model.parameters(), bare.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-8


async def test_a_handler_that_blocks_its_loop_delays_no_task(workload, before_task):
    ran = threading.Event()
    before_task(lambda task: ran.set() if task.id == "B(3,0)" else None)
    async with pipeline(workload.model()) as pipe:
        step = asyncio.ensure_future(pipe.step(workload.x, workload.target))
        await asyncio.sleep(0)
        assert ran.wait(30)  # This thread is the caller's loop, and it is blocked.
        await step


async def test_steps_of_one_pipeline_take_turns(workload):
    model = workload.model()
    async with pipeline(model) as pipe:
        await asyncio.gather(*(pipe.step(workload.x, workload.target) for _ in range(3)))
    for parameter, wanted in zip(model.parameters(), workload.gradients, strict=True):
        assert (parameter.grad - 3 * wanted).abs().max() < 1e-10


async def test_two_pipelines_at_once(workload):
    one, two = workload.model(), workload.model()
    async with pipeline(one) as first, pipeline(two, schedule="gpipe") as second:
        await asyncio.gather(first.step(workload.x, workload.target), second.step(workload.x, workload.target))
    assert workload.worst(one) < 1e-10
    assert workload.worst(two) < 1e-10


async def test_both_devices_work_at_the_same_time(workload, before_task):
    """F(1,0) and F(0,1) meet at a barrier, and so do two backwards: pipelining is real."""
    forward, backward = threading.Barrier(2), threading.Barrier(2)

    def hook(task):
        if task.id in ("F(1,0)", "F(0,1)"):
            forward.wait(30)
        if task.id in ("B(0,0)", "B(1,1)"):
            backward.wait(30)

    before_task(hook)
    async with pipeline(workload.model()) as pipe:
        await pipe.step(workload.x, workload.target)


async def test_the_report_adds_up(workload):
    async with pipeline(workload.model(), checkpoint="always") as pipe:
        result = await pipe.step(workload.x, workload.target, return_outputs=False)
    report = result.report
    assert result.outputs is None
    assert len(report.tasks) == 2 * 3 * 4 + 2 * 4
    assert report.peak_in_flight == (2, 1)
    assert 0 < report.bound <= report.seconds
    assert sum(report.stage_busy) == pytest.approx(sum(report.device_busy.values()))
    assert report.bubble_ratio == pytest.approx(1 - sum(report.device_busy.values()) / report.seconds / 2)
    assert all(0 < share < 1 for share in (*report.stage_utilization, report.bubble_ratio))


async def test_observers_see_every_step_and_cannot_fail_one(workload, caplog):
    class Good:
        def __init__(self):
            self.records = []

        def step_completed(self, record):
            self.records.append(record)

    class Bad:
        def step_completed(self, record):
            raise RuntimeError("bad observer")

    good, bad = Good(), Bad()
    async with pipeline(workload.model(), observers=[bad, good]) as pipe:
        result = await pipe.step(workload.x, workload.target)
        await pipe.step(workload.x, workload.target)
        assert pipe.observers == [good]
    assert [record.outcome for record in good.records] == ["ok", "ok"]
    assert good.records[0] is result.record
    assert "bad observer" in caplog.text


def test_devices_have_one_intra_op_thread_and_nobody_else_does(workload):
    before = torch.get_num_threads()
    seen = {}

    class Counts(nn.Module):
        def forward(self, x):
            seen[threading.current_thread().name] = torch.get_num_threads()
            return x

    with pipeline([Counts(), nn.Linear(6, 6), Counts()], balance=[2, 1]).sync() as pipe:
        pipe.eval().step(torch.randn(4, 6))
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert seen == {"asyncpipe cpu:0": 1, "asyncpipe cpu:1": 1}
    assert (torch.get_num_threads(), later) == (before, [before])


async def test_a_step_takes_one_number_from_the_global_generator(workload):
    async with pipeline(workload.model(dropout=0.5)) as pipe:
        torch.manual_seed(0)
        torch.randint(0, 2**62, ())
        wanted = torch.rand(3)
        torch.manual_seed(0)
        await pipe.step(workload.x, workload.target)
        assert torch.equal(torch.rand(3), wanted)


async def test_the_same_device_twice_is_two_devices(workload):
    model = workload.model()
    async with Pipeline(model, ["cpu", "cpu"], microbatches=3, loss_fn=mse) as pipe:
        result = await pipe.step(workload.x, workload.target)
    assert list(result.report.device_busy) == ["cpu", "cpu#1"]
    assert workload.worst(model) < 1e-10
