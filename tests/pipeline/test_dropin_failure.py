"""A failure in ``y = pipe(x)`` raises one clear error and leaves nothing behind; the next call works."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref

import pytest
import torch
from dropin_helpers import parts, pipeline
from fault_helpers import (
    Boom,
    Gradients,
    OnBackward,
    collect,
    fault_at,
    interrupt_at,
    live_tensors,
    nothing,
    raise_boom,
)
from thread_helpers import join_all, threads_of_asyncpipe
from torch import nn

from asyncpipe import TaskError, is_recomputing
from asyncpipe.errors import PipelineClosedError
from asyncpipe.testing import EmulatedExecutor

MODES = ("always", "except_last", "selective", "never")
ERRORS = [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, StopIteration]
mse = nn.functional.mse_loss


# Faults of the model


class Explosive(nn.Module):
    """Raises a given error in its forward, its recomputation, its backward, or a hook of its output."""

    def __init__(self):
        super().__init__()
        self.place, self.error = "", Boom

    def arm(self, place, error=Boom):
        self.place, self.error = place, error

    def check(self, place):
        if self.place == place:
            self.place = ""
            raise self.error(f"in {place}")

    def forward(self, x):
        self.check("recomputation" if is_recomputing() else "forward")
        y = OnBackward.apply(x, lambda: self.check("backward"))
        if y.requires_grad:
            y.register_hook(lambda _: self.check("hook"))
        return y


def explosive_model(workload):
    model = workload.model()
    return model, [*model[:4], Explosive(), *model[4:]]


def check_the_next_call(pipe, model, workload):
    model.zero_grad()
    mse(pipe(workload.x), workload.target).backward()
    assert workload.worst(model) < 1e-10


@pytest.mark.parametrize("earlier", [False, True])
def test_exceptions_of_the_model(workload, earlier, no_leaks):
    """``earlier``: gradients of an earlier step exist, and do not change."""
    model, layers = explosive_model(workload)
    places = [("forward", "F"), ("recomputation", "R"), ("backward", "B"), ("hook", "B")]
    with pipeline(layers, balance=[3, 3, 3]).sync() as pipe:
        for error, (place, kind) in itertools.product(ERRORS, places):
            if earlier:
                mse(pipe(workload.x), workload.target).backward()
            before = Gradients(model)
            layers[4].arm(place, error)
            with pytest.raises(TaskError, match=f"in {place}") as caught:
                mse(pipe(workload.x), workload.target).backward()
            assert type(caught.value.__cause__) is error
            assert (caught.value.kind, caught.value.stage) == (kind, 1)
            del caught
            before.assert_kept()
            check_the_next_call(pipe, model, workload)
            model.zero_grad()


@pytest.mark.parametrize("emulated", [False, True])
def test_a_fault_in_any_task(workload, before_task, no_leaks, emulated):
    model = workload.model()
    executors = (lambda device: EmulatedExecutor(device, lambda task: 0.0)) if emulated else None
    with pipeline(model, executors=executors).sync() as pipe:
        for task_id in ("F(0,0)", "C(1,0>1)", "R(1,2)", "B(3,2)", "C(1,2>1)", "B(1,1)", "B(0,0)"):
            mse(pipe(workload.x), workload.target).backward()
            before = Gradients(model)
            before_task(fault_at(task_id))
            with pytest.raises(TaskError, match=f"Boom: in {task_id[0]}") as caught:
                mse(pipe(workload.x), workload.target).backward()
            assert caught.value.task_id == task_id
            del caught
            before.assert_kept()
            before_task(nothing)
            check_the_next_call(pipe, model, workload)


def test_a_fault_leaves_nothing_at_the_replicas_of_tied_parameters(before_task):
    def make():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
        model[2].weight = model[0].weight
        return model

    model, bare, x = make(), make(), torch.randn(12, 6, dtype=torch.float64)
    bare(x).square().sum().backward()
    with pipeline(model, 2, balance=[1, 2]).sync() as pipe:
        before_task(fault_at("B(1,1)"))
        with pytest.raises(TaskError):
            pipe(x).square().sum().backward()
        before_task(nothing)
        pipe(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-10


def test_keyboard_interrupt(workload, before_task, no_leaks, cancelled):
    """Ctrl-C while the caller's thread waits, in the call or inside the engine."""
    model = workload.model()
    with pipeline(model).sync() as pipe:
        for task_id in ("F(0,0)", "R(2,1)", "B(3,2)", "B(3,0)"):
            mse(pipe(workload.x), workload.target).backward()
            before = Gradients(model)
            cancelled.clear()
            before_task(interrupt_at(task_id, cancelled))
            with pytest.raises(KeyboardInterrupt):
                mse(pipe(workload.x), workload.target).backward()
            before.assert_kept()
            before_task(nothing)
            check_the_next_call(pipe, model, workload)


# Pipelines that are not open


async def test_a_call_while_the_pipeline_is_open(workload):
    """It blocks the caller's loop, which drives nothing."""
    model = workload.model()
    pipe = pipeline(model)
    with pytest.raises(PipelineClosedError, match="not open"):
        pipe(workload.x)
    async with pipe:
        check_the_next_call(pipe, model, workload)
    with pytest.raises(PipelineClosedError, match="closed"):
        pipe(workload.x)


def test_a_backward_after_the_end(workload, no_leaks):
    model = workload.model()
    with pipeline(model).sync() as pipe:
        mse(pipe(workload.x), workload.target).backward()
        before = Gradients(model)
        loss = mse(pipe(workload.x), workload.target)
    with pytest.raises(PipelineClosedError, match="closed"):
        pipe(workload.x)
    with pytest.raises(PipelineClosedError, match="and with it the backward of its outputs"):
        loss.backward()
    before.assert_kept()


def test_closed_between_two_exits(workload, no_leaks):
    model = workload.model()
    with pipeline(model).sync() as pipe:
        outputs = pipe(parts(workload))
        outputs[2].register_hook(lambda _: pipe.close())
        with pytest.raises(PipelineClosedError, match="and with it the backward of its outputs"):
            mse(torch.cat(outputs), workload.target).backward()
    Gradients(model).assert_kept()
    assert all(p.grad is None for p in model.parameters())


# Nothing is left


@pytest.mark.parametrize("mode", MODES)
def test_outputs_that_are_dropped_free_everything(workload, mode):
    saved = []

    class Saving(nn.Module):
        def forward(self, x):
            saved.append(weakref.ref(x))
            return x.clone()

    model = workload.model()
    with pipeline([*model[:3], Saving(), *model[3:]], checkpoint=mode).sync() as pipe:
        for grad in (True, False):
            x = workload.x.clone().requires_grad_(grad)
            output = pipe(x)
            saved += [weakref.ref(x), weakref.ref(output)]
            del x, output
            collect()
            assert [ref() for ref in saved] == [None] * len(saved)
        check_the_next_call(pipe, model, workload)


def test_a_pipeline_lives_as_long_as_its_outputs(workload, no_leaks):
    before = threads_of_asyncpipe()
    model = workload.model()
    pipe = pipeline(model).sync().__enter__()
    loss = mse(pipe(workload.x), workload.target)
    threads = threads_of_asyncpipe() - before
    del pipe
    gc.collect()
    assert all(thread.is_alive() for thread in threads)
    model[0].last_loss = loss  # A cycle through autograd's nodes, which the collector does not see.
    loss.backward()
    assert workload.worst(model) < 1e-10
    gc.collect()
    join_all(threads)  # a loss that was differentiated keeps nothing alive


@pytest.mark.parametrize("fails", [False, True])
def test_many_rounds_leave_nothing_behind(workload, before_task, new_threads, no_leaks, fails):
    """With ``fails``, a task or a hook of the caller raises in every round."""
    model, counts = workload.model(), []
    tasks = ["F(2,1)", "R(1,1)", "B(3,1)", "B(0,0)", ""]
    with pipeline(model, 2).sync() as pipe:
        for number in range(80):
            outputs = None
            before_task(fault_at(tasks[number % 5]) if fails else nothing)
            try:
                outputs = pipe(parts(workload))
                if fails and number % 5 > 2:
                    outputs[number % 3].register_hook(raise_boom)
                mse(torch.cat(outputs), workload.target).backward()
            except (TaskError, Boom):
                assert fails
            else:
                assert not fails
            assert fails == all(p.grad is None for p in model.parameters())
            model.zero_grad()
            if number % 20 == 19:
                outputs = None
                counts.append((live_tensors(), new_threads()))
        before_task(nothing)
        mse(pipe(workload.x), workload.target).backward()
    assert len(set(counts)) == 1, counts
    assert workload.worst(model) < 1e-10
