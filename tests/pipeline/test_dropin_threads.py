"""Backwards of one pipeline on several threads: each gets its own gradients, or one sentence; none hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from thread_helpers import Threads
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from asyncpipe import DevicePool, Microbatches, Pipeline, TaskError
from asyncpipe.errors import BackwardError
from asyncpipe.ops.execute.gradient_guard import GradientGuard

MODES = ("always", "except_last", "selective", "never")
mse = nn.functional.mse_loss


def pipeline(model, **options):
    options = {"microbatches": 4, "schedule": "gpipe", "checkpoint": "except_last"} | options
    return Pipeline(model, ["cpu:0", "cpu:1"], **options)


def wanted(bare, batches):
    return [torch.autograd.grad(bare(x).square().sum(), list(bare.parameters())) for x in batches]


def assert_close(ours, theirs):
    assert not isinstance(ours, BaseException), ours
    for mine, yours in zip(ours, theirs, strict=True):
        assert (mine - yours).abs().max() < 1e-10


@pytest.fixture
def waits(monkeypatch):
    """Set when a backward begins to wait for its turn."""
    event = threading.Event()
    enter = GradientGuard.enter

    def noting(self, owner, member, **options):
        event.set()
        enter(self, owner, member, **options)

    monkeypatch.setattr(GradientGuard, "enter", noting)
    return event


def paused(outputs, until: threading.Event) -> threading.Event:
    """Let a backward of the micro-batches ``outputs`` (the last first) stop until an event; set when it has."""
    reached = threading.Event()

    def hook(_):
        reached.set()
        assert until.wait(30)

    outputs[1].register_hook(hook)
    return reached


@pytest.mark.promise(
    "Your own program", "Backwards of `pipe(x)` on several threads take turns, and each makes its own gradients."
)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_two_threads_at_once(workload, mode):
    model, batches = workload.model(), [workload.x, workload.x.sin()]
    parameters = list(model.parameters())
    together = threading.Barrier(2)

    def work(loss):
        together.wait(30)
        return torch.autograd.grad(loss, parameters)

    with pipeline(model, checkpoint=mode).sync() as pipe:
        for _ in range(5):
            losses = [pipe(x).square().sum() for x in batches]
            results = Threads(*(lambda loss=loss: work(loss) for loss in losses)).join()
            for ours, theirs in zip(results, wanted(workload.model(), batches), strict=True):
                assert_close(ours, theirs)
            assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.promise(
    "Your own program", "Backwards of `pipe(x)` on several threads take turns, and each makes its own gradients."
)
def test_losses_of_two_threads_at_once(workload):
    """Their gradients are added to the earlier ones, with hooks that see each whole gradient."""
    model, batches, seen = workload.model(), [workload.x, workload.x.sin()], []
    first = next(model.parameters())
    first.register_hook(lambda gradient: seen.append(gradient.clone()))
    together = threading.Barrier(2)

    def work(loss):
        together.wait(30)
        loss.backward()

    made = wanted(workload.model(), batches)
    with pipeline(model).sync() as pipe:
        for count in range(1, 6):
            losses = [pipe(x).square().sum() for x in batches]
            assert Threads(*(lambda loss=loss: work(loss) for loss in losses)).join() == [None, None]
            assert_close([p.grad for p in model.parameters()], [count * (a + b) for a, b in zip(*made, strict=True)])
    assert len(seen) == 10
    assert all(min((one - both[0]).abs().max() for both in made) < 1e-10 for one in seen)


def test_one_retained_output_on_two_threads(workload):
    model = workload.model()
    parameters, together = list(model.parameters()), threading.Barrier(2)

    def work(loss):
        together.wait(30)
        return torch.autograd.grad(loss, parameters, retain_graph=True)

    with pipeline(model).sync() as pipe:
        output = pipe(workload.x)
        for _ in range(5):
            results = Threads(lambda: work(output.square().sum()), lambda: work(2 * output.square().sum())).join()
            (theirs,) = wanted(workload.model(), [workload.x])
            assert_close(results[0], theirs)
            assert_close(results[1], [2 * gradient for gradient in theirs])


@pytest.mark.promise("Everything ends", "If the backward of one thread fails, a thread that waits for it continues.")
@pytest.mark.parametrize("fault", ["in the caller's graph", "in a task", "dropped"])
def test_who_waits_goes_on_when_the_other_fails(workload, waits, before_task, fault):
    """Half-way, while the other thread waits for its turn; also if the engine tells nobody."""
    model = workload.model()
    with pipeline(model).sync() as pipe:
        outputs, loss = pipe(Microbatches(list(workload.x.split(3)))), mse(pipe(workload.x), workload.target)
        reached = paused(outputs, waits)
        if fault == "in the caller's graph":
            outputs[0].register_hook(lambda _: 1 / 0)
        if fault == "in a task":

            def fail(task):
                if task.id == "B(0,0)" and not failed:
                    failed.append(task)
                    raise ZeroDivisionError

            failed = []
            before_task(fail)
        if fault == "dropped":
            outputs[0].register_hook(lambda _: torch.zeros(1))  # of a wrong shape: the engine itself raises
        failing = Threads(lambda: torch.cat(outputs).square().sum().backward())
        assert reached.wait(30)
        loss.backward()
        (error,) = failing.join()
        assert isinstance(error, ZeroDivisionError | TaskError | RuntimeError)
    assert workload.worst(model) < 1e-10


@pytest.mark.promise("Everything ends", "A step and a backward on another thread take turns.")
def test_a_step_waits_for_a_backward_on_another_thread(workload, waits):
    model = workload.model()
    with pipeline(model, loss_fn=mse).sync() as pipe:
        outputs = pipe(Microbatches(list(workload.x.split(3))))
        reached = paused(outputs, waits)
        other = Threads(lambda: torch.autograd.grad(torch.cat(outputs).square().sum(), list(model.parameters())))
        assert reached.wait(30)
        pipe.step(workload.x, workload.target)
        assert_close(other.join()[0], wanted(workload.model(), [workload.x])[0])
    assert workload.worst(model) < 1e-10


@pytest.mark.promise("Everything ends", "A step and a backward on another thread take turns.")
async def test_a_backward_while_a_step_is_under_way_on_its_thread(workload, before_task):
    """The step ends on this thread, so to wait would be to wait for ever."""
    model = workload.model()
    held, let_go = threading.Event(), threading.Event()

    def hold(task):
        if task.id == "B(0,0)":
            held.set()
            assert let_go.wait(30)

    async with pipeline(model, loss_fn=mse) as pipe:
        loss = pipe(workload.x).square().sum()
        before_task(hold)
        step = asyncio.ensure_future(pipe.step(workload.x, workload.target))
        await asyncio.to_thread(held.wait, 30)
        with pytest.raises(BackwardError, match="half-way on this thread"):
            loss.backward()
        let_go.set()
        await step
    assert workload.worst(model) < 1e-10


def test_a_backward_inside_a_backward_on_one_thread(workload):
    """A reentrant checkpoint of the caller, behind another call of the same pipeline."""
    bare, model = [workload.model().append(nn.Linear(8, 6).double()) for _ in range(2)]
    bare.load_state_dict(model.state_dict())
    with pipeline(model).sync() as pipe:
        for f in (pipe, bare):
            x = workload.x.clone().requires_grad_()
            f(torch_checkpoint(lambda part, f=f: f(part).sin(), x, use_reentrant=True)).square().sum().backward()
    assert_close([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])


def test_a_backward_between_the_outputs_of_another_on_its_thread(workload):
    model = workload.model()
    with pipeline(model).sync() as pipe:
        inner = pipe(workload.x).square().sum()
        outputs = pipe(Microbatches(list(workload.x.split(3))))
        outputs[0].register_hook(lambda _: inner.backward())
        with pytest.raises(BackwardError, match="half-way on this thread"):
            torch.cat(outputs).square().sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        mse(pipe(workload.x), workload.target).backward()
    assert workload.worst(model) < 1e-10


@pytest.mark.promise(
    "Everything ends", "Two threads that go backward through two pipelines in opposite orders do not hang."
)
def test_two_threads_through_two_pipelines_in_opposite_orders(workload):
    """Each holds what the other needs: one is told, the other goes on."""
    models = [workload.model().append(nn.Linear(8, 6).double()) for _ in range(2)]
    both = threading.Barrier(2)

    def meet(_):
        both.wait(30)

    def work(first, second, x):
        between = second(x)
        between.register_hook(meet)
        return torch.autograd.grad(first(between).square().sum(), [*models[0].parameters(), *models[1].parameters()])

    with pipeline(models[0]).sync() as a, pipeline(models[1]).sync() as b:
        results = Threads(lambda: work(a, b, workload.x), lambda: work(b, a, workload.x)).join()
    (told,) = [number for number, result in enumerate(results) if isinstance(result, BackwardError)]
    assert "backwards on two threads wait for each other" in str(results[told])
    first, second = models if told else reversed(models)
    loss = first(second(workload.x)).square().sum()
    assert_close(results[1 - told], torch.autograd.grad(loss, [*models[0].parameters(), *models[1].parameters()]))


async def test_a_task_that_would_wait_for_its_own_devices(workload):
    """In a stage's backward: another pipeline of the pool, whose gradients a thread is making."""
    inner, outer = workload.model(), workload.model()
    until = threading.Event()
    async with (
        DevicePool() as pool,
        pipeline(inner, pool=pool) as other,
        pipeline(outer, pool=pool, checkpoint="never") as pipe,
    ):
        loss, outputs = other(workload.x).sum(), other(Microbatches(list(workload.x.split(3))))
        reached = paused(outputs, until)
        making = Threads(lambda: torch.autograd.grad(torch.cat(outputs).square().sum(), list(inner.parameters())))
        assert reached.wait(30)

        def backward(module, inputs, output):
            output.register_hook(lambda _: loss.backward())

        outer[5].register_forward_hook(backward)
        with pytest.raises(TaskError, match="a task asks for gradients of a pipeline while a step"):
            mse(pipe(workload.x), workload.target).backward()
        until.set()
        assert_close(making.join()[0], wanted(workload.model(), [workload.x])[0])
