"""Hooks of parameters in ``step``: once a step, on the whole gradient, as on the unsplit model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline, TaskError

mse = nn.functional.mse_loss


def counted(output, target):
    return mse(output, target), output.numel()


def pipeline(model, devices=2, **options):
    options = {"microbatches": 4, "loss_fn": mse, "checkpoint": "except_last"} | options
    return Pipeline(model, [f"cpu:{k}" for k in range(devices)], **options)


def assert_close(ours, theirs):
    for mine, yours in zip(ours, theirs, strict=True):
        assert (mine is None) == (yours is None)
        assert mine is None or (mine - yours).abs().max() < 1e-10


class Hooks:
    """A clamp on every gradient; what it and the hooks behind the accumulation saw, by number of the parameter."""

    def __init__(self, model):
        self.seen = []
        for number, parameter in enumerate(model.parameters()):
            parameter.register_hook(partial(self.clamp, number))
            parameter.register_post_accumulate_grad_hook(partial(self.accumulated, number))

    def clamp(self, number, gradient):
        self.seen.append((0, number, gradient.clone()))
        return gradient.clamp(-0.01, 0.01)

    def accumulated(self, number, parameter):
        self.seen.append((1, number, parameter.grad.clone()))

    def assert_equal(self, other):
        ours, theirs = (sorted(each.seen, key=lambda item: item[:2]) for each in (self, other))
        assert [item[:2] for item in ours] == [item[:2] for item in theirs]
        assert_close([item[2] for item in ours], [item[2] for item in theirs])


class Both:
    """A pipeline's model and its unsplit copy, with the same hooks."""

    def __init__(self, workload):
        self.model, self.bare = workload.model(), workload.model()
        self.workload = workload

    def steps(self, pipe, count=1, scale=1.0):
        for _ in range(count):
            pipe.step(self.workload.x, self.workload.target)
            (mse(self.bare(self.workload.x), self.workload.target) * scale).backward()

    def assert_equal(self):
        assert_close([p.grad for p in self.model.parameters()], [p.grad for p in self.bare.parameters()])
        assert_close(self.model.parameters(), self.bare.parameters())


@pytest.mark.promise("Your own program", "Hooks of a parameter run once in a step, on the whole new gradient.")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("loss", [mse, counted])
def test_hooks_see_the_whole_gradient_once(workload, schedule, checkpoint, loss):
    """With earlier gradients in the second step: first the new gradient, then the sum."""
    both = Both(workload)
    ours, theirs = Hooks(both.model), Hooks(both.bare)
    with pipeline(both.model, schedule=schedule, checkpoint=checkpoint, loss_fn=loss).sync() as pipe:
        both.steps(pipe, 2)
    both.assert_equal()
    ours.assert_equal(theirs)
    assert len(ours.seen) == 2 * 2 * 8


@pytest.mark.promise(
    "Your own program", "An optimizer inside a hook runs once a step, after every micro-batch has used the old weights."
)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_an_optimizer_in_the_backward(workload, schedule):
    """It runs once for each parameter and step, when all micro-batches have used the old weights."""
    both, calls = Both(workload), []
    for model in (both.model, both.bare):
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)

            def update(_, optimizer=optimizer, model=model):
                calls.append(model)
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
    with pipeline(both.model, schedule=schedule).sync() as pipe:
        both.steps(pipe, 3)
    both.assert_equal()
    assert sum(model is both.model for model in calls) == 3 * 8


@pytest.mark.promise("Your own program", "Hooks of a parameter run once in a step, on the whole new gradient.")
def test_with_the_optimizer_in_the_step(workload):
    both = Both(workload)
    ours, theirs = Hooks(both.model), Hooks(both.bare)
    optimizer = torch.optim.SGD(both.bare.parameters(), lr=0.5)
    with pipeline(both.model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5)).sync() as pipe:
        for _ in range(2):
            both.steps(pipe)
            optimizer.step()
            optimizer.zero_grad()
    both.assert_equal()
    ours.assert_equal(theirs)


@pytest.mark.promise("Your own program", "Hooks of a parameter run once in a step, on the whole new gradient.")
def test_with_a_scale(workload):
    """Hooks see scaled gradients, as those of the scaled loss."""
    both = Both(workload)
    ours, theirs = Hooks(both.model), Hooks(both.bare)
    with pipeline(both.model).sync() as pipe:
        pipe.step(workload.x, workload.target, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    (mse(both.bare(workload.x), workload.target) * 1024).backward()
    both.assert_equal()
    ours.assert_equal(theirs)


@pytest.mark.promise("Your own program", "Hooks of a parameter run once in a step, on the whole new gradient.")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_tied_parameter(devices):
    """Its hooks are on the owner, and see the sum over the stages."""
    made = []
    for tied in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
        model[3].weight = model[0].weight
        hooks, x = Hooks(model), torch.ones(8, 4, dtype=torch.float64).cumsum(0)
        if tied:
            with pipeline(model, devices, stages=2, schedule="interleaved" if devices == 1 else "1f1b").sync() as pipe:
                pipe.step(x, x)
        else:
            mse(model(x), x).backward()
        made.append((hooks, [p.grad for p in model.parameters()]))
    made[0][0].assert_equal(made[1][0])
    assert_close(made[0][1], made[1][1])


@pytest.mark.promise(
    "A step that fails", "If a hook of a parameter raises, the gradients are those from before the step."
)
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("updates", [False, True])
def test_a_hook_that_raises(workload, kind, updates):
    """Gradients are the tensors and values that they were, and the next step works."""
    model = workload.model()
    optimizer = (lambda parameters: torch.optim.SGD(parameters, lr=0.5)) if updates else None
    *_, last = model.parameters()
    handle = getattr(last, kind)(lambda _: 1 / 0)
    quiet = model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.grad for parameter in model.parameters()]
    with pipeline(model, optimizer=optimizer).sync() as pipe:
        with pytest.raises(TaskError if updates else ZeroDivisionError) as raised:
            pipe.step(workload.x, workload.target)
        assert not updates or raised.value.kind == "U"
        last_stage = len(list(model[4:].parameters()))  # U of stage 0 does not wait for that of stage 1
        for parameter, grad in list(zip(model.parameters(), before, strict=True))[last_stage if updates else 0 :]:
            assert parameter.grad is grad
            assert torch.equal(grad, torch.ones_like(grad))
        handle.remove()
        quiet.remove()
        model.load_state_dict(workload.model().state_dict())
        model.zero_grad()
        pipe.step(workload.x, workload.target, update=False)
    assert workload.worst(model) < 1e-10


@pytest.mark.promise("Your own program", "Hooks of a parameter's autograd node run in every micro-batch's backward.")
def test_hooks_of_the_autograd_node_run_in_every_backward(workload):
    model, calls = workload.model(), []
    node = torch.autograd.graph.get_gradient_edge(model[0].weight).node
    node.register_prehook(calls.append)
    with pipeline(model).sync() as pipe:
        pipe.step(workload.x, workload.target)
    assert len(calls) == 4
    assert workload.worst(model) < 1e-10
