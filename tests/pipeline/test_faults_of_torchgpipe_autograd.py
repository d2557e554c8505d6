"""More faults of torchgpipe and torch's former ``Pipe``: in the backward, the caller's modes and skips.

The others are in ``test_faults_of_torchgpipe.py``.
"""

from __future__ import annotations

import pickle
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import asyncpipe.errors as e
from asyncpipe import (
    Namespace,
    Pipeline,
    TaskError,
    balance_by_size,
    balance_by_time,
    pop,
    skippable,
    stash,
    verify_skippables,
)

TWO = ["cpu:0", "cpu:1"]
MODES = ["always", "except_last", "never"]


class Call(nn.Module):
    """A layer that is a function of what it receives."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@contextmanager
def opened(*layers, devices=TWO, microbatches=2, **options):
    with Pipeline(nn.Sequential(*layers), devices[: len(layers)], microbatches=microbatches, **options).sync() as pipe:
        yield pipe


def linears(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


x = torch.ones(4, 1)


# Recomputation and autograd


@pytest.mark.parametrize("mode", MODES)
def test_a_second_backward(mode):
    with opened(*linears(), devices=["cpu:0", "cpu:1", "cpu:2"], checkpoint=mode) as pipe:
        output = pipe(torch.randn(4, 3).double()).sum()
        output.backward()
        with pytest.raises(RuntimeError, match="second"):
            output.backward()
        pipe.module.zero_grad()
        output = pipe(torch.randn(4, 3).double()).sum()
        output.backward(retain_graph=True)
        first = [p.grad.clone() for p in pipe.parameters()]
        pipe.module.zero_grad()
        output.backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(pipe.parameters(), first, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_autograd_grad_on_parameters(mode):
    model = linears()
    batch = torch.randn(4, 3).double()
    wanted = torch.autograd.grad(model(batch).square().sum(), list(model.parameters()))
    with Pipeline(model, TWO, microbatches=3, checkpoint=mode).sync() as pipe:
        gradients = torch.autograd.grad(pipe(batch).square().sum(), list(model.parameters()))
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(gradients, wanted, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_integers_and_detached_tensors_in_an_output(mode):
    def first(x):
        return x * 2, torch.arange(len(x)), x.detach(), x > 0, 7

    def last(received):
        double, number, detached, positive, seven = received
        return double * number[:, None] * detached * positive * seven, number, detached

    batch = torch.ones(4, 1, requires_grad=True)
    with opened(Call(first), Call(last), checkpoint=mode) as pipe:
        output, number, detached = pipe(batch)
        assert (number.tolist(), detached.tolist()) == ([0, 1, 0, 1], [[1]] * 4)
        (output.sum() + detached.sum()).backward()
    assert batch.grad.flatten().tolist() == [0, 14, 0, 14]


@pytest.mark.parametrize("mode", MODES)
def test_double_backward_is_refused(mode):
    batch = torch.randn(4, 3).double().requires_grad_()
    with opened(*linears(), devices=["cpu:0", "cpu:1", "cpu:2"], checkpoint=mode) as pipe:
        output = pipe(batch).square().sum()
        with pytest.raises(e.BackwardError, match=r"differentiated twice \(create_graph=True\).* bare model"):
            torch.autograd.grad(output, batch, create_graph=True)
        pipe(batch).sum().backward()


# Modes and random numbers


def test_dropout_is_the_same_across_modes_and_global_state_is_left():
    outputs, gradients = [], []
    for mode in MODES:
        torch.manual_seed(5)
        batch = torch.ones(6, 8, requires_grad=True)
        with opened(nn.Dropout(0.5), nn.Dropout(0.5), checkpoint=mode) as pipe:
            output = pipe(batch)
            state = torch.get_rng_state()
            output.sum().backward()
            assert torch.equal(state, torch.get_rng_state())
        outputs.append(output)
        gradients.append(batch.grad)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert all(torch.equal(output, gradient) for output, gradient in zip(outputs, gradients, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_autocast_reaches_stages_and_recomputations(mode):
    seen = []

    def note(x):
        seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return x

    with opened(nn.Linear(1, 2), Call(note), checkpoint=mode) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            output = pipe(x)
        assert output.dtype == torch.bfloat16
        output.sum().backward()
    assert set(seen) == {(torch.bfloat16, True)}


@pytest.mark.parametrize("manager", [torch.no_grad, torch.inference_mode])
def test_grad_and_inference_mode_reach_stages(manager):
    seen = []
    note = Call(lambda x: seen.append(torch.is_inference_mode_enabled()) or x)
    with opened(nn.Linear(1, 1), note) as pipe, manager():
        output = pipe(x)
    assert (output.requires_grad, output.is_inference()) == (False, manager is torch.inference_mode)
    assert set(seen) == {manager is torch.inference_mode}


# Skips


@skippable(stash=["a"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("a", x)
        return x * 2


@skippable(pop=["a"])
class Pop(nn.Module):
    def forward(self, x):
        a = yield pop("a")
        return x * a


def test_isolate_checks_its_names():
    with pytest.raises(e.OptionError, match=r"Stash cannot isolate \['b'\]; the names that it declares: \['a'\]"):
        Stash().isolate(Namespace(), only=["a", "b"])
    with pytest.raises(e.OptionError, match=r"only must be a list of names such as \['a'\], got 'a'"):
        Stash().isolate(Namespace(), only="a")


def test_every_skip_that_does_not_match_is_listed():
    model = nn.Sequential(Pop(), Stash(), Stash())
    message = "layer 0 .Pop. pops skip 'a', which no layer before(.|\n)*layer 2 .Stash. stashes skip 'a', as layer 1"
    with pytest.raises(TypeError, match=message):
        verify_skippables(model)
    with pytest.raises(TypeError, match=message):
        Pipeline(model, TWO, balance=[1, 2], microbatches=2)


def test_undeclared_and_unused_names():
    @skippable(stash=["a"])
    class Wrong(nn.Module):
        def forward(self, x):
            if len(x) > 2:
                yield stash("b", x)
            return x

    for batch, message in ((x, r"stash\('b'\) is not declared"), (x[:2], r"stash\('a'\) is declared but was not yie")):
        with opened(Wrong(), Pop(), microbatches=1) as pipe, pytest.raises(TaskError, match=message) as caught:
            pipe(batch)
        assert isinstance(caught.value.__cause__, e.SkipError)
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_skips_unwrapped_and_through_pickle():
    space = Namespace()
    model = nn.Sequential(Stash().isolate(space), nn.Identity(), Pop().isolate(space))
    batch = torch.tensor([[3.0], [4.0]])
    assert model(batch).tolist() == [[18], [32]]
    twin = pickle.loads(pickle.dumps(model))
    with Pipeline(twin, ["cpu:0", "cpu:1", "cpu:2"], microbatches=2).sync() as pipe:
        assert pipe(batch).tolist() == [[18], [32]]


# Balance


def test_layers_are_measured_on_a_cpu_in_place_or_not_and_with_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 400), nn.ReLU(inplace=True))
    model(torch.randn(2, 4)).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    assert sum(balance_by_time(2, model, torch.randn(8, 4), seconds=0)) == 4
    assert balance_by_size(2, model, torch.randn(8, 4)) == [3, 1]
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    with pytest.raises(e.BalanceError, match="cannot split 4 layers into 5 stages; give at most as many stages as la"):
        balance_by_time(5, model, torch.randn(8, 4), seconds=0)
