"""``num_items_in_batch``: a step adds its share to the mean over the labels of several steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import asyncpipe
from asyncpipe.errors import OptionError, TaskError

IGNORED = -100
ROW = ["cpu:0", "cpu:1"]


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    count = (target != IGNORED).sum()
    return functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum") / count.clamp(min=1), count


def plain(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, ignore_index=IGNORED)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()


@pytest.fixture
def batches() -> list[tuple[Tensor, Tensor]]:
    """Two mini-batches of 6 samples, of which the second has labels for two alone."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(5, (12,), generator=generator)
    target[8:] = IGNORED
    return list(zip(x.split(6), target.split(6), strict=True))


def whole(batches: list[tuple[Tensor, Tensor]]) -> tuple[float, list[Tensor]]:
    """Loss and gradients of the unsplit model for all mini-batches as one."""
    model = make_model()
    loss = plain(model(torch.cat([x for x, _ in batches])), torch.cat([target for _, target in batches]))
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.promise("Right results", "Steps with `num_items_in_batch` add up to the mean over all labels.")
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (ROW, {}),
        (ROW, {"optimizer": sgd}),
        (ROW, {"optimizer": sgd, "workers": "processes"}),
        ([ROW, ["cpu:2", "cpu:3"]], {}),
        ([ROW, ["cpu:2", "cpu:3"]], {"optimizer": sgd}),
        ([ROW, ["cpu:2", "cpu:3"]], {"optimizer": sgd, "workers": "processes"}),
    ],
    ids=["callers optimizer", "own optimizers", "workers", "tied replicas", "replicas", "replicas in workers"],
)
def test_accumulated_steps_make_the_mean_of_all_their_labels(
    devices: Any, options: dict[str, Any], batches: list[tuple[Tensor, Tensor]]
) -> None:
    expected, gradients = whole(batches)
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    pipe = asyncpipe.Pipeline(model, devices, microbatches=2, balance=[2, 1], loss_fn=counted, **options)
    with pipe.sync() as steps:
        first = steps.step(*batches[0], update=False, num_items_in_batch=8)
        second = steps.step(*batches[1], num_items_in_batch=torch.tensor([8]))
        losses = [float(each.loss) for each in (first, second) if each.loss is not None]
        assert sum(losses) == pytest.approx(expected, abs=1e-10)
        state = steps.state_dict()
    for (name, parameter), start, wanted in zip(model.named_parameters(), before, gradients, strict=True):
        found = start - state[name] if options else parameter.grad
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_each_of_overlapping_steps_has_its_own(batches: list[tuple[Tensor, Tensor]]) -> None:
    def run(ahead: int) -> tuple[list[float], list[Tensor]]:
        model = make_model()
        pipe = asyncpipe.Pipeline(model, ROW, microbatches=2, balance=[2, 1], loss_fn=counted, optimizer=sgd)
        with pipe.sync() as steps:
            given = [
                asyncpipe.Batch(*batch, num_items_in_batch=items) for batch, items in zip(batches, (12, 3), strict=True)
            ]
            losses = [float(result.loss) for result in steps.steps(given, ahead=ahead) if result.loss is not None]
        return losses, [parameter.detach() for parameter in model.parameters()]

    (losses, weights), (expected, wanted) = run(1), run(0)
    assert losses == expected
    assert all(torch.equal(one, other) for one, other in zip(weights, wanted, strict=True))
    model, (x, target) = make_model(), batches[0]
    assert losses[0] == pytest.approx(plain(model(x), target).item() / 2, abs=1e-10)


@pytest.mark.parametrize("items", [-1, True, float("nan"), "8", torch.ones(2)])
def test_other_values_are_refused(items: Any, batches: list[tuple[Tensor, Tensor]]) -> None:
    pipe = asyncpipe.Pipeline(make_model(), ROW, microbatches=2, balance=[2, 1], loss_fn=counted)
    with pipe.sync() as steps, pytest.raises(OptionError, match="a number of at least 0"):
        steps.step(*batches[0], num_items_in_batch=items)


def test_a_loss_without_counts_is_refused_and_leaves_nothing(batches: list[tuple[Tensor, Tensor]]) -> None:
    model = make_model()
    pipe = asyncpipe.Pipeline(model, ROW, microbatches=2, balance=[2, 1], loss_fn=plain)
    with pipe.sync() as steps, pytest.raises(TaskError, match="have it return"):
        steps.step(*batches[0], num_items_in_batch=8)
    assert all(parameter.grad is None for parameter in model.parameters())
