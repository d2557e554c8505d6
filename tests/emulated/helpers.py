"""A model whose gradients are known, and pipelines of it that are opened by ``with``."""

import threading
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline
from asyncpipe.ops.device.streams import Fence
from tests.emulated import device as emu

X = torch.randn(10, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGET = X.flip(0).clone()


def squares(output, target=None):
    return (output if target is None else output - target).square().mean()


def layers(*inside):
    """Four layers, and the functions ``inside`` as layers behind the second one."""
    torch.manual_seed(7)
    made = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*made[:2], *map(Call, inside), *made[2:]).double()


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@contextmanager
def next_step_hangs():
    """A function for a layer, whose second call queues a kernel, and what ends that kernel. No step ends before."""
    hangs, calls, real = threading.Event(), [], Fence.end
    held = ExitStack()

    def call(x):
        calls.append(0)
        if len(calls) == 2:
            held.enter_context(emu.hold(emu.current_stream()))
            hangs.set()
        return x * 1

    def end(fence, *given):
        assert hangs.wait(20)
        real(fence, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fence, "end", end)
        yield call, held


def piped(model, devices, **options):
    usual = {"microbatches": 4, "checkpoint": "never", "loss_fn": squares}
    return Pipeline(model, devices, **(usual | options)).sync()


def bare():
    """The unsplit model's loss, and its gradients."""
    model = layers()
    loss = squares(model(X), TARGET)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def worst(gradients, wanted=None):
    pairs = zip(gradients, wanted or bare()[1], strict=True)
    return max(float((ours.cpu() - theirs).abs().max().nan_to_num(nan=float("inf"))) for ours, theirs in pairs)


def take_gradients(model):
    taken = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return taken
