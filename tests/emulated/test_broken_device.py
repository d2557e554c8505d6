"""A device fails: one ``TaskError`` says where, gradients are what they were, closing ends."""

import asyncio

import pytest
import torch
from fault_helpers import OnBackward

from asyncpipe import Pipeline, TaskError
from asyncpipe.ops.device.streams import Fence
from tests.emulated import device as emu
from tests.emulated.helpers import X, layers, piped, squares

TWO = ["emu:0"] * 2


@pytest.fixture(autouse=True)
def healthy_afterwards():
    yield
    emu.reset()


class Breaks:
    """A layer that spoils the device, in its forward or its backward, once it may."""

    def __init__(self, when):
        self.when, self.may = when, False

    def __call__(self, x):
        if self.may and self.when == "forward":
            emu.spoil()
        return OnBackward.apply(x, self.backward)

    def backward(self):
        if self.may and self.when == "backward":
            emu.spoil()


@pytest.mark.promise(
    "GPUs", "If a device fails, the step ends with a `TaskError` that names the task; gradients stay as they were."
)
@pytest.mark.parametrize("face", ["step", "await step", "pipe(x)"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_the_task_is_named_and_nothing_is_lost(when, face):
    breaks = Breaks(when)
    model = layers(breaks)

    if face == "await step":

        async def run():
            nonlocal gradients
            async with Pipeline(model, TWO, microbatches=4, loss_fn=squares, balance=[3, 2]) as pipe:
                await pipe.step(X)
                gradients = [parameter.grad for parameter in model.parameters()]
                breaks.may = True
                with pytest.raises(TaskError, match="device-side assert"):
                    await pipe.step(X)

        gradients = None
        asyncio.run(asyncio.wait_for(run(), 30))
    else:
        with piped(model, TWO, balance=[3, 2]) as pipe:
            pipe.step(X)
            gradients = [parameter.grad for parameter in model.parameters()]
            breaks.may = True
            with pytest.raises(TaskError, match="device-side assert"):
                pipe.step(X) if face == "step" else squares(pipe(X)).backward()
    assert all(parameter.grad is before for parameter, before in zip(model.parameters(), gradients, strict=True))


@pytest.mark.promise(
    "GPUs", "If a device fails, the step ends with a `TaskError` that names the task; gradients stay as they were."
)
@pytest.mark.parametrize("face", ["step", "pipe(x)"])
def test_a_kernel_that_fails_late_is_named_by_its_task(monkeypatch, face):
    """The first call that fails is the fence's, when all tasks are issued: a task that had not ended tells."""
    real, gates, held = Fence.end, [], []

    def slow(x):
        stream = emu.current_stream()
        held.append(emu.hold(stream))
        gates.append(held[-1].__enter__())
        return x * 1

    def end(self, *given):
        if gates:
            emu.spoil()
            for gate in gates:
                gate.set()
        real(self, *given)

    monkeypatch.setattr(Fence, "end", end)
    model = layers(slow)
    with piped(model, TWO, balance=[3, 2], microbatches=1) as pipe:
        with pytest.raises(TaskError, match=r" failed .*device-side assert"):
            pipe.step(X) if face == "step" else pipe(X)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.promise(
    "GPUs", "If a device fails, the step ends with a `TaskError` that names the task; gradients stay as they were."
)
def test_an_error_of_the_code_is_not_hidden_by_one_of_the_device(monkeypatch):
    def fault(x):
        emu.spoil()
        raise ValueError("no")

    with piped(layers(fault), TWO, balance=[3, 2]) as pipe, pytest.raises(TaskError, match="ValueError: no"):
        pipe.step(X)
    assert torch.ones(1).item() == 1
