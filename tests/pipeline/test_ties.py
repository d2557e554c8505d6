"""Tied weights over stages and devices: one parameter, and the gradients of the unsplit model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline, TaskError
from asyncpipe.core.graph.task import WHOLE_STEP
from asyncpipe.core.kinds import TaskKind
from asyncpipe.testing import InlineExecutor

WORDS = 11


class Head(nn.Module):
    """The embedding's weight once more, as the output layer."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return x @ self.weight.T


class Scaled(nn.Module):
    """Uses a buffer that other layers use too."""

    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x * self.scale


def make_model():
    torch.manual_seed(0)
    embedding, scale = nn.Embedding(WORDS, 6), torch.linspace(0.5, 1.5, 6)
    shared = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    middle = [shared, Scaled(scale), nn.Linear(6, 6), shared, Scaled(scale)]
    return nn.Sequential(embedding, *middle, Head(embedding)).double()


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


torch.manual_seed(1)
ids, target = torch.randint(WORDS, (13, 5)), torch.randint(WORDS, (13, 5))


def bare_model():
    model = make_model()
    loss_fn(model(ids), target).backward()
    return model


def worst(model, bare):
    return max((a.grad - b.grad).abs().max() for a, b in zip(model.parameters(), bare.parameters(), strict=True))


SHAPES = [("gpipe", 2, 2), ("gpipe", 4, 4), ("1f1b", 3, 3), ("1f1b", 4, 4), ("interleaved", 4, 2)]


@pytest.mark.parametrize(("schedule", "stages", "devices"), SHAPES)
def test_equal_to_the_unsplit_model(schedule, stages, devices):
    bare, keys = bare_model(), list(make_model().state_dict())
    for mode, executors in itertools.product(("always", "except_last", "never"), (None, InlineExecutor)):
        model = make_model()
        options = {"stages": stages, "schedule": schedule, "checkpoint": mode, "executors": executors}
        names = [f"cpu:{k}" for k in range(devices)]
        with Pipeline(model, names, microbatches=4, loss_fn=loss_fn, **options).sync() as pipe:
            pipe.step(ids, target)
            assert worst(model, bare) < 1e-10, mode
            model.zero_grad()
            loss_fn(pipe(ids), target).backward()
            assert worst(model, bare) < 1e-10, mode
            assert list(pipe.state_dict()) == keys
            assert len(list(pipe.parameters())) == len(list(bare.parameters()))
        assert model[6].weight is model[0].weight


def test_training_moves_the_one_parameter():
    model, bare = make_model(), make_model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, bare)]
    with Pipeline(model, ["cpu:0", "cpu:1", "cpu:2"], stages=3, microbatches=4, loss_fn=loss_fn).sync() as pipe:
        for _ in range(3):
            pipe.step(ids, target)
            loss_fn(bare(ids), target).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-10


def test_replicas_are_tasks_of_the_step():
    model = make_model()
    with Pipeline(model, ["cpu:0", "cpu:1", "cpu:2"], stages=3, microbatches=4, loss_fn=loss_fn).sync() as pipe:
        record = pipe.step(ids, target).record
    whole = [task for task in record.graph.tasks if task.microbatch == WHOLE_STEP]
    copies = {(task.source, task.stage) for task in whole if task.kind is TaskKind.COPY}
    assert (0, 2) in copies
    assert copies == {(b, a) for a, b in copies}
    assert [task.stage for task in whole if task.kind is TaskKind.SUM] == sorted({min(pair) for pair in copies})


def test_the_caller_may_load_freeze_and_switch_modes():
    model, bare = make_model(), make_model()
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    with Pipeline(model, devices, stages=3, microbatches=4, loss_fn=loss_fn).sync() as pipe:
        for change in (
            lambda m: m.load_state_dict({k: v * 1.5 for k, v in make_model().state_dict().items()}),
            lambda m: m[1].requires_grad_(False),
            lambda m: m[1].requires_grad_(True),
        ):
            change(model)
            change(bare)
            pipe.step(ids, target)
            loss_fn(bare(ids), target).backward()
            for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                assert theirs.grad is None or (ours.grad - theirs.grad).abs().max() < 1e-10
            model.zero_grad()
            bare.zero_grad()
        pipe.eval()
        assert (pipe.step(ids).outputs - bare(ids)).abs().max() < 1e-10


@pytest.mark.parametrize("task_id", ["S(0)", "B(0,0)"])
def test_a_failed_step_leaves_no_gradient_at_a_replica(before_task, task_id):
    model, bare = make_model(), bare_model()
    with Pipeline(model, ["cpu:0", "cpu:1", "cpu:2"], stages=3, microbatches=4, loss_fn=loss_fn).sync() as pipe:

        def fail(task):
            if task.id == task_id:
                raise ValueError("no")

        before_task(fail)
        with pytest.raises(TaskError, match="failed"):
            pipe.step(ids, target)
        assert all(parameter.grad is None for parameter in model.parameters())
        before_task(lambda task: None)
        pipe.step(ids, target)
        assert worst(model, bare) < 1e-10


def test_a_recurrent_layer_used_twice():
    def make():
        torch.manual_seed(2)

        class Cells(nn.Module):
            def __init__(self, cells):
                super().__init__()
                self.cells = cells

            def forward(self, x):
                return self.cells(x)[0]

        cells = nn.LSTM(4, 4, batch_first=True)
        return nn.Sequential(Cells(cells), nn.Linear(4, 4), Cells(cells)).double()

    model, bare = make(), make()
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    (bare(x) ** 2).mean().backward()
    with Pipeline(model, ["cpu:0", "cpu:1", "cpu:2"], microbatches=3, loss_fn=lambda y: (y**2).mean()).sync() as pipe:
        pipe.step(x)
    assert worst(model, bare) < 1e-10


def test_a_cast_reaches_what_is_shared():
    model, bare = make_model(), make_model().float()
    with Pipeline(model, ["cpu:0", "cpu:1", "cpu:2"], stages=3, microbatches=4, loss_fn=loss_fn).sync() as pipe:
        pipe.step(ids, target)
        model.zero_grad()
        pipe.to(torch.float32)
        result = pipe.step(ids, target)
    loss_fn(bare(ids), target).backward()
    assert result.outputs.dtype is torch.float32
    assert worst(model, bare) < 1e-5
