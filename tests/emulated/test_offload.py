"""Activations wait for their backward on the host: gradients are the same bits, and the device's memory is free."""

from __future__ import annotations

import gc
from bisect import bisect
from functools import partial
from math import inf

import pytest
import torch
from torch import nn

from asyncpipe import TaskError
from asyncpipe.core.engine.events import TaskCompleted
from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.predict.memory import StageMemory, memory_over_time, peak_memory
from asyncpipe.ops.device import copies
from asyncpipe.ops.device.streams import AcceleratorStream, record
from asyncpipe.ops.execute.offloading import KeptActivations
from tests.emulated import device as emu
from tests.emulated.helpers import Call, piped

FOUR = ["emu:0"] * 4
PIECES, ROWS, COLUMNS = 8, 96, 96
X = torch.randn(PIECES * ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
PIECE = ROWS * COLUMNS * 8
"""Bytes of a tensor of one micro-batch."""


class Scaled(nn.Module):
    """An element-wise layer that saves its input and one more tensor."""

    def __init__(self, at):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5 + at, COLUMNS, dtype=torch.float64))

    def forward(self, x):
        return (x * self.weight).tanh().sin() * 1.5


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    """Logical devices are as apart as physical ones: what passes between them is copied."""
    pass_on = copies._queue_copy

    def copied(tensor, device):
        if tensor.device != device:
            return pass_on(tensor, device)
        # As a copier does with a second device, on a side stream there.
        tensor.record_stream(emu.current_stream())
        return tensor.clone()

    def on_its_lane(copier, tensors, side):
        with copier.lane.use():  # A copier does so where it copies.
            return copy(copier, tensors, side)

    copy = copies.Copier.copy
    monkeypatch.setattr(copies.Copier, "copy", on_its_lane)
    monkeypatch.setattr(copies, "_queue_copy", copied)


def model(layers=8, inside=None):
    made = [Scaled(k / layers) for k in range(layers)]
    return nn.Sequential(*made) if inside is None else nn.Sequential(made[0], Call(inside), *made[2:])


def trained(of, offload, devices=FOUR, **options):
    """The gradients of one step of ``of``, and the largest peak of a device, in tensors."""
    with piped(of, devices, microbatches=PIECES, offload=offload, **options) as pipe:
        emu.forget_peak()
        pipe.step(X, X.flip(0)).wait()
    peak = max(size for name, size in emu.peak.items() if name.startswith("emu"))
    taken = [parameter.grad.cpu() for parameter in of.parameters()]
    of.zero_grad()
    return taken, peak / PIECE


HOW = [("gpipe", "always", 0.9), ("zb-h1", "never", 1.0), ("interleaved", "except_last", 1.0)]
"""Schedule, recomputation, and how much of the memory is left on the device that needs most."""


@pytest.mark.promise("Bit-identical results", "Gradients with `offload` are bit-identical to those without.")
@pytest.mark.parametrize(("schedule", "checkpoint", "share"), HOW)
def test_gradients_are_the_same_bits_in_less_memory(schedule, checkpoint, share):
    how = {"schedule": schedule, "checkpoint": checkpoint}
    devices = ["emu:0"] * (2 if schedule == "interleaved" else 4)
    plain, before = trained(model(), None, devices, **how)
    gradients, after = trained(model(), 1.0, devices, **how)
    assert all(map(torch.equal, plain, gradients))
    assert after <= before * share


@pytest.mark.promise("Memory", "A model that needs 1.5 times the memory of its devices trains with `offload`.")
def test_what_does_not_fit_trains_with_offload():
    """It needs half as much again as its devices have."""
    train = partial(trained, schedule="gpipe", checkpoint="never")
    wanted, needed = train(model(), None)
    emu.limit(int(needed / 1.5) * PIECE)
    with pytest.raises(TaskError) as caught:
        train(model(), None)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    del caught
    gradients, after = train(model(), 1.0)
    assert all(map(torch.equal, gradients, wanted))
    assert after < needed / 2


@pytest.mark.promise(
    "Memory", "With gpipe and 1f1b, the predicted memory is within 10 % of the device's peak after every task."
)
@pytest.mark.parametrize("schedule", ["1f1b"])
def test_memory_over_time_is_as_predicted(schedule):
    """After each task, within a tenth of the peak; between tasks there is what they need while they run as well."""
    with piped(model(32), FOUR, microbatches=PIECES, offload=1.0, schedule=schedule) as pipe:
        emu.forget_peak()
        record = pipe.step(X, X.flip(0), return_outputs=False).wait().record
    kept = 2 * 8 + 1  # Two tensors a layer, and the output.
    held = memory_over_time(record, StageMemory(saved=[kept * PIECE] * 4, inputs=[PIECE] * 4, fixed=[0] * 4))
    peaks = peak_memory(record, StageMemory(saved=[kept * PIECE] * 4, inputs=[PIECE] * 4, fixed=[0] * 4))
    for number, device in enumerate(record.graph.devices):
        found = [(at, size) for at, owner, size in emu.history if owner == device]
        predicted = [(at, size) for at, of, size in held if of == number]
        here = {task.number for task in record.graph.tasks if task.lane == Lane(device, Queue.COMPUTE)}
        ends = [e.ended for _, e in record.journal if isinstance(e, TaskCompleted) and e.task in here]
        for end in ends:
            now = max(found[: bisect(found, (end, inf))])[1]
            then = predicted[bisect(predicted, (end, inf)) - 1][1]
            assert abs(now - then) <= peaks[number] / 10


@pytest.mark.promise(
    "A step that fails", "If a step fails during the copy of an offload, its memory is reused only after the copy."
)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_step_that_ends_early_leaves_nothing(checkpoint):
    """At whatever copies are under way: their memory is not used again before they are done."""
    calls = []

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            calls.append(1)
            if len(calls) == 3:
                raise ArithmeticError("broken")
            return gradient

    one = model(inside=Broken.apply)
    with piped(one, FOUR, microbatches=PIECES, offload=1.0, checkpoint=checkpoint, schedule="gpipe") as pipe:
        gc.collect()  # What tests before this one have left in cycles.
        before = sum(size for name, size in emu.allocated.items() if name.startswith("emu"))
        for _ in range(2):
            calls.clear()
            with pytest.raises(TaskError, match="ArithmeticError"):
                pipe.step(X, X.flip(0))
            assert sum(size for name, size in emu.allocated.items() if name.startswith("emu")) == before
        calls += [1] * 3
        pipe.step(X, X.flip(0)).wait()
    assert all(parameter.grad is not None for parameter in one.parameters())


@pytest.mark.promise("Bit-identical results", "Gradients with `offload` are bit-identical to those without.")
def test_steps_overlap_with_offload():
    models = [model(4), model(4)]
    for each, offload in zip(models, (None, 1.0), strict=True):
        optimizer = partial(torch.optim.SGD, lr=0.1, foreach=False)
        with piped(each, FOUR, offload=offload, optimizer=optimizer) as pipe:
            assert pipe.why_steps_wait is None
            assert len([result.wait() for result in pipe.steps([(X[:256], X[:256])] * 3)]) == 3
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


@pytest.mark.promise(
    "A step that fails", "If a step fails during the copy of an offload, its memory is reused only after the copy."
)
@pytest.mark.parametrize("way", ["to the host", "back"])
def test_what_is_abandoned_outlives_its_copies(way):
    """The memory of a copy that nobody waits for is not used again before it is over."""
    compute, lane = (AcceleratorStream(torch.device("emu:0")) for _ in range(2))
    with compute.use():
        x = torch.ones(128, 128, device="emu:0", requires_grad=True)
        kept = KeptActivations(set())
        with kept.saving():
            y = (x * 2).sin()
    lane.wait(record(compute.stream))
    with lane.use(), torch.no_grad():
        kept.offload(lane)
    if way == "back":
        compute.wait(record(lane.stream))
        kept.free()
        with lane.use(), torch.no_grad():
            kept.load(lane, compute)
    kept.abandon()
    del kept, x, y
    with compute.use():
        torch.ones(128, 128, device="emu:0")
