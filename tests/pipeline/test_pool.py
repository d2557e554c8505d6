"""Pipelines that share devices compute the same as alone, and do not disturb each other."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading

import pytest
import torch
from torch import nn

from asyncpipe import DevicePool, Observer, Pipeline, Policy, Share, TaskError
from asyncpipe.errors import OptionError, PipelineClosedError, PolicyError

DEVICES = ["cpu:0", "cpu:1"]
STEPS = 5
mse = nn.functional.mse_loss


def pipeline(model, pool=None, **options):
    options = {"microbatches": 4, "loss_fn": mse, "checkpoint": "except_last"} | options
    return Pipeline(model, options.pop("devices", DEVICES), pool=pool, **options)


async def losses_and_gradients(pipe, model, workload, steps=STEPS):
    """Losses and gradients of some steps."""
    seen = []
    for _ in range(steps):
        model.zero_grad()
        result = await pipe.step(workload.x, workload.target)
        seen.append([result.loss, *(parameter.grad.clone() for parameter in model.parameters())])
    return seen


def assert_equal(these, those):
    assert len(these) == len(those)
    for step, other in zip(these, those, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(step, other, strict=True))


async def alone(workload, seed):
    model = workload.model(dropout=0.5)
    generator = torch.Generator().manual_seed(seed)
    async with pipeline(model, generator=generator) as pipe:
        return await losses_and_gradients(pipe, model, workload)


@pytest.mark.parametrize("background", [False, True])
async def test_several_at_once_are_each_as_alone(workload, no_leaks, background):
    """With dropout: step seeds come from a generator of each pipeline's own."""
    wanted = [await alone(workload, seed) for seed in range(3)]
    async with DevicePool() as pool:

        async def train(seed):
            model = workload.model(dropout=0.5)
            share = Share(f"job {seed}", weight=1.0 + seed, background=background and seed == 2)
            generator = torch.Generator().manual_seed(seed)
            async with pipeline(model, pool, share=share, generator=generator) as pipe:
                return await losses_and_gradients(pipe, model, workload)

        found = await asyncio.gather(*map(train, range(3)))
    for these, those in zip(found, wanted, strict=True):
        assert_equal(these, those)


async def test_steps_meet_on_a_device(workload, before_task, no_leaks):
    """Both jobs' steps run at the same time: each waits, on its first device, until the other has begun."""
    begun = {name: threading.Event() for name in ("a", "b")}
    thread_of = {}
    async with DevicePool() as pool:
        models = {name: workload.model() for name in begun}
        pipes = {
            name: pipeline(model, pool, share=Share(name), devices=[f"cpu:{first}", f"cpu:{first + 1}"])
            for first, (name, model) in enumerate(models.items())
        }

        def meet(task):
            if task.id == "F(0,0)":
                name = "a" if task.lane.device == "cpu:0" else "b"
                thread_of[name] = threading.current_thread().name
                begun[name].set()
                assert all(event.wait(30) for event in begun.values())

        before_task(meet)
        async with pipes["a"], pipes["b"]:
            await asyncio.gather(*(pipe.step(workload.x, workload.target) for pipe in pipes.values()))
        assert thread_of == {"a": "asyncpipe cpu:0", "b": "asyncpipe cpu:1"}
        names = [thread.name for thread in threading.enumerate()]
        assert [names.count(f"asyncpipe cpu:{k}") for k in range(3)] == [1, 1, 1]
        assert all(workload.worst(model) < 1e-10 for model in models.values())


async def test_one_that_fails_leaves_the_others_alone(workload, no_leaks):
    wanted = await alone(workload, 0)
    async with DevicePool() as pool:
        model, failing = workload.model(dropout=0.5), workload.model()
        generator = torch.Generator().manual_seed(0)
        async with (
            pipeline(model, pool, share=Share("good"), generator=generator) as good,
            pipeline(failing, pool, share=Share("bad"), schedule="gpipe", microbatches=3) as bad,
        ):
            found = []
            for _ in range(STEPS):
                model.zero_grad()
                step = asyncio.ensure_future(good.step(workload.x, workload.target))
                other = asyncio.ensure_future(bad.step(workload.x, workload.target[:, :3]))
                with pytest.raises(TaskError):
                    await other
                result = await step
                found.append([result.loss, *(parameter.grad.clone() for parameter in model.parameters())])
            assert all(parameter.grad is None for parameter in failing.parameters())
    assert_equal(found, wanted)


async def test_one_that_is_cancelled_or_closed_leaves_the_others_alone(workload, before_task, no_leaks):
    wanted = await alone(workload, 0)
    held, let_go = threading.Event(), threading.Event()
    async with DevicePool() as pool:
        model, other = workload.model(dropout=0.5), workload.model()
        generator = torch.Generator().manual_seed(0)
        async with pipeline(model, pool, share=Share("good"), generator=generator) as good:
            async with pipeline(other, pool, share=Share("other"), devices=["cpu:7", "cpu:8"]) as pipe:

                def hold(task):
                    if task.lane.device == "cpu:7":
                        held.set()
                        assert let_go.wait(30)

                before_task(hold)
                step = asyncio.ensure_future(pipe.step(workload.x, workload.target))
                await asyncio.get_running_loop().run_in_executor(None, held.wait)
                found = await losses_and_gradients(good, model, workload, 2)
                step.cancel()
                let_go.set()
                with pytest.raises(asyncio.CancelledError):
                    await step
            found += await losses_and_gradients(good, model, workload, STEPS - 2)
            with pytest.raises(PipelineClosedError, match="closed"):
                await pipe.step(workload.x, workload.target)
    assert_equal(found, wanted)


async def test_observers_see_their_own_pipeline(workload, no_leaks):
    class Keeper:
        def __init__(self):
            self.microbatches = set()

        def step_completed(self, record):
            self.microbatches.add(record.graph.shape.microbatches)

    keepers = [Keeper(), Keeper()]
    async with DevicePool() as pool:

        async def train(keeper, microbatches):
            options = {"observers": [keeper], "microbatches": microbatches, "share": Share(str(microbatches))}
            async with pipeline(workload.model(), pool, **options) as pipe:
                for _ in range(3):
                    await pipe.step(workload.x, workload.target)

        await asyncio.gather(train(keepers[0], 2), train(keepers[1], 3))
    assert [keeper.microbatches for keeper in keepers] == [{2}, {3}]


async def test_dropped_pipelines_leave_the_pool_usable(workload, no_leaks):
    async with DevicePool() as pool:
        for _ in range(3):
            model = workload.model()
            pipe = await pipeline(model, pool).__aenter__()
            await pipe.step(workload.x, workload.target)
            assert workload.worst(model) < 1e-10
            del pipe, model
            gc.collect()


async def test_mistakes_are_told(workload):
    model = workload.model()
    pool = DevicePool()
    with pytest.raises(OptionError, match="in_flight: a pipeline on a pool takes these from it"):
        pipeline(model, pool, in_flight=3)
    with pytest.raises(OptionError, match="intra_op_threads must be a positive integer"):
        DevicePool(intra_op_threads=0)
    with pytest.raises(PipelineClosedError, match="the device pool is not open"):
        async with pipeline(model, pool):
            pass
    async with pool:
        pass
    with pytest.raises(PipelineClosedError, match="opens once"):
        async with pool:
            pass


async def test_a_copy_is_by_itself(workload, no_leaks):
    async with DevicePool() as pool:
        pipe = pipeline(workload.model(), pool, share=Share("job"), generator=torch.Generator())
        copied = copy.deepcopy(pipe)
    with copied.sync() as alone:
        assert torch.allclose(alone.step(workload.x, workload.target).loss, workload.loss, atol=1e-10)


class Broken(Policy):
    """Does one thing wrong, when it has been told of so many tasks."""

    def __init__(self, lane, wrong, after):
        self.tasks, self.wrong, self.after = [], wrong, after

    def ready(self, step, task, now):
        self.tasks.append((step, task))
        self.after -= 1
        if self.after < 0 and self.wrong == "raises when told":
            raise ZeroDivisionError

    def choose(self, now):
        if self.after < 0 and self.wrong == "raises when asked":
            raise ZeroDivisionError
        if self.after < 0 and self.wrong == "chooses nothing":
            return None
        if self.after < 0:
            return "nonsense", 0
        return self.tasks.pop(0) if self.tasks else None

    def drop(self, step):
        self.tasks = []


@pytest.mark.promise(
    "Everything ends", "A policy of yours that is wrong ends every step of its pool with an error that names it."
)
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("wrong", ["raises when told", "raises when asked", "chooses nonsense", "chooses nothing"])
async def test_a_policy_that_is_wrong_ends_every_step_and_nobody_waits(workload, new_threads, caplog, wrong, after):
    async with DevicePool(policy=lambda lane: Broken(lane, wrong, after)) as pool:
        pipes = [pipeline(workload.model(), pool, share=Share(name)) for name in ("a", "b")]
        for pipe in pipes:
            await pipe.__aenter__()
        steps = [pipe.step(workload.x, workload.target) for pipe in pipes]
        for error in await asyncio.gather(*steps, return_exceptions=True):
            assert isinstance(error, PolicyError | PipelineClosedError)
            assert isinstance(error, PipelineClosedError) or "<lambda>" in str(error) or "Broken" in str(error)
        assert pool.is_broken
        assert not [record for record in caplog.records if "Exception in callback" in record.message]
        for pipe in pipes:
            await pipe.aclose()
    assert new_threads() == 0


async def test_a_share_is_changed_from_the_next_step_on(workload, no_leaks):
    class Shares(Observer):
        def __init__(self):
            self.seen = []

        def step_completed(self, record):
            self.seen.append(record.journal[0][1].share)

    shares = Shares()
    options = {"share": Share("a"), "observers": [shares]}
    async with DevicePool() as pool, pipeline(workload.model(), pool, **options) as pipe:
        await pipe.step(workload.x, workload.target)
        pipe.change_share(Share("a", weight=3.0, background=True))
        await pipe.step(workload.x, workload.target)
        with pytest.raises(OptionError, match="the share is that of job 'b', not of 'a'"):
            pipe.change_share(Share("b"))
    assert shares.seen == [Share("a"), Share("a", weight=3.0, background=True)]
