"""Replicas on accelerators: A and G read gradients on other streams than those that make and use them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from asyncpipe import Batch
from tests.emulated.helpers import TARGET, X, layers, piped, squares, take_gradients, worst

SGD = partial(torch.optim.SGD, lr=1.0, momentum=0.5, foreach=False)
ROWS = {
    "one device": [["emu:0", "emu:0"], ["emu:0", "emu:0"]],
    "first on the host": [["cpu:0", "cpu:1"], ["emu:0", "emu:0"]],
    "mixed": [["emu:0", "cpu:0"], ["cpu:1", "emu:0"]],
    "three": [["emu:0"], ["cpu:0"], ["emu:0"]],
}


def counted(of):
    def loss(output, target):
        return squares(output, target), of(target)

    return loss


COUNTED = {"number": counted(len), "tensor": counted(lambda t: torch.full((), len(t), device=t.device))}
BATCHES = [(X, TARGET), (X.flip(1), TARGET), (X * 0.5, -TARGET)]
WAYS = {
    "plain": {},
    "shards": {"shard_optimizer": True},
    "shards on the host": {"shard_optimizer": True, "optimizer_on_host": True},
    "counted by numbers": {"loss_fn": COUNTED["number"]},
    "counted by tensors": {"loss_fn": COUNTED["tensor"]},
    "counted by tensors in shards": {"loss_fn": COUNTED["tensor"], "shard_optimizer": True},
    "split backward": {"schedule": "zb-h1"},
    "bfloat16": {"gradient_dtype": "bfloat16"},
    "clipped": {"clip_grad_norm": 0.01},
    "clipped in shards on the host": {"clip_grad_norm": 0.01, "shard_optimizer": True, "optimizer_on_host": True},
}


def trained(devices, *, hook=False, at_once=False, update=lambda step: True, **options):
    """The model's values after some steps."""
    model, seen = layers(), []
    with piped(model, devices, optimizer=SGD, gradient_norms=True, **options) as pipe:
        if hook:
            model[1][0].weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 0.5)
        if at_once:
            results = list(pipe.steps([Batch(*each) for each in BATCHES]))
        else:
            results = [pipe.step(*each, update=update(step)) for step, each in enumerate(BATCHES)]
        norms = [norm.cpu() for result in results for norm in result.wait().gradient_norms.values()]
    return [each.detach().cpu() for each in (*model.parameters(), *seen)], norms


def compared(devices, tolerance=1e-10, **options):
    """The same on replicas as in a pipeline on the host that has all their micro-batches."""
    wanted, _ = trained(["cpu:0"] * 1, microbatches=2 * len(devices), **options)
    found, norms = trained(devices, microbatches=2, **options)
    assert worst(found, wanted) < tolerance
    assert not any(norm.isnan() for norm in norms)


@pytest.mark.promise(
    "GPUs", "Gradients that replicas add up on an accelerator are not overwritten before they are read."
)
@pytest.mark.parametrize(
    ("rows", "way"),
    [
        ("one device", "plain"),
        ("one device", "shards on the host"),
        ("one device", "counted by tensors in shards"),
        ("one device", "clipped"),
        ("first on the host", "shards"),
        ("first on the host", "counted by tensors"),
        ("mixed", "split backward"),
        ("mixed", "counted by numbers"),
        ("mixed", "clipped in shards on the host"),
        ("three", "bfloat16"),
        ("three", "shards"),
    ],
)
def test_replicas_train_as_one_pipeline(rows, way):
    compared(ROWS[rows], 0.05 if way == "bfloat16" else 1e-10, **WAYS[way])


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ("one device", {"hook": True}),
        ("mixed", {"update": lambda step: step != 1}),
        ("one device", {"at_once": True}),
        ("mixed", {"at_once": True, "shard_optimizer": True}),
    ],
    ids=["hook", "accumulated", "overlapping", "overlapping in shards"],
)
def test_what_a_step_may_have_besides(rows, options):
    compared(ROWS[rows], **options)


@pytest.mark.parametrize(
    ("rows", "loss_fn"),
    [("one device", COUNTED["tensor"]), ("mixed", squares), ("first on the host", COUNTED["number"])],
    ids=["counted by tensors", "plain", "counted by numbers"],
)
def test_an_optimizer_of_the_callers_own(rows, loss_fn):
    model = layers()
    devices = ROWS[rows]
    with piped(model, devices, loss_fn=loss_fn, microbatches=2) as pipe:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
        for _ in range(2):
            pipe.step(X, TARGET)
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            assert worst(gradients) < 1e-10
            squares(pipe(X).cpu(), TARGET).backward()
            assert worst(take_gradients(model)) < 1e-10
