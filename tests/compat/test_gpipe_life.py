"""A ``GPipe`` needs no ``with``: its threads start and end automatically. Errors of a layer are raised by the call."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import traceback
import weakref

import pytest
import torch
from torch import nn

from asyncpipe.compat.torchgpipe import GPipe
from asyncpipe.errors import TaskError

CPUS = ["cpu"] * 3


class MyError(Exception):
    """A program's own."""


class Raises(nn.Module):
    """Raises an error at one of its calls."""

    def __init__(self, error=None, at=0):
        super().__init__()
        self.error, self.at, self.calls = error, at, 0

    def forward(self, x):
        self.calls += 1
        if self.error is not None and self.calls > self.at:
            raise self.error
        return x * 2


class RaisesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MyError("backward")


class Apply(nn.Module):
    def forward(self, x):
        return RaisesBackward.apply(x)


def gpipe(layer, **options):
    return GPipe(nn.Sequential(nn.Linear(1, 1), layer, nn.Linear(1, 1)), [1, 1, 1], devices=CPUS, chunks=3, **options)


def threads():
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


# Threads


def test_threads_start_with_the_first_forward_and_end_with_the_module():
    before = threads()
    model = gpipe(Raises())
    assert threads() == before
    model(torch.ones(3, 1))
    started = threads() - before
    assert len(started) == 4
    model(torch.ones(3, 1))
    assert threads() - before == started
    del model
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started)


def test_an_output_outlives_the_module():
    model = gpipe(Raises())
    weight = model[0].weight
    output = model(torch.ones(3, 1))
    del model
    gc.collect()
    output.sum().backward()
    assert weight.grad is not None


# Errors


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("at", [0, 2])
def test_an_error_keeps_its_type_and_traceback(no_leaks, at, checkpoint):
    layer = Raises(MyError("wrong"), at)
    model = gpipe(layer, checkpoint=checkpoint)
    with pytest.raises(MyError, match="wrong") as caught:
        model(torch.ones(3, 1))
    assert caught.value is layer.error
    assert "raise self.error" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert caught.value.__notes__ == [f"raised by F({at},1): micro-batch {at}, stage 1, device cpu#1"]
    assert caught.value.__cause__ is None
    assert all(parameter.grad is None for parameter in model.parameters())
    layer.error = None
    del caught
    model(torch.ones(3, 1)).sum().backward()
    assert model[0].weight.grad is not None


def test_an_error_keeps_nothing_alive():
    model = gpipe(Raises(MyError()))
    dead = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(MyError):
            model(torch.ones(3, 1))
        model[1].error = None
        del model
        assert dead() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_what_would_end_a_program_ends_the_call(no_leaks, error):
    layer = Raises(error("stop"))
    model = gpipe(layer)
    with pytest.raises(TaskError, match=error.__name__) as caught:
        model(torch.ones(3, 1))
    assert caught.value.__cause__ is layer.error
    layer.error = None
    del caught
    assert model(torch.ones(3, 1)).shape == (3, 1)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_an_error_in_the_backward(no_leaks, checkpoint):
    model = gpipe(Apply(), checkpoint=checkpoint)
    output = model(torch.ones(3, 1))
    with pytest.raises(TaskError, match="MyError: backward") as caught:
        output.sum().backward()
    assert isinstance(caught.value.__cause__, MyError)
    assert all(parameter.grad is None for parameter in model.parameters())
    del caught, output, model
    gc.collect()  # A TaskError and the frames that it came through hold one another.
