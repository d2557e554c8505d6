"""Faults of torchgpipe and torch's former ``Pipe`` that asyncpipe does not have, one test each.

Refusals have the right type of error, whose message names the argument and the allowed values.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from torch import nn

import asyncpipe.errors as e
from asyncpipe import Arguments, NoChunk, Pipeline, TaskError, is_recomputing

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

CONSTRUCTOR = [
    ({"model": nn.Linear(1, 1)}, e.OptionError, r"model must be an nn\.Sequential, a list of modules or a traced"),
    ({"model": [nn.Linear(1, 1), "layer"]}, e.OptionError, r"model must be an nn\.Sequential"),
    ({"balance": [1, 1]}, e.BalanceError, r"balance \[1, 1\] sums up to 2, but the model has 3 layers; it must sum up"),
    ({"balance": [3, 0]}, e.BalanceError, "balance must be a list of positive integers, one a stage"),
    ({"balance": [4, -1]}, e.BalanceError, "balance must be a list of positive integers, one a stage"),
    ({"balance": None}, e.BalanceError, "balance must be 'auto' or a list of integers, got None"),
    ({"balance": [1, 1, 1]}, e.OptionError, "3 stages for 2 devices"),
    ({"balance": [3]}, e.OptionError, "1 stages? for 2 devices"),
    ({"devices": []}, e.DeviceError, "devices must be a list such as"),
    ({"microbatches": 2.0}, e.MicrobatchError, r"microbatches must be a positive integer, got 2\.0"),
    ({"microbatches": "2"}, e.MicrobatchError, "microbatches must be a positive integer, got '2'"),
    ({"microbatches": 0}, e.MicrobatchError, "microbatches must be a positive integer, got 0"),
    ({"checkpoint": "sometimes"}, e.OptionError, "checkpoint must be one of 'always', 'except_last', 'never', got 'so"),
    ({"checkpoint": True}, e.OptionError, "checkpoint must be one of 'always', 'except_last', 'never', got True"),
]


@pytest.mark.parametrize(("options", "error", "message"), CONSTRUCTOR, ids=lambda value: None)
def test_constructor(options, error, message):
    arguments = {"model": linears(), "devices": TWO, "balance": [2, 1], "microbatches": 2} | options
    with pytest.raises(error, match=message) as caught:
        Pipeline(**arguments)
    assert isinstance(caught.value, ValueError)


def test_layers_and_parameters_may_be_shared():
    torch.manual_seed(1)
    layer, last = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    last.weight = layer.weight
    model = nn.Sequential(layer, nn.Tanh(), layer, last)
    twin = deepcopy(model)
    x = torch.randn(5, 3).double()
    twin(x).sum().backward()
    with Pipeline(model, ["cpu:0", "cpu:1", "cpu:2"], balance=[2, 1, 1], microbatches=3).sync() as pipe:
        pipe(x).sum().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad - other.grad).abs().max() < 1e-10


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


NO_OUTPUT = [
    (lambda x: "text", "stage 1 returned str without any tensor; a stage must return a tensor, or a nested"),
    (lambda x: None, "stage 1 returned NoneType without any tensor"),
    (lambda x: {"a": 1}, "stage 1 returned dict without any tensor"),
]


@pytest.mark.parametrize(("last", "message"), NO_OUTPUT, ids=lambda value: None)
def test_an_output_without_a_tensor(last, message):
    with opened(nn.Linear(1, 1), Call(last)) as pipe, pytest.raises(TaskError, match=message) as caught:
        pipe(x)
    assert isinstance(caught.value.__cause__, e.StageError)
    assert isinstance(caught.value.__cause__, TypeError)


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


# Deferred batch norm


def test_deferred_batch_norm_is_unbiased_and_commits_for_the_real_count():
    bare, model = nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    batch = torch.randn(7, 2, 5)
    bare(batch)
    with opened(model[0], Call(lambda x: x), microbatches=16, deferred_batch_norm=True) as pipe:
        pipe(batch)
        statistics = pipe.state_dict()
    assert torch.allclose(statistics["0.running_var"], bare.running_var)
    assert statistics["0.num_batches_tracked"] == 1


def test_sync_batch_norm_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.SyncBatchNorm(2)))
    with pytest.raises(e.OptionError, match=r"layer '1\.0' \(SyncBatchNorm\) gathers .*; use BatchNorm1d, 2d or 3d"):
        Pipeline(model, TWO, microbatches=2, deferred_batch_norm=True)


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


# Workers and exceptions


def test_dropped_pipelines_leave_no_thread():
    def alive():
        return {thread for thread in threading.enumerate() if thread.name.startswith("asyncpipe")}

    before = alive()
    for _ in range(10):
        pipe = Pipeline(linears(), TWO, microbatches=2)
        pipe.sync().__enter__()(torch.randn(4, 3).double()).sum().backward()
    del pipe
    gc.collect()
    for thread in alive() - before:
        thread.join(10)
    assert alive() == before


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, ValueError])
def test_nothing_that_a_stage_raises_hangs(error):
    failing = [True]

    def fail(x):
        if failing[0]:
            raise error("stop")
        return x

    with opened(nn.Linear(1, 1), Call(fail), loss_fn=mse) as pipe:
        for run in (lambda: pipe(x), lambda: pipe.step(x, x)):
            with pytest.raises(
                TaskError, match=rf"F\(0,1\) failed .*micro-batch 0, stage 1.*{error.__name__}"
            ) as caught:
                run()
            assert type(caught.value.__cause__) is error
        failing[0] = False
        assert pipe(x).shape == (4, 1)
