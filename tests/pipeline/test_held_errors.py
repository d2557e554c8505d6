"""Whoever keeps the error of a failed step keeps none of its tensors."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline, TaskError


class Remembers(nn.Module):
    """A layer that knows, weakly, every tensor that it has seen or made; it may fail, in forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activation = self.layer(x).tanh()
        other = activation * 2
        self.seen += map(weakref.ref, (x, activation, other))
        if other.requires_grad:
            other.register_hook(self.backward)
        if self.fails == "forward":
            try:
                raise ValueError("first")
            except ValueError as error:
                raise torch.OutOfMemoryError("no memory left") from error
        return other

    def backward(self, gradient: torch.Tensor) -> None:
        self.seen.append(weakref.ref(gradient))
        if self.fails == "backward":
            raise torch.OutOfMemoryError("no memory left")

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.seen)


@pytest.mark.promise("Memory", "An exception that you keep does not keep tensors of its step alive.")
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("face", ["step", "pipe(x)"])
def test_an_error_that_is_kept_keeps_no_tensor_of_its_step(face, fails, schedule, checkpoint):
    layers = [Remembers(), Remembers()]
    options = {"microbatches": 4, "schedule": schedule, "checkpoint": checkpoint}
    x = torch.randn(8, 4)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    with Pipeline(nn.Sequential(*layers), ["cpu:0", "cpu:1"], loss_fn=loss, **options).sync() as pipe:

        def work() -> None:
            pipe.step(x) if face == "step" else loss(pipe(x)).backward()

        work()
        layers[1].fails = fails
        try:
            work()
        except TaskError as error:
            kept = error
        assert isinstance(kept.__cause__, torch.OutOfMemoryError)
        assert kept.__cause__.__traceback__ is not None, "where it was raised is still known"
        assert [layer.alive for layer in layers] == [0, 0]
        assert all(layer.seen for layer in layers)
