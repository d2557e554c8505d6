"""A step that fails when a stage was updated already leaves everything as it was, if the pipeline is asked for that."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline
from asyncpipe.errors import OptionError, TaskError


class FailsInBackward(nn.Module):
    """Its last backward of a step waits for the update of another stage, and fails when it is told to."""

    def __init__(self, updated: threading.Event) -> None:
        super().__init__()
        self.updated, self.left = updated, -1

    def forward(self, x):
        x = x.clone()
        if x.requires_grad:
            x.register_hook(self._seen)
        return x

    def _seen(self, gradient):
        self.left -= 1
        if self.left == 0:
            assert self.updated.wait(30)
            raise ValueError("after an update")
        return gradient


def same(gradient, before):
    return gradient is before if gradient is None or before is None else torch.equal(gradient, before)


def everything(pipe):
    states = [value for state in pipe.optimizer_states().values() for value in state.values()]
    return [each.clone() for each in (*pipe.state_dict().values(), *states)]


@pytest.mark.promise(
    "A step that fails",
    "With `undo_updates`, a step that fails after some stages were updated leaves weights and optimizers as they were.",
)
@pytest.mark.parametrize("undo_updates", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("steps", [0, 1])
async def test_a_failed_step_undoes_updates(undo_updates, ahead, steps):
    """``steps`` went well before: otherwise the optimizers had no states yet."""
    torch.manual_seed(0)
    updated = threading.Event()

    def optimizer(parameters):
        made = torch.optim.Adam(parameters, 0.1)
        if len(parameters) == 1:  # Of the second stage.
            made.register_step_post_hook(lambda *_: updated.set())
        return made

    failing = FailsInBackward(updated)
    model = nn.Sequential(nn.Linear(4, 4), failing, nn.Linear(4, 4, bias=False)).double()
    x, target = torch.randn(2, 8, 4, dtype=torch.float64)
    options = {"optimizer": optimizer, "loss_fn": nn.functional.mse_loss, "undo_updates": undo_updates}
    async with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, balance=[2, 1], schedule="1f1b", **options) as pipe:
        for _ in range(steps):
            await pipe.step(x, target)
            await pipe.step(x, target, update=False)
        gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
        updated.clear()
        before, failing.left = everything(pipe), 2
        with pytest.raises(TaskError, match="after an update"):
            async for _ in pipe.steps([(x, target)] * 3, ahead=ahead):
                pass
        after = everything(pipe)
        assert (len(after) == len(before) and all(map(torch.equal, before, after))) is undo_updates
        if undo_updates:
            assert all(same(each.grad, before) for each, before in zip(model.parameters(), gradients, strict=True))
        assert (await pipe.step(x, target)).loss.isfinite()


@pytest.mark.parametrize("shard_optimizer", [False, True])
async def test_what_is_undone_is_done_again_alike(shard_optimizer):
    """In all replicas, with the gradients of a step before: the run has the bits of one that did not fail."""
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        calls = [7 if fails else -1]

        def loss_fn(output, target, calls=calls):
            calls[0] -= 1
            if calls[0] == 0:
                raise ValueError("of a later step")
            return nn.functional.mse_loss(output, target)

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        x, target = torch.randn(2, 8, 4, dtype=torch.float64)
        options = {"optimizer": torch.optim.Adam, "undo_updates": True, "shard_optimizer": shard_optimizer}
        devices = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
        async with Pipeline(model, devices, microbatches=1, loss_fn=loss_fn, **options) as pipe:
            await pipe.step(x, target, update=False)
            left = 4
            while left:
                try:
                    async for _ in pipe.steps([(x, target)] * left):
                        left -= 1
                except TaskError:
                    assert fails
            found.append(everything(pipe))
    assert all(map(torch.equal, *found))


def test_it_is_for_the_pipelines_own_optimizers():
    with pytest.raises(OptionError, match="undo_updates is for the pipeline's own optimizers"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), ["cpu:0"], microbatches=1, undo_updates=True)
