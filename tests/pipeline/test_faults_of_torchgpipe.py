"""Faults of torchgpipe and torch's former ``Pipe`` that asyncpipe does not have, one test each.

Refusals have the right type of error, whose message names the argument and the allowed values.
"""

from __future__ import annotations

import pickle
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from torch import nn

import asyncpipe.errors as e
from asyncpipe import Arguments, NoChunk, Pipeline, is_recomputing

TWO = ["cpu:0", "cpu:1"]
mse = nn.functional.mse_loss


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


# Module, balance, devices, micro-batches, recomputation


@pytest.mark.promise("Your own program", "`asyncpipe.is_recomputing()` tells a stage that this is its second run.")
@pytest.mark.parametrize(
    ("samples", "mode", "wanted"), [(9, "except_last", 7), (3, "except_last", 2), (3, "always", 3)]
)
def test_the_real_micro_batches_are_recomputed(samples, mode, wanted):
    """9 samples in 8 micro-batches make 8 micro-batches, not 5 that are all recomputed."""
    calls, again = [], []

    def count(x):
        (again if is_recomputing() else calls).append(len(x))
        return x * 2

    with opened(Call(count), nn.Linear(1, 1), microbatches=8, checkpoint=mode, loss_fn=mse) as pipe:
        x = torch.ones(samples, 1, requires_grad=True)
        for train in (lambda: pipe(x).sum().backward(), lambda: pipe.step(x, torch.ones(samples, 1))):
            calls.clear()
            again.clear()
            train()
            assert len(calls) == min(samples, 8)
            assert sum(calls) == samples
            assert len(again) == wanted
        pipe.eval()
        again.clear()
        pipe(x).sum().backward()
        assert not again


# Input

x = torch.ones(4, 1)

INPUTS = [
    ((), {}, "called without arguments|holds no tensor"),
    ((3,), {}, "holds no tensor, got"),
    ((None, "text"), {}, "holds no tensor"),
    (((),), {}, "holds no tensor"),
    ((torch.tensor(1.0),), {}, r"a tensor without dimensions; dimension 0 must be the batch \(NoChunk"),
    (((x, torch.tensor(1.0)),), {}, "a tensor without dimensions"),
    (((torch.ones(8, 1), torch.ones(2, 1)),), {}, "disagree in their batch size: .* has 8, .* has 2"),
    (
        (x,),
        {"mask": x[:3]},
        r"disagree in their batch size: .*'x'.* has 4|disagree in their batch size: .*mask.* has 3",
    ),
]


@pytest.mark.parametrize(("args", "kwargs", "message"), INPUTS, ids=lambda value: None)
def test_inputs_that_cannot_be_cut(args, kwargs, message):
    with opened(nn.Linear(1, 1), nn.Linear(1, 1), loss_fn=mse) as pipe:
        with pytest.raises(e.BatchError, match=message):
            pipe(*args, **kwargs)
        with pytest.raises(e.BatchError, match=message):
            pipe.step(Arguments(args, kwargs), x)
        pipe(x)


def test_nested_inputs_keywords_and_other_values():
    def first(pair, flag, *, scale, names, nothing=0):
        (a, (b, c)), d = pair
        assert (flag, names, nothing) == (True, ["a", None], None)
        return (a + b["b"] + c + d) * scale

    nested = (x, ({"b": x * 2}, x * 3)), x * 4
    with opened(Call(first), Call(lambda value: value * 2)) as pipe:
        output = pipe(nested, True, scale=NoChunk(torch.tensor([10.0])), names=["a", None], nothing=None)
    assert output.tolist() == [[200]] * 4
    with pytest.raises(e.ArgumentTypeError, match="NoChunk takes a tensor, got list; other values are not cut anyway"):
        NoChunk([1])


# Output


def test_outputs_of_every_kind():
    def last(x):
        return {"cut": x, "mean": x.mean(), "text": "t", "count": len(x), "nothing": None, "pair": (x, [x.sum(0)])}

    with opened(nn.Identity(), Call(last), microbatches=2) as pipe:
        output = pipe(torch.arange(3.0).view(3, 1))
    assert output["cut"].tolist() == [[0], [1], [2]]
    assert output["mean"].tolist() == [0.5, 2]
    assert (output["text"], output["count"], output["nothing"]) == (["t", "t"], [2, 1], None)
    assert output["pair"][1][0].tolist() == [1, 2]


UNEVEN = [
    (lambda x: (x, x if len(x) == 2 else "t"), "a tensor for some micro-batches and not for others"),
    (lambda x: (x, x) if len(x) == 2 else x, "differ in structure"),
    (lambda x: x.expand(-1, len(x)), r"outputs of shapes \(2, 2\), \(1, 1\) cannot be concatenated along the batch di"),
]


@pytest.mark.parametrize(("last", "message"), UNEVEN, ids=lambda value: None)
def test_outputs_that_cannot_be_gathered(last, message):
    with opened(nn.Linear(1, 1), Call(last)) as pipe:
        with pytest.raises(e.StageError, match=message):
            pipe(x[:3])
        pipe(x[:2])


# Moving, state, copies


def test_moving_is_refused():
    with opened(*linears(), devices=["cpu:0", "cpu:1", "cpu:2"]) as pipe:
        for args, kwargs in (
            (("cuda",), {}),
            ((torch.device("cpu"),), {}),
            (("cpu", torch.float32), {}),
            ((torch.ones(1),), {}),
            ((), {"device": "cuda:1"}),
        ):
            with pytest.raises(TypeError, match=r"stages stay on their devices; to\(\) takes a dtype alone"):
                pipe.to(*args, **kwargs)
        pipe.to(torch.bfloat16)
        assert pipe(torch.ones(4, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_it_is_like_a_sequence():
    model = linears()
    pipe = Pipeline(model, TWO, microbatches=2)
    assert (len(pipe), list(pipe), pipe[0], pipe[-1]) == (3, list(model), model[0], model[2])
    with pytest.raises(IndexError):
        pipe[3]


def test_the_state_has_the_unsplit_models_keys_whatever_the_split():
    model = linears()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    split, other = (Pipeline(linears(), TWO, microbatches=2, balance=balance) for balance in ([2, 1], [1, 2]))
    assert list(split.state_dict()) == list(wanted)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(split.state_dict())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("copy", [deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_pipeline_can_be_copied_at_any_time_between_steps(copy):
    batch, target = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    pipe = Pipeline(linears(), TWO, microbatches=3, checkpoint="always", loss_fn=nn.MSELoss())
    copies = [copy(pipe)]
    with pipe.sync():
        pipe(batch)
        copies.append(copy(pipe))
        wanted = pipe(batch)
        wanted.sum().backward()
        copies.append(copy(pipe))
    copies.append(copy(pipe))
    for twin in copies:
        assert (twin.microbatches, [device.name for device in twin.devices]) == (3, TWO)
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in pipe.parameters()}
        with twin.sync() as open_twin:
            assert torch.equal(open_twin(batch), wanted)
            assert open_twin.step(batch, target).loss is not None
