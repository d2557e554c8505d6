"""``Pipe`` puts stages where the layers are, takes several arguments, and needs no RPC."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from asyncpipe.compat.torch_pipe import NoChunk, Pipe, PipeSequential, WithDevice
from asyncpipe.compat.torch_pipe.skip import pop, skippable, stash
from asyncpipe.compat.torch_pipe.utils import partition_model
from asyncpipe.errors import AsyncpipeError

mse = nn.functional.mse_loss


class Join(nn.Module):
    """Two arguments in, two out; values that are not cut arrive unchanged."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, x, y):
        return self.left(x).tanh(), self.right(y)


class Add(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x, y):
        return self.last(x + y)


def layers(kind=PipeSequential):
    torch.manual_seed(1)
    return kind(Join(), Add(), nn.Tanh(), nn.Linear(2, 2)).double()


def names(pipe):
    # Private: the public ``devices`` are physical, without the numbers of CPU devices.
    return [stage.device.name for stage in pipe._pipeline.stages]


def distance(model, bare):
    pairs = zip(model.parameters(), bare.parameters(), strict=True)
    return max(float((mine.grad - other.grad).abs().max()) for mine, other in pairs)


# Results


@pytest.mark.parametrize("kind", [PipeSequential, nn.Sequential])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("chunks", "samples"), [(1, 4), (4, 9), (8, 5)])
def test_output_and_gradients_of_the_bare_model(chunks, samples, checkpoint, kind):
    bare, model = layers(), Pipe(layers(kind), chunks, checkpoint)
    x, y = torch.randn(samples, 3).double().requires_grad_(), torch.randn(samples, 2).double()
    target = torch.randn(samples, 2).double()
    outputs, gradients = [], []
    for output in (bare(x, y), model(x, y).local_value()):
        x.grad = None
        mse(output, target).backward()
        outputs.append(output)
        gradients.append(x.grad)
    assert (outputs[0] - outputs[1]).abs().max() < 1e-10
    assert (gradients[0] - gradients[1]).abs().max() < 1e-10
    assert distance(model, bare) < 1e-10


def test_arguments_and_outputs_of_every_kind():
    class Mixed(nn.Module):
        def forward(self, x, whole, flag, text, nothing):
            assert nothing is None
            return x + whole.sum(), len(x) if flag else -1, text, nothing

    whole = torch.ones(3)
    output = Pipe(nn.Sequential(Mixed()), chunks=2)(torch.zeros(5, 1), NoChunk(whole), True, "t", None).to_here()
    assert output[0].tolist() == [[3]] * 5
    assert output[1:] == ([3, 2], ["t", "t"], None)


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


def test_the_backward_of_an_output():
    model = Pipe(nn.Sequential(nn.Tanh(), nn.Linear(2, 1)), chunks=2)
    output = model(torch.ones(1, 2))
    output.backward(retain_graph=True)
    output.backward()
    assert model[1].bias.grad.item() == 2
    with pytest.raises(ValueError, match="must be -1 for an output of this process, got 3"):
        output.backward(3)


@pytest.mark.parametrize("kind", [tuple, list])
def test_what_goes_to_a_partition_of_the_same_stage(kind):
    class Twice(nn.Module):
        def forward(self, x):
            return kind([x, 2 * x])

    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    model = Pipe(nn.Sequential(nn.Linear(1, 1), Twice(), Sum()), chunks=2)
    assert names(model) == ["cpu:0"]
    x = torch.ones(2, 1)
    assert torch.equal(model(x).local_value(), 3 * model[0](x))


def test_skips():
    x = torch.tensor([[3.0]] * 4, requires_grad=True)
    model = Pipe(nn.Sequential(*(WithDevice(layer, "cpu") for layer in (Stash(), nn.Tanh(), Pop()))), chunks=2)
    model(x).local_value().sum().backward()
    wanted, bare = x.grad, nn.Sequential(Stash(), nn.Tanh(), Pop())
    assert len(model.devices) == 3
    x.grad = None
    bare(x).sum().backward()
    assert torch.allclose(x.grad, wanted)


# Where layers are


def test_with_device():
    linear = nn.Linear(1, 1)
    model = Pipe(
        nn.Sequential(
            WithDevice(nn.Tanh(), "cpu:1"),
            WithDevice(nn.Sequential(linear, nn.ReLU()), torch.device("cpu:1")),
            nn.Linear(1, 1),
            WithDevice(nn.ReLU(), "cpu"),
            nn.Linear(1, 1),
            WithDevice(nn.Linear(1, 1), "cpu:1"),
        )
    )
    assert names(model) == ["cpu:1", "cpu:0", "cpu:2", "cpu:3", "cpu:1#1"]
    assert model[1] is linear
    assert "partitions.1.0.weight" in model.state_dict()
    assert model(torch.ones(2, 1)).local_value().shape == (2, 1)
    wrapped = WithDevice(linear, "cpu:1")
    assert (wrapped.module, wrapped.device) == (linear, torch.device("cpu:1"))
    assert torch.equal(wrapped(torch.ones(1, 1)), linear(torch.ones(1, 1)))
    with pytest.raises(ValueError, match="type 'meta'"):
        WithDevice(linear, "meta")


def test_a_subclass_of_sequential_stays_whole():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    x = torch.randn(4, 2)
    torch.manual_seed(2)
    bare = nn.Sequential(Residual(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    assert torch.allclose(Pipe(bare, chunks=2)(x).local_value(), bare(x))


def test_a_child_on_several_devices():
    spread = nn.Bilinear(1, 1, 1)
    spread.bias = nn.Parameter(torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match=r"child 1 \(Bilinear\) is spread over cpu, meta; move it to one"):
        Pipe(nn.Sequential(nn.Linear(1, 1), spread))


def test_partition_model():
    model = partition_model(nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)), [2, 1], ["cpu", "cpu"])
    assert [[type(layer) for layer in part] for part in model] == [[nn.Linear, nn.Tanh], [nn.Linear]]
    assert len(Pipe(model).devices) == 2
    for arguments in ([[1, 1], ["cpu", "cpu"]], [[2, 1], ["cpu"]]):
        with pytest.raises(ValueError, match=r"must sum up to 3|need 2 devices, got"):
            partition_model(nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)), *arguments)
    with pytest.raises(TypeError, match="to be partitioned, got Linear"):
        partition_model(nn.Linear(1, 1), [1])


# Like torch's


def test_it_is_like_a_sequence():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    model = Pipe(nn.Sequential(OrderedDict(a=a, b=b)), chunks=42.0)
    assert (len(model), list(model), model[0], model[-1]) == (2, [a, b], a, b)
    assert (model.chunks, model.checkpoint) == (42, "except_last")
    with pytest.raises(IndexError):
        model[2]
    assert next(iter(model.state_dict())) == "partitions.0.0.weight"
    assert all(isinstance(part, PipeSequential) for part in model.partitions)
    with pytest.raises(TypeError, match="denied to move"):
        model.to("cpu")
    assert model.half()[0].weight.dtype == torch.float16


def test_an_empty_module():
    model = Pipe(nn.Sequential())
    assert model(torch.tensor(42)).local_value() == 42
    with pytest.raises(TypeError):
        model(42)


# Refusals

LINEARS = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

WRONG = [
    ({"module": nn.Linear(1, 1)}, TypeError, r"module must be nn\.Sequential to be partitioned, got Linear"),
    ({"module": [nn.Linear(1, 1)]}, TypeError, r"module must be nn\.Sequential to be partitioned, got list"),
    ({"chunks": [2]}, TypeError, r"positive integer, got \[2\]"),
    ({"module": nn.Sequential(nn.SyncBatchNorm(1)), "deferred_batch_norm": True}, ValueError, "use BatchNorm1d, 2d"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda value: None)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message) as caught:
        Pipe(**({"module": LINEARS} | options))
    assert isinstance(caught.value, AsyncpipeError)


def test_wrong_skips():
    with pytest.raises(TypeError, match=r"layer 0 \(Pop\) pops skip 'a', which no layer before it stashes"):
        Pipe(nn.Sequential(Pop(), nn.Linear(1, 1)))


x = torch.ones(4, 1)

INPUTS = [
    ((), TypeError, "no tensor to cut into micro-batches, got nothing"),
    ((3, "text"), TypeError, "no tensor to cut into micro-batches, got int, str"),
    ((NoChunk(x),), TypeError, "got NoChunk"),
    ((x.to("meta"),), ValueError, "must be on cpu, the first stage's, got one on meta"),
    ((x, x[:2]), ValueError, "disagree in their batch size"),
    ((torch.tensor(1.0),), ValueError, "without dimensions"),
]


@pytest.mark.parametrize(("inputs", "error", "message"), INPUTS, ids=lambda value: None)
def test_wrong_inputs(inputs, error, message):
    model = Pipe(LINEARS, chunks=2)
    with pytest.raises(error, match=message):
        model(*inputs)
    assert model(x).local_value().shape == (4, 1)


@pytest.mark.cuda
def test_children_on_one_gpu_are_a_stage():
    model = nn.Sequential(nn.Tanh(), nn.Linear(1, 1).cuda(), nn.ReLU(), nn.Linear(1, 1).cuda(), nn.Linear(1, 1))
    pipe = Pipe(model, chunks=2)
    assert list(map(len, pipe.partitions)) == [1, 1, 1, 1, 1]
    assert pipe.devices == [torch.device("cuda", 0)] * 4 + [torch.device("cpu")]
    assert names(pipe) == ["cuda:0", "cpu:0"]
    assert pipe(x.cuda()).local_value().device.type == "cpu"
    with pytest.raises(ValueError, match=r"must be on cuda:0, the first stage's, got one on cpu"):
        pipe(x)


def test_a_list_between_stages():
    """As in torch's ``Pipe``: its elements are the arguments of the next stage, and an output comes as a tuple."""

    class Both(nn.Module):
        def forward(self, x, y=None):
            return [x + 1, x + 2] if y is None else [x + y]

    model = Pipe(nn.Sequential(WithDevice(Both(), "cpu:0"), WithDevice(Both(), "cpu:1")), chunks=2)
    output = model(torch.ones(4, 1)).local_value()
    assert isinstance(output, tuple)
    assert torch.equal(output[0], torch.full((4, 1), 5.0))
