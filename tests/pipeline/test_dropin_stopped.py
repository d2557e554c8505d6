"""The caller's graph raises during ``loss.backward()``: the pipeline's part of the backward ends, too."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from dropin_helpers import parts, pipeline
from fault_helpers import Boom, Gradients, raise_boom
from thread_helpers import join_all, threads_of_asyncpipe
from torch import nn

from asyncpipe.core.engine.events import Outcome
from asyncpipe.errors import BackwardError
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.pipeline import call_backward
from asyncpipe.runtime.driver import Driver

mse = nn.functional.mse_loss


def test_the_callers_graph_raises_between_two_exits(workload, no_leaks):
    """Micro-batches 3 to ``nth`` + 1 got their gradients; the others never do."""
    model = workload.model()
    with pipeline(model).sync() as pipe:
        for nth in range(4):
            mse(pipe(workload.x), workload.target).backward()
            before = Gradients(model)
            outputs = pipe(parts(workload))
            outputs[nth].register_hook(raise_boom)
            with pytest.raises(Boom, match="in a hook"):
                mse(torch.cat(outputs), workload.target).backward()
            before.assert_kept()
            model.zero_grad()
            mse(pipe(workload.x), workload.target).backward()
            assert workload.worst(model) < 1e-10


class Held:
    """Holds B(3,2) until ``let_go``; ``stop`` makes outputs whose backward raises while it is held."""

    def __init__(self, before_task, let_go):
        self.begun, self.ended = threading.Event(), threading.Event()
        self._before_task, self._let_go = before_task, let_go

    def _hold(self, task):
        if task.id == "B(3,2)" and not self.begun.is_set():
            self.begun.set()
            assert self._let_go.wait(30)
            self.ended.set()

    def _raise(self, _):
        assert self.begun.wait(30)
        raise Boom("in a hook")

    def stop(self, pipe, workload, *, retain=False):
        outputs = pipe(parts(workload))
        handle = outputs[1].register_hook(self._raise)
        self._before_task(self._hold)
        with pytest.raises(Boom) as caught:
            torch.cat(outputs).square().sum().backward(retain_graph=retain)
        del caught
        handle.remove()
        return outputs


def test_what_it_had_begun_has_ended_when_the_error_arrives(workload, before_task, cancelled, no_leaks):
    """The caller can clear gradients and continue, as after an error of the bare model."""
    records = []

    class Observer:
        def step_completed(self, record):
            records.append(record)

    model = workload.model()
    held = Held(before_task, cancelled)
    with pipeline(model, observers=[Observer()]).sync() as pipe:
        mse(pipe(workload.x), workload.target).backward()
        before = Gradients(model)
        outputs = held.stop(pipe, workload)
        assert held.ended.is_set()
        assert records[-1].outcome is Outcome.CANCELLED
        before.assert_kept()
        with pytest.raises(BackwardError, match="a second backward"):
            mse(torch.cat(outputs), workload.target).backward()
        model.zero_grad()
        del outputs
        mse(pipe(workload.x), workload.target).backward()
    assert workload.worst(model) < 1e-10


@pytest.fixture
def engine_thread(monkeypatch):
    """Lets the engine's pass seem to end on a thread of the engine, as on CUDA, where nothing may wait."""
    monkeypatch.setattr(call_backward, "threading", SimpleNamespace(get_ident=object))


@pytest.mark.parametrize("method", ["Driver.drain", "GradientGuard.wait_for_abandoned"])
def test_what_comes_next_waits_for_it(workload, before_task, engine_thread, no_leaks, monkeypatch, method):
    """``close`` or another call: the task ends only after that has begun."""
    let_go = threading.Event()
    owner = {"Driver": Driver, "GradientGuard": GradientGuard}[method.partition(".")[0]]
    name = method.partition(".")[2]
    real = getattr(owner, name)

    def noting(self, *args):
        let_go.set()
        return real(self, *args)

    model = workload.model()
    held = Held(before_task, let_go)
    with pipeline(model).sync() as pipe:
        mse(pipe(workload.x), workload.target).backward()
        before = Gradients(model)
        outputs = held.stop(pipe, workload)
        assert not held.ended.is_set()
        monkeypatch.setattr(owner, name, noting)
        if owner is GradientGuard:
            loss = mse(pipe(workload.x), workload.target)
            before.assert_kept()
            model.zero_grad()
            loss.backward()
            assert workload.worst(model) < 1e-10
        else:
            pipe.close()
            before.assert_kept()
        del outputs


def test_dropped_with_a_task_that_still_runs(workload, before_task, engine_thread, no_leaks, monkeypatch):
    """Without references to pipeline and outputs, the threads end after the task has ended, not before."""
    let_go, left = threading.Event(), []
    close = Driver.close

    def noting(self):
        left.append(len(self._under_way))
        close(self)

    monkeypatch.setattr(Driver, "close", noting)
    model = workload.model()
    held = Held(before_task, let_go)
    pipe = pipeline(model).sync().__enter__()
    threads = threads_of_asyncpipe()
    held.stop(pipe, workload)
    del pipe
    gc.collect()
    assert not held.ended.is_set()
    assert all(thread.is_alive() for thread in threads)
    let_go.set()
    join_all(threads)
    assert left
    assert not any(left)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("used", [slice(0, 12), slice(0, 3)])
def test_a_retained_graph_that_was_stopped_goes_backward_again(workload, before_task, cancelled, used):
    """The second time with other gradients, or without gradients for some micro-batches."""
    bare, model = workload.model(), workload.model()
    mse(bare(workload.x)[used], workload.target[used]).backward()
    with pipeline(model).sync() as pipe:
        outputs = Held(before_task, cancelled).stop(pipe, workload, retain=True)
        chosen = torch.cat(outputs) if used.stop == 12 else outputs[0]
        mse(chosen, workload.target[used]).backward()
        del outputs, chosen
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-10


@pytest.mark.parametrize("where", ["before any exit", "behind the entry"])
def test_the_callers_graph_raises_outside_the_pipeline(workload, where):
    model = workload.model()
    with pipeline(model).sync() as pipe:
        front = workload.x.clone().requires_grad_() * 1.0
        output = pipe(front)
        middle = output * 1.0
        (front if where == "behind the entry" else middle).register_hook(raise_boom)
        with pytest.raises(Boom):
            mse(middle, workload.target).backward()
        if where == "behind the entry":
            model.zero_grad()
            output = pipe(workload.x)
        mse(output, workload.target).backward()
    assert workload.worst(model) < 1e-10
