"""``steps``: bit-equal to ``step`` one by one, and whole again after errors, cancellations and broken loops."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import threading
import time
from contextlib import aclosing, closing
from itertools import islice, pairwise

import pytest
import torch
from samples import each_value
from torch import nn

from asyncpipe import Arguments, Batch, Pipeline, Share, TaskError
from asyncpipe.errors import ArgumentTypeError, BatchError, NestedWaitError, OptionError, OverlapError
from asyncpipe.ops.execute.binder import Binder
from asyncpipe.pipeline.steps import StepRun

STAGES = 3
STEPS = int(os.environ.get("ASYNCPIPE_STEPS", "180"))
"""For the campaign of overlapping steps."""
SGD = ("sgd", lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9))
ADAM = ("adam", lambda ps: torch.optim.Adam(ps, lr=0.01))


class Noted(nn.Module):
    """Notes what happens, and can be told to fail or to call something."""

    def __init__(self):
        super().__init__()
        self.calls, self.at, self.call = 0, None, None

    def forward(self, x):
        self.calls += 1
        if self.at is not None and self.calls == self.at:
            self.call()
        return x


class Seen:
    """An observer that keeps the records."""

    def __init__(self, records):
        self.records = records

    def step_completed(self, record):
        self.records.append(record)


async def collect(results, taken):
    async for result in results:
        taken.append(result.loss)


def model(dropout=0.1):
    torch.manual_seed(3)
    layers = []
    for _ in range(STAGES):
        layers += [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Dropout(dropout), Noted())]
    return nn.Sequential(*layers).double()


def batches(count, samples=12):
    torch.manual_seed(5)
    return [(torch.randn(samples, 6).double(), torch.randn(samples, 6).double()) for _ in range(count)]


def make(optimizer=SGD[1], **options):
    options = {"microbatches": 4, "schedule": "1f1b", "checkpoint": "never", **options}
    return Pipeline(model(), ["cpu"] * STAGES, loss_fn=nn.functional.mse_loss, optimizer=optimizer, **options)


def state(pipe):
    values = [t.detach().clone() for t in [*pipe.module.parameters(), *pipe.module.buffers()]]
    for _, optimizer in sorted(pipe.optimizers.items()):
        for each in optimizer.state_dict()["state"].values():
            values += [v.clone() for v in each.values() if isinstance(v, torch.Tensor)]
    return values


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


async def one_by_one(data, **options):
    """The losses of ``step`` on its own, and the state after each."""
    torch.manual_seed(1)
    async with make(**options) as pipe:
        losses, states = [], [state(pipe)]
        for x, target in data:
            losses.append((await pipe.step(x, target)).loss)
            states.append(state(pipe))
        return losses, states


@pytest.mark.promise("Bit-identical results", "Steps that overlap are bit-identical to steps one after the other.")
@each_value(
    ("optimizer, where", [(SGD, {"share": Share("job")}), (ADAM, {})]),
    ("checkpoint", ["never", "always", "always", "never", "always"]),
    ("schedule", ["1f1b", "gpipe", "zb-h2", "backward-first", "1f1b"]),
)
async def test_bit_equal_to_step_one_by_one(optimizer, schedule, checkpoint, where, no_leaks):
    data = batches(6)
    options = {"optimizer": optimizer[1], "schedule": schedule, "checkpoint": checkpoint}
    losses, states = await one_by_one(data, **options)
    for ahead in (0, 1, 2):
        torch.manual_seed(1)
        records = []
        async with make(**where, **options) as pipe:
            pipe.observers.append(Seen(records))
            results = [result async for result in pipe.steps(data, ahead=ahead)]
            assert same([r.loss for r in results], losses)
            assert same(state(pipe), states[-1])
            assert all(p.grad is None for p in pipe.module.parameters())
            pipe.state_dict()
            await results[-1].completed()
        assert [r.step for r in records] == sorted(r.step for r in records)
        assert len(records) == len(data)
        assert all(r.outcome == "ok" for r in records)


@pytest.mark.promise("Bit-identical results", "Steps that overlap are bit-identical to steps one after the other.")
def test_the_synchronous_face(no_leaks):
    data = batches(5)
    losses, states = asyncio.run(one_by_one(data))
    torch.manual_seed(1)
    with make().sync() as pipe:
        assert same([result.loss for result in pipe.steps(data)], losses)
        assert same(state(pipe), states[-1])


@pytest.mark.promise(
    "Refused, not wrong", "While a later step computes, calls that would see half-updated weights raise `OverlapError`."
)
async def test_the_next_step_begins_before_the_result_is_taken(no_leaks):
    """Its first stage runs while the result of the step before is in the caller's hands."""
    data, began = batches(3), threading.Event()
    async with make() as pipe:
        noted = pipe.module[0][-1]
        noted.at, noted.call = 5, began.set  # The second step's first micro-batch of four.
        results = pipe.steps(data)
        async with aclosing(results):
            await anext(results)
            assert await asyncio.to_thread(began.wait, 20)
            for refused in (pipe.state_dict, pipe.eval, lambda: pipe.load_state_dict({})):
                with pytest.raises(OverlapError, match="later step"):
                    refused()
            with pytest.raises(OverlapError):
                await pipe.step(*data[0])
            with pytest.raises(OverlapError):
                await anext(pipe.steps(data))
        pipe.state_dict()
        await pipe.step(*data[0])


@pytest.mark.promise("Everything ends", "Closing the iterator of `steps` completes the steps that have begun.")
async def test_a_loop_that_is_left_completes_what_has_begun(no_leaks):
    data = batches(5)
    _, states = await one_by_one(data)
    torch.manual_seed(1)
    async with make() as pipe:
        async with aclosing(pipe.steps(data)) as results:
            async for _ in results:
                break
        assert same(state(pipe), states[2])
    torch.manual_seed(1)
    with make().sync() as pipe, closing(pipe.steps(data)) as results:
        next(results)
        results.close()
        assert same(state(pipe), states[2])


@pytest.mark.promise(
    "A step that fails",
    "If a task fails while steps overlap, earlier results are returned and later steps end without an update.",
)
@pytest.mark.parametrize(("share", "seed"), [(None, k) for k in range(4)] + [(Share("job"), k) for k in range(4, 8)])
async def test_a_failed_task(seed, share, monkeypatch, no_leaks):
    """Updates of at most one step are there in part, results before it are handed out, and training goes on."""
    draw, data = random.Random(seed), batches(5)
    losses, states = await one_by_one(data, checkpoint="always")
    torch.manual_seed(1)
    async with make(checkpoint="always", share=share) as pipe:
        count = len(pipe.graph.tasks)
        step, task = draw.randrange(5), draw.randrange(count)
        bind, seen = Binder.bind, []

        def failing(self, bound):
            function = bind(self, bound)
            if self not in seen:
                seen.append(self)
            if seen.index(self) != step or bound.number != task:
                return function

            def fail():
                raise ValueError("boom")

            return fail

        monkeypatch.setattr(Binder, "bind", failing)
        for parameter in pipe.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = {p: p.grad for p in pipe.module.parameters()}
        taken = []
        with pytest.raises(TaskError, match="boom"):
            await collect(pipe.steps(data), taken)
        assert same(taken, losses[:step])
        now = list(pipe.module.parameters())
        stages = [list(part.parameters()) for part in pipe.module]
        values = iter(zip(states[step], states[step + 1], strict=False))
        for parameters in stages:
            each = [(p, *next(values)) for p in parameters]
            whole = [all(torch.equal(p, pair[k]) for p, *pair in each) for k in (0, 1)]
            assert any(whole)  # Each stage is as before the failed step, or as after it.
            if step == 0 and whole[0]:
                assert all(p.grad is before[p] for p in parameters)
            else:
                assert all(p.grad is None for p in parameters)
        monkeypatch.setattr(Binder, "bind", bind)
        assert len(now) == len(before)
        assert torch.isfinite((await pipe.step(*data[0])).loss)
        seen.clear()


@pytest.mark.promise(
    "Everything ends", "A cancellation ends all running steps, and the pipeline can be used afterwards."
)
@each_value(("share", [None, Share("job")]), ("seed", range(4)))
async def test_a_cancellation_at_any_point(seed, share, no_leaks):
    draw, data = random.Random(seed), batches(6)
    here = asyncio.get_running_loop()
    async with make(share=share) as pipe:

        async def train():
            async with aclosing(pipe.steps(data, ahead=draw.randint(1, 2))) as results:
                async for _ in results:
                    await asyncio.sleep(0)

        training = asyncio.ensure_future(train())
        noted = pipe.module[draw.randrange(STAGES)][-1]
        noted.at = draw.randint(1, 4 * len(data))
        noted.call = lambda: here.call_soon_threadsafe(training.cancel)
        await asyncio.wait([training], timeout=30)
        assert training.done()
        assert all(p.grad is None for p in pipe.module.parameters())
        pipe.state_dict()
        assert torch.isfinite((await pipe.step(*data[0])).loss)


def assert_between(pipe, states):
    """Every stage is as one of two neighbouring ``states``, and nothing of a step is left."""
    stages = [list(part.parameters()) for part in pipe.module]
    found = []
    for each in states:
        values = iter(each)
        found.append([same(mine, list(islice(values, len(mine)))) for mine in stages])
    assert any(all(map(any, zip(*two, strict=True))) for two in pairwise(found))
    assert all(p.grad is None for p in pipe.module.parameters())
    pipe.state_dict()


@pytest.mark.promise(
    "Everything ends",
    "Ctrl-C in a synchronous loop ends all running steps; an iterator that is garbage-collected ends them too.",
)
@pytest.mark.parametrize("at", [1, 4, 6, 9, 16])
def test_ctrl_c_in_the_synchronous_face(at, no_leaks):
    data = batches(4)
    _, states = asyncio.run(one_by_one(data))
    torch.manual_seed(1)
    with make().sync() as pipe:
        noted = pipe.module[1][-1]
        noted.at = at
        noted.call = lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), closing(pipe.steps(data)) as results:
            for _ in results:
                pass
        assert_between(pipe, states)
        assert torch.isfinite(pipe.step(*data[0]).loss)


@pytest.mark.promise(
    "Everything ends",
    "Ctrl-C in a synchronous loop ends all running steps; an iterator that is garbage-collected ends them too.",
)
@pytest.mark.parametrize("where", ["here", "another thread", "a task"])
def test_a_synchronous_iterator_that_is_garbage(where, monkeypatch, no_leaks):
    """Its steps are completed, but on the thread of a task, which cannot wait for them: there they are cancelled."""
    data, ignored = batches(5), []
    _, states = asyncio.run(one_by_one(data))
    dropped, ended = threading.Event(), threading.Event()
    end = StepRun._close
    monkeypatch.setattr(StepRun, "_close", lambda self: (end(self), ended.set()))
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: ignored.append(type(raised.exc_value)))
    torch.manual_seed(1)
    with make().sync() as pipe:
        noted = pipe.module[1][-1]
        noted.at = 5  # In the second step, which is under way when the first result is there.
        noted.call = lambda: (dropped.wait(20), where == "a task" and gc.collect())
        results = pipe.steps(data)
        ring = [results]
        ring.append(ring)
        next(results)
        del results, ring
        dropped.set()
        if where == "another thread":
            collecting = threading.Thread(target=gc.collect)
            collecting.start()
            collecting.join()
        elif where == "here":
            gc.collect()
        assert ended.wait(20)
        if where == "a task":
            assert ignored == [NestedWaitError]
            assert_between(pipe, states[1:3])
        else:
            assert ignored == []
            assert same(state(pipe), states[2])
        assert torch.isfinite(pipe.step(*data[0]).loss)


@pytest.mark.promise(
    "A step that fails", "An error in a mini-batch is raised after the results of earlier mini-batches."
)
async def test_errors_of_the_mini_batches_come_behind_the_results_before_them(no_leaks):
    data = batches(2)
    for bad, error in (([*data, (1, 2, 3)], BatchError), ([*data, (torch.ones(()), 1)], BatchError)):
        async with make() as pipe:
            taken = []
            with pytest.raises(error):
                await collect(pipe.steps(bad), taken)
            assert len(taken) == 2
            pipe.state_dict()


async def test_what_a_mini_batch_is():
    (x, target), *_ = batches(1)
    async with make() as pipe:
        for one in ((x, target), [x, target], Batch(x, target), Batch(Arguments.of(x), target)):
            assert [r.loss.isfinite().item() async for r in pipe.steps([one])] == [True]
        for bad in (x, {"x": x}, 7):
            with pytest.raises(ArgumentTypeError, match="steps takes"):
                pipe.steps(bad)
        with pytest.raises(OptionError, match="ahead"):
            pipe.steps([], ahead=-1)

        async def source():
            yield x, target

        assert len([r async for r in pipe.steps(source())]) == 1
        pipe.eval()
        outputs = [r.outputs async for r in pipe.steps([x, x, Batch(x)], ahead=2)]
        assert same(outputs, [outputs[0]] * 3)


@pytest.mark.promise("Right results", "Steps that cannot overlap run one after the other.")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"optimizer": None}, "does not have the optimizers"),
        ({"deferred_batch_norm": True}, "deferred batch norms"),
        ({"schedule": "backward-first"}, "the schedule decides"),
    ],
)
async def test_what_cannot_overlap_runs_one_by_one(options, why, no_leaks):
    """Each step begins when the caller has the result of the one before, and so has changed the weights."""
    data, records = batches(3), []
    async with make(**options) as pipe:
        assert why in pipe.why_steps_wait
        pipe.observers.append(Seen(records))
        optimizer, taken = torch.optim.SGD(pipe.parameters(), lr=0.1), []
        async for _ in pipe.steps(data, ahead=2):
            pipe.state_dict()
            taken.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
        assert pipe.why_steps_wait is not None
    begins = [record.journal[0][0] for record in records]
    assert len(begins) == len(data)
    assert all(result < begin for result, begin in zip(taken, begins[1:], strict=False))


@pytest.mark.promise("Memory", "There are as many threads and tensors after 180 overlapping steps as after 120.")
@pytest.mark.timeout(60 + STEPS // 20)
async def test_memory_and_threads_stay_the_same(no_leaks):
    data = batches(1) * (STEPS // 3)
    async with make() as pipe:
        counts = []
        for _ in range(3):
            async for _ in pipe.steps(data):
                pass
            gc.collect()
            counts.append((threading.active_count(), sum(isinstance(o, torch.Tensor) for o in gc.get_objects())))
        assert counts[1] == counts[2]
