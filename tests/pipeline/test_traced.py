"""Traced models in a pipeline: what a trace leaves to the pipeline, and arguments of any kind."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asyncpipe import Arguments, NoChunk, Pipeline, trace
from asyncpipe.errors import OptionError


class Checkpointed(nn.Module):
    """Asks for recomputation of its middle, in training mode."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self._inner, x, use_reentrant=self.reentrant) if self.training else self._inner(x)
        return self.last(x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.middle(x).tanh()


@pytest.mark.promise(
    "Right results", "A traced model may ask for `torch.utils.checkpoint`: the pipeline recomputes in its place."
)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_model_are_left_to_the_pipeline(reentrant: bool) -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(4, 4), Checkpointed(reentrant)).double(), torch.randn(5, 4).double()
    model(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    staged = trace(model, Arguments.of(x), ["1.middle"])
    devices, options = ["cpu:0", "cpu:1"], {"microbatches": 2, "loss_fn": lambda output: output.square().mean()}
    with Pipeline(staged, devices, schedule="zb-h1", checkpoint="always", **options).sync() as pipe:
        record = pipe.step(x).record
    assert {str(task) for task in record.graph.tasks} >= {"R(0,0)", "R(1,1)"}
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-10
    with pytest.raises(OptionError) as raised:
        Pipeline(staged, devices, checkpoint="never", **options)
    assert str(raised.value) == (
        "submodule '1' calls torch.utils.checkpoint, in whose place the pipeline recomputes stages, but "
        "checkpoint='never' keeps everything; give checkpoint='always' or 'except_last', or switch it off in the model "
        "(gradient_checkpointing_disable() of a Hugging Face model) and trace again"
    )


@pytest.mark.promise(
    "Right results", "A traced model may ask for `torch.utils.checkpoint`: the pipeline recomputes in its place."
)
def test_checkpoints_outside_of_a_trace_stay_checkpoints() -> None:
    """Also those of a model that was traced before."""
    model, x = Checkpointed(True), torch.randn(2, 4)
    trace(model, Arguments.of(x), 2)
    calls: list[bool] = []
    model.middle.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    model(x).sum().backward()
    assert calls == [False, True]


@dataclasses.dataclass
class Batch:
    x: Tensor
    scale: Tensor


@dataclasses.dataclass(frozen=True)
class Result:
    loss: Tensor
    parts: tuple[Tensor, ...]
    name: str


class OfDataclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: Batch, table: Tensor) -> Result:
        y = self.first(batch.x)
        z = self.second(y) * batch.scale + table
        return Result(z.square().mean(), (y, z), "plain")


@pytest.mark.promise(
    "Right results", "Plain dataclasses are inputs and outputs of traced models like other containers."
)
def test_plain_dataclasses_as_inputs_and_outputs() -> None:
    torch.manual_seed(1)
    model, table = OfDataclasses().double(), torch.randn(4).double()
    batch = Batch(torch.randn(6, 4).double(), torch.randn(6, 1).double())
    whole = model(batch, table)
    whole.loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    given: Any = Arguments.of(batch, table=NoChunk(table))
    staged = trace(model, given, ["second"])
    with Pipeline(staged, ["cpu:0", "cpu:1"], microbatches=3, loss_fn=lambda result: result.loss).sync() as pipe:
        result = pipe.step(given).outputs
    assert type(result) is Result
    assert result.name == ["plain"] * 3
    assert (result.parts[1] - whole.parts[1]).abs().max() < 1e-10
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-10


def test_a_batch_of_a_tokenizer_as_the_example() -> None:
    model, x = Checkpointed(False), torch.randn(2, 4)
    assert len(trace(model, UserDict({"x": x}), 2).stages) == len(trace(model, x, 2).stages) == 2
