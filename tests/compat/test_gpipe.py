"""``GPipe`` computes the same as the sequence of its layers, and accepts and refuses what torchgpipe's does."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from asyncpipe.compat.torchgpipe import GPipe, __version__, is_checkpointing, is_recomputing
from asyncpipe.compat.torchgpipe.skip import Namespace, pop, skippable, stash
from asyncpipe.errors import AsyncpipeError

CPUS = ["cpu"] * 4
mse = nn.functional.mse_loss


def layers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Sigmoid(), nn.Linear(5, 2)).double()


def distance(model, bare):
    """The largest distance of the parameters' gradients, in the order of the parameters."""
    pairs = zip(model.parameters(), bare.parameters(), strict=True)
    return max(float((mine.grad - other.grad).abs().max()) for mine, other in pairs)


class Counting(nn.Module):
    """A layer that counts its calls, first runs of what is recomputed, and second runs."""

    def __init__(self):
        super().__init__()
        self.calls = self.first = self.second = 0

    def forward(self, x):
        self.calls += 1
        self.first += is_checkpointing()
        self.second += is_recomputing()
        return x * 1.5


# Results


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("balance", "chunks", "samples"), [([5], 1, 4), ([2, 3], 4, 9), ([1, 1, 1, 2], 8, 5)])
def test_output_and_gradients_of_the_bare_model(balance, chunks, samples, checkpoint):
    bare = layers()
    x, target = torch.randn(samples, 3).double().requires_grad_(), torch.randn(samples, 2).double()
    wanted = bare(x)
    mse(wanted, target).backward()
    wanted_gradient, x.grad = x.grad, None
    model = GPipe(layers(), balance, devices=CPUS, chunks=chunks, checkpoint=checkpoint)
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        output = model(x)
        mse(output, target).backward()
        assert (output - wanted).abs().max() < 1e-10
        assert (x.grad - wanted_gradient).abs().max() < 1e-10
        assert distance(model, bare) < 1e-10


def test_a_tuple_is_one_argument():
    class Two(nn.Module):
        def forward(self, pair):
            a, b = pair
            return a * 2, b * 3

    class One(nn.Module):
        def forward(self, only):
            (a,) = only
            return (a + 1,)

    a, b = torch.ones(5, 1, requires_grad=True), torch.ones(5, 1, requires_grad=True)
    twice, thrice = GPipe(nn.Sequential(Two(), Two()), [1, 1], devices=CPUS, chunks=2)((a, b))
    (twice + thrice).sum().backward()
    assert (a.grad.unique().item(), b.grad.unique().item()) == (4, 9)
    (one,) = GPipe(nn.Sequential(One()), [1], devices=CPUS)(input=(a,))
    assert one.tolist() == [[2]] * 5


@skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width + 1)

    def forward(self, x):
        yield stash("skip", x)
        return self.linear(x)


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width + 1, width)

    def forward(self, x):
        skip = yield pop("skip")
        return self.linear(x) * skip


def unet():
    torch.manual_seed(3)
    outer, inner = Namespace(), Namespace()
    down = [Down(2).isolate(outer), nn.Tanh(), Down(3).isolate(inner, only=["skip"])]
    return nn.Sequential(*down, nn.Tanh(), Up(3).isolate(inner), nn.Tanh(), Up(2).isolate(outer)).double()


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("balance", [[7], [1, 6], [3, 3, 1], [2, 1, 2, 2]])
def test_skips(balance, checkpoint):
    bare, model = unet(), GPipe(unet(), balance, devices=CPUS, chunks=3, checkpoint=checkpoint)
    x = torch.randn(7, 2).double()
    outputs = [module(x) for module in (bare, model)]
    for output in outputs:
        output.square().sum().backward()
    assert (outputs[0] - outputs[1]).abs().max() < 1e-10
    assert distance(model, bare) < 1e-10


# Modes


def test_evaluation_recomputes_nothing():
    layer = Counting()
    model = GPipe(nn.Sequential(layer, Counting()), [1, 1], devices=CPUS, chunks=3, checkpoint="except_last")
    x = torch.ones(6, 1, requires_grad=True)
    for mode, first in ((True, 2), (False, 0), (True, 2)):
        layer.calls = layer.first = layer.second = 0
        assert model.train(mode) is model
        model(x).sum().backward()
        assert (layer.calls, layer.first, layer.second) == (3 + first, first, first)


def test_deferred_batch_norm():
    bare = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3)))
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3)))
    pipe = GPipe(model, [1, 1], devices=CPUS, chunks=8, deferred_batch_norm=True)
    batch = torch.rand(5, 3, 4, 4)  # fewer micro-batches than asked for
    pipe(batch).sum().backward()
    bare(batch)
    assert torch.allclose(pipe[0].running_mean, bare[0].running_mean)
    assert torch.allclose(pipe[0].running_var, bare[0].running_var)
    assert pipe[1][0].num_batches_tracked == 1
    assert model[0].running_var is pipe[0].running_var
    with pytest.raises(ValueError, match="use BatchNorm1d, 2d or 3d"):
        GPipe(nn.Sequential(nn.SyncBatchNorm(3)), [1], devices=CPUS, deferred_batch_norm=True)


# Like torchgpipe's


def test_attributes():
    class Always:
        def __str__(self):
            return "always"

    model = GPipe(nn.Sequential(nn.Linear(1, 1)), (1,), devices=("cpu",), chunks=42.0, checkpoint=Always())
    assert (model.balance, model.devices, model.chunks) == ([1], [torch.device("cpu")], 42)
    assert type(model.chunks) is int
    assert type(model.checkpoint) is str
    assert model.checkpoint == "always"
    assert __version__ == "0.0.7"


@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_it_is_like_a_sequence(balance):
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    model = GPipe(nn.Sequential(a, b), balance, devices=CPUS)
    assert len(model) == 2
    assert list(model) == [a, b]
    assert (model[0], model[1], model[-1], model[-2]) == (a, b, b, a)
    for index in (2, -3):
        with pytest.raises(IndexError):
            model[index]


def test_partitions_are_sequences_with_the_layers_names():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    model = GPipe(nn.Sequential(OrderedDict(a=a, b=b)), [1, 1], devices=CPUS)
    assert isinstance(model.partitions, nn.ModuleList)
    assert all(type(part) is nn.Sequential for part in model.partitions)
    assert {"partitions.0.a", "partitions.1.b"} <= {name for name, _ in model.named_modules()}
    seen = []
    model.partitions[1].register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad))
    model(torch.ones(2, 1))
    assert seen == [True]


def test_surplus_devices_are_dropped():
    model = GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu", torch.device("cpu"), "cuda"])
    assert model.devices == [torch.device("cpu")] * 2


def test_an_empty_module():
    model = GPipe(nn.Sequential(), [])
    assert len(model) == 0
    assert model(torch.tensor(42)) == 42
    assert model((torch.tensor(42),)) == (torch.tensor(42),)
    with pytest.raises(TypeError):
        model(42)


def test_chunks_checkpoint_and_layers_may_change():
    layer = Counting()
    model = GPipe(nn.Sequential(layer, nn.Linear(1, 1)), [1, 1], devices=CPUS, chunks=2)
    x = torch.ones(6, 1, requires_grad=True)
    model(x)
    model.chunks, model.checkpoint, layer.calls = 3, "never", 0
    model(x).sum().backward()
    assert (layer.calls, layer.second) == (3, 0)
    before = model(x)
    model.partitions[1][0] = Counting()
    assert torch.equal(model(x), x * 2.25)
    before.sum().backward()
    model.chunks = 0
    with pytest.raises(ValueError, match="positive integer, got 0"):
        model(x)


# Refusals

LINEARS = [nn.Linear(1, 1), nn.Linear(1, 1)]

WRONG = [
    ({"balance": None}, ValueError, "balance is required"),
    ({"balance": [1]}, ValueError, r"\[1\] sums up to 1, but the model has 2 layers"),
    ({"balance": [0, 2]}, ValueError, "positive integers"),
    ({"balance": [0.5, 1.5]}, ValueError, "positive integers"),
    ({"balance": []}, ValueError, "positive integers"),
    ({"chunks": 0}, ValueError, "positive integer, got 0"),
    ({"chunks": "four"}, TypeError, "positive integer, got 'four'"),
    ({"checkpoint": "sometimes"}, ValueError, "one of 'always', 'except_last', 'selective', 'never'"),
    ({"devices": ["cpu"]}, IndexError, r"2 stages need 2 devices, got 1; give devices, such as \['cpu', 'cpu'\]"),
    ({"devices": "cpu"}, ValueError, "must be a list such as"),
    ({"devices": ["cpu", "meta"]}, ValueError, "type 'meta'"),
    ({"module": nn.Linear(1, 1)}, TypeError, r"module must be nn\.Sequential to be partitioned, got Linear"),
    (
        {"module": nn.Sequential(Down(1), nn.Tanh())},
        TypeError,
        r"do not match:\n  layer 0 \(Down\) stashes skip 'skip'",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda value: None)
def test_wrong_arguments(options, error, message):
    arguments = {"module": nn.Sequential(*LINEARS), "balance": [1, 1], "devices": ["cpu", "cpu"]} | options
    with pytest.raises(error, match=message) as caught:
        GPipe(**arguments)
    assert isinstance(caught.value, AsyncpipeError) or "do not match" in message
    if "balance" in options:
        assert "torchgpipe.balance finds one: balance_by_time" in str(caught.value)


def test_no_device_by_default(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(IndexError, match=r"got 0 \(by default all CUDA devices .*\); give devices"):
        GPipe(nn.Sequential(*LINEARS), [1, 1])


x = torch.ones(4, 1)

INPUTS = [
    ("text", TypeError, "a tensor or a tuple of tensors, got str"),
    ([x, x], TypeError, "got list"),
    ((), ValueError, "holds no tensor"),
    ((x, x[:2]), ValueError, "disagree in their batch size"),
    (torch.tensor(1.0), ValueError, "without dimensions"),
]


@pytest.mark.parametrize(("value", "error", "message"), INPUTS, ids=lambda value: None)
def test_wrong_inputs(value, error, message):
    model = GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=CPUS, chunks=2)
    with pytest.raises(error, match=message):
        model(value)
    with pytest.raises(TypeError):
        model(x, x)
    assert model(x).shape == (4, 1)


@pytest.mark.cuda
def test_on_a_gpu():
    bare, model = layers(), GPipe(layers(), [2, 3], devices=[0, 0], chunks=3)
    assert model.devices == [torch.device("cuda", 0)] * 2
    batch = torch.randn(7, 3).double()
    bare(batch).sum().backward()
    model(batch.cuda()).sum().backward()
    for mine, other in zip(model.parameters(), bare.parameters(), strict=True):
        assert mine.is_cuda
        assert (mine.grad.cpu() - other.grad).abs().max() < 1e-10


def test_an_empty_batch():
    """As in torchgpipe, its output is empty, and its backward adds zeros."""
    model = GPipe(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 2)), [1, 1], devices=CPUS, chunks=2)
    output = model(x[:0])
    assert output.shape == (0, 2)
    output.sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())
