"""A value that two stages read, and one of them overwrites in place: refused, since the result depends on the split."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe import Pipeline, pop, skippable, stash
from asyncpipe.errors import StageError, TaskError

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


@skippable(stash=["h"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("h", x)
        return x


@skippable(pop=["h"])
class Add(nn.Module):
    def forward(self, x: Tensor) -> Any:
        h = yield pop("h")
        return x + h


class InPlace(nn.Module):
    """Overwrites what it gets, and says so in no attribute."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Both(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.view(-1)


class Sum(nn.Module):
    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        first, second = pair
        first = first.mul_(2) if self.inplace else first * 2
        return first + second.view_as(first)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[: len(x) // 2], x[len(x) // 2 :]


def layers(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Stash(), *middle, nn.Linear(4, 4), Add(), nn.Linear(4, 4)).double()


def run(model: nn.Sequential, balance: list[int], checkpoint: str, mode: str) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pipe = Pipeline(model, DEVICES[: len(balance)], balance=balance, checkpoint=checkpoint, microbatches=3)
    with pipe.sync() as opened, torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "training"):
        y = opened(x)
        if mode == "training":
            y.square().sum().backward()
    return y.detach(), [parameter.grad for parameter in model.parameters()]


CASES = {
    "the next layer": ([nn.ReLU(inplace=True)], [2, 4]),
    "behind a view": ([nn.Identity(), nn.Unflatten(1, (2, 2)), nn.ReLU(inplace=True), nn.Flatten()], [2, 7]),
    "a stage later": ([nn.Identity(), nn.ReLU(inplace=True)], [2, 1, 4]),
    "behind a view of a stage": ([nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.ReLU(inplace=True)], [2, 2, 4]),
}


@pytest.mark.promise(
    "Refused, not wrong", "A stage that overwrites a value that another stage still reads is refused in the first step."
)
@pytest.mark.parametrize("mode", ["training", "no_grad", "inference"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize(("middle", "balance"), CASES.values(), ids=CASES.keys())
def test_a_skip_that_another_stage_overwrites(
    middle: list[nn.Module], balance: list[int], checkpoint: str, mode: str
) -> None:
    with pytest.raises(TaskError) as raised:
        run(layers(*middle), balance, checkpoint, mode)
    assert isinstance(raised.value.__cause__, StageError)
    writer = len(balance) - 1
    where = "by another way"
    assert str(raised.value.__cause__) == (
        f"stage {writer} overwrites in place a value that it receives, and that is also read {where}, so the result "
        "would depend on the split; overwrite a copy (leave out inplace=True, or clone first), or split elsewhere"
    )


@pytest.mark.promise(
    "Refused, not wrong", "A stage that overwrites a value that another stage still reads is refused in the first step."
)
def test_the_message_names_the_stage_that_reads_later() -> None:
    with pytest.raises(TaskError, match=r"stage 1 overwrites in place a value .* also read by stage 2, so"):
        run(layers(nn.ReLU(inplace=True)), [2, 1, 3], "always", "training")


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_a_stage_that_overwrites_without_saying_so(mode: str) -> None:
    with pytest.raises(TaskError, match="overwrites in place a value that it receives"):
        run(layers(InPlace()), [2, 1, 3], "never", mode)


@pytest.mark.promise(
    "Refused, not wrong", "A stage that overwrites a value that another stage still reads is refused in the first step."
)
def test_two_values_of_one_link_with_the_same_memory() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Both(), Sum(), nn.Linear(4, 4)).double()
    with pytest.raises(TaskError, match="overwrites in place a value that it receives, and that is also read by anoth"):
        run(model, [2, 2], "never", "training")


@pytest.mark.promise("Right results", "Overwriting is allowed where no stage reads the value later.")
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize(
    ("model", "balance"),
    [
        pytest.param(layers(nn.ReLU(inplace=True)), [3, 3], id="in the stage of the stash"),
        pytest.param(layers(nn.Linear(4, 4), nn.ReLU(inplace=True)), [3, 4], id="behind a layer"),
        pytest.param(layers(nn.ReLU()), [2, 4], id="not in place"),
        pytest.param(layers(nn.Linear(4, 4), nn.ReLU(inplace=True)), [2, 2, 3], id="a new value"),
        pytest.param(
            nn.Sequential(nn.Linear(4, 4), Stash(), Add(), nn.ReLU(inplace=True), nn.Linear(4, 4)).double(),
            [2, 1, 2],
            id="read before",
        ),
        pytest.param(
            nn.Sequential(nn.Linear(4, 4), Both(), Sum(inplace=False), nn.Linear(4, 4)).double(), [2, 2], id="read only"
        ),
        pytest.param(
            nn.Sequential(nn.Linear(4, 4), Halves(), Sum(), nn.Linear(4, 4)).double(), [2, 2], id="disjoint halves"
        ),
    ],
)
def test_what_equals_the_unsplit_model_is_allowed(model: nn.Sequential, balance: list[int], checkpoint: str) -> None:
    alone = copy.deepcopy(model)
    model.zero_grad()
    ours, gradients = run(model, balance, checkpoint, "training")
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    theirs = torch.cat([alone(piece) for piece in x.chunk(3)])
    theirs.square().sum().backward()
    assert torch.allclose(ours, theirs, atol=1e-10, rtol=0)
    for mine, parameter in zip(gradients, alone.parameters(), strict=True):
        assert torch.allclose(mine, parameter.grad, atol=1e-10, rtol=0)
