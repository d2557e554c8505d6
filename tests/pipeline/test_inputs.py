"""Inputs and outputs: several arguments, uncut tensors, another batch dimension, ready-made micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe import Arguments, Microbatches, NoChunk, Pipeline, TaskError
from asyncpipe.errors import LossError

mse = nn.functional.mse_loss
MODES = ("always", "except_last", "selective", "never")


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def worst(model: nn.Module, bare: nn.Module) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(gradients(model), gradients(bare), strict=True))


class Mixed(nn.Module):
    """Takes all sorts of arguments, returns a dict with all sorts of values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, bias: Tensor, *, mask: Tensor | None, power: int, name: str) -> dict[str, Any]:
        x = self.linear(x) ** power + bias
        return {"x": x if mask is None else x * mask, "mask": mask, "power": power, "name": name, "rows": len(x)}


class Onward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        return {**value, "x": self.linear(value["x"])}


def make_mixed() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Mixed(), Onward(), Onward()).double()


def call(model: nn.Sequential, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return model[2](model[1](model[0](*args, **kwargs)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masked", [False, True])
def test_positional_and_keyword_arguments_and_nested_outputs(mode: str, masked: bool) -> None:
    model, bare = make_mixed(), make_mixed()
    x, bias = torch.randn(7, 6).double(), torch.randn(6).double()
    mask = torch.rand(7, 1).double() if masked else None
    expected = call(bare, x, bias, mask=mask, power=2, name="n")
    expected["x"].square().mean().backward()
    with Pipeline(
        model,
        ["cpu:0", "cpu:1", "cpu:2"],
        microbatches=3,
        checkpoint=mode,
        loss_fn=lambda out: out["x"].square().mean(),
    ).sync() as pipe:
        arguments = Arguments.of(x, NoChunk(bias), mask=mask, power=2, name="n")
        result = pipe.step(arguments)
        assert worst(model, bare) < 1e-10
        model.zero_grad()
        output = pipe(x, NoChunk(bias), mask=mask, power=2, name="n")
        output["x"].square().mean().backward()
        assert worst(model, bare) < 1e-10
    for got in (result.outputs, output):
        assert (got["x"] - expected["x"]).abs().max() < 1e-10
        assert (got["power"], got["name"], got["rows"]) == ([2] * 3, ["n"] * 3, [3, 2, 2])
        assert got["mask"] is None if mask is None else torch.equal(got["mask"], mask)


def test_another_dimension_is_the_batch() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    model, bare = make(), make()
    x, target = torch.randn(5, 9, 4).double().requires_grad_(), torch.randn(5, 9, 2).double()
    expected = bare(x)
    mse(expected, target).backward()
    wanted, x.grad = x.grad, None
    with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=4, batch_dim=1, loss_fn=mse).sync() as pipe:
        result = pipe.step(x, target)
        assert [len(loss.shape) for loss in result.losses] == [0] * 4
        assert (result.outputs - expected).abs().max() < 1e-10
        assert worst(model, bare) < 1e-10
        assert x.grad is None
        mse(pipe(x), target).backward()
        assert (x.grad - wanted).abs().max() < 1e-10


# Micro-batches of the caller's own, of seven lengths


def tokens() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(9)
    shapes = [(2, 3), (1, 9), (4, 5), (2, 1), (3, 4), (1, 2), (2, 6)]
    return [torch.randint(11, shape) for shape in shapes], [torch.randint(11, shape) for shape in shapes]


def make_tagger() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11)).double()


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()), target.numel()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_micro_batches_of_seven_lengths(mode: str, schedule: str) -> None:
    model, bare = make_tagger(), make_tagger()
    ids, targets = tokens()
    outputs = [bare(part) for part in ids]
    loss = nn.functional.cross_entropy(
        torch.cat([o.flatten(0, 1) for o in outputs]), torch.cat([t.flatten() for t in targets])
    )
    loss.backward()
    with Pipeline(
        model, ["cpu:0", "cpu:1"], microbatches=1, schedule=schedule, checkpoint=mode, loss_fn=token_loss
    ).sync() as pipe:
        result = pipe.step(Microbatches(ids), Microbatches(targets))
        assert abs(result.loss - loss) < 1e-10
        assert worst(model, bare) < 1e-10
        assert [out.shape for out in result.outputs] == [out.shape for out in outputs]
        assert all((a - b).abs().max() < 1e-10 for a, b in zip(result.outputs, outputs, strict=True))
        model.zero_grad()
        parts = pipe(Microbatches(ids))
        nn.functional.cross_entropy(
            torch.cat([o.flatten(0, 1) for o in parts]), torch.cat([t.flatten() for t in targets])
        ).backward()
        assert worst(model, bare) < 1e-10


# Losses that count


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_loss_over_counted_tokens_is_that_of_the_whole_batch(accumulate: bool) -> None:
    model, bare = make_tagger(), make_tagger()
    ids = torch.randint(11, (7, 5))
    target = torch.where(torch.rand(7, 5) < 0.6, torch.randint(11, (7, 5)), -100)

    def loss_fn(output: Tensor, target: Tensor, *, weight: Tensor) -> tuple[Tensor, Tensor]:
        mean = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), weight=weight)
        return mean, weight[target[target >= 0]].sum()

    weight = torch.rand(11).double() + 0.5
    rounds = 2 if accumulate else 1
    for _ in range(rounds):
        loss, _ = loss_fn(bare(ids), target, weight=weight)
        loss.backward()
    with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=3, loss_fn=loss_fn).sync() as pipe:
        for _ in range(rounds):
            result = pipe.step(ids, Arguments.of(target, weight=NoChunk(weight)))
    assert abs(result.loss - loss) < 1e-10
    assert worst(model, bare) < 1e-10


def test_a_counted_loss_keeps_its_type() -> None:
    options = {"microbatches": 2, "loss_fn": lambda output: (output.mean(), 3)}
    with Pipeline([nn.Linear(2, 2)], ["cpu"], **options).sync() as pipe:
        assert pipe.step(torch.zeros(4, 2)).loss.dtype == torch.float32


def test_losses_that_count_only_sometimes() -> None:
    counted = iter([True, False])

    def loss_fn(output: Tensor) -> Any:
        return (output.mean(), 3) if next(counted) else output.mean()

    with Pipeline([nn.Linear(2, 2)], ["cpu"], microbatches=2, checkpoint="never", loss_fn=loss_fn).sync() as pipe:
        with pytest.raises(LossError, match="a count for some micro-batches and none for others"):
            pipe.step(torch.zeros(4, 2))
        assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_count_is_one_number() -> None:
    with Pipeline([nn.Linear(2, 2)], ["cpu"], microbatches=2, loss_fn=lambda y: (y.mean(), y.sum(0))).sync() as pipe:
        with pytest.raises(TaskError, match=r"a count of shape \(2,\); it must be one number") as raised:
            pipe.step(torch.zeros(4, 2))
        assert isinstance(raised.value.__cause__, LossError)


# What cannot go in


@pytest.mark.parametrize("dim", [-1, 1.0, True])
def test_the_batch_dimension_is_an_index(dim: Any) -> None:
    with pytest.raises(ValueError, match="batch_dim must be an integer from 0"):
        Pipeline([nn.Linear(2, 2)], ["cpu"], microbatches=1, batch_dim=dim)
