"""Tensors and layers that few models have: as in the unsplit model, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)

from asyncpipe import Microbatches, Pipeline, TaskError
from asyncpipe.errors import BatchError, OptionError, StageError

mse = nn.functional.mse_loss
DEVICES = ["cpu:0", "cpu:1"]
SHAPES = [("gpipe", "always"), ("1f1b", "never"), ("1f1b", "except_last"), ("zb-h1", "never"), ("zb-h1", "always")]
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
TARGET = torch.zeros(8, 6)


def seeded(make):
    torch.manual_seed(0)
    return make()


def check(make, x, target, balance, schedule, checkpoint, steps=1):
    """Steps have the gradients and buffers of the unsplit model, micro-batch by micro-batch."""
    model, bare = seeded(make), seeded(make)
    for _ in range(steps):
        for piece, wanted in zip(x.split(2), target.split(2), strict=True):
            (mse(bare(piece), wanted) / 4).backward()
    options = {"schedule": schedule, "checkpoint": checkpoint, "balance": balance}
    with Pipeline(model, DEVICES, microbatches=4, loss_fn=mse, **options).sync() as pipe:
        for _ in range(steps):
            pipe.step(x, target)
    same(model, bare)


def same(model, bare):
    pairs = [(mine.grad, theirs.grad) for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True)]
    pairs += zip(model.buffers(), bare.buffers(), strict=True)
    for mine, theirs in pairs:
        assert mine.layout is theirs.layout
        assert torch.allclose(mine.to_dense(), theirs.to_dense(), atol=1e-5)


# Buffers that a forward resizes


class Quantized(nn.Linear):
    """Its weight is quantized, one scale a channel."""

    def __init__(self, quantizer):
        super().__init__(6, 6)
        self.quantizer = quantizer

    def forward(self, x):
        return nn.functional.linear(x, self.quantizer(self.weight), self.bias)


def quantizer(kind, observer):
    return kind(
        observer=observer,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )


QUANTIZERS = {
    "fake": lambda: Quantized(quantizer(FakeQuantize, PerChannelMinMaxObserver)),
    "fused": lambda: Quantized(quantizer(FusedMovingAvgObsFakeQuantize, MovingAveragePerChannelMinMaxObserver)),
    "observer": lambda: PerChannelMinMaxObserver(ch_axis=1),
}


@pytest.mark.promise("Right results", "A buffer that is changed in place stays the same tensor, also if it is resized.")
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated", "ignore:Please use quant_min and quant_max")
@pytest.mark.parametrize(("schedule", "checkpoint"), SHAPES)
@pytest.mark.parametrize("make", QUANTIZERS.values(), ids=QUANTIZERS)
def test_buffers_that_a_forward_resizes(make, schedule, checkpoint):
    layers = lambda: nn.Sequential(nn.Linear(6, 6), make(), nn.Tanh(), make(), nn.Linear(6, 6))  # noqa: E731
    check(layers, X, TARGET, [2, 3], schedule, checkpoint, steps=2)


# Small types


class To(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return torch.complex(x.half(), x.half()) if self.kind.is_complex else x.to(self.kind)


class Back(nn.Module):
    def forward(self, x):
        return (x.real + x.imag).float() if x.is_complex() else x.float()


SMALL = [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32]


@pytest.mark.promise(
    "Right results", "Tensors of 8-bit floats and of `complex32` travel between stages and between workers."
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("schedule", "checkpoint"), SHAPES)
@pytest.mark.parametrize("kind", SMALL, ids=str)
def test_small_types_between_stages(kind, schedule, checkpoint):
    layers = lambda: nn.Sequential(nn.Linear(6, 6), To(kind), Back(), nn.Linear(6, 6))  # noqa: E731
    check(layers, X, TARGET, [2, 2], schedule, checkpoint)


# Sparse gradients of tied embeddings


class Embeds(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, ids):
        return ids, self.embedding(ids)


class EmbedsAgain(Embeds):
    """Another sparse gradient."""

    def forward(self, given):
        ids, x = given
        return self.embedding(ids) + x.float()


class Head(Embeds):
    """A dense gradient of the same weight."""

    def forward(self, given):
        return given[1].float() @ self.embedding.weight[:6]


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given):
        return given[0], self.linear(given[1].float()).to(torch.float8_e5m2)


IDS = torch.randint(20, (8, 5), generator=torch.Generator().manual_seed(1))


def tied(last):
    embedding = nn.Embedding(20, 6, sparse=True)
    return nn.Sequential(Embeds(embedding), Middle(), last(embedding))


@pytest.mark.promise("Right results", "Sparse gradients of a shared embedding are added as autograd adds them.")
@pytest.mark.parametrize(("schedule", "checkpoint"), SHAPES)
@pytest.mark.parametrize("last", [EmbedsAgain, Head])
def test_sparse_gradients_of_tied_embeddings(last, schedule, checkpoint):
    check(lambda: tied(last), IDS, torch.zeros(8, 5, 6), [1, 2], schedule, checkpoint, steps=2)


@pytest.mark.promise("Right results", "Sparse gradients of a shared embedding are added as autograd adds them.")
def test_a_dense_gradient_is_added_to_a_sparse_one_of_an_earlier_step():
    embedding = nn.Embedding(20, 6, sparse=True)
    model, target = nn.Sequential(embedding, nn.Linear(6, 6)), torch.zeros(8, 5, 6)
    bare = copy.deepcopy(model)
    with Pipeline(model, DEVICES, microbatches=4, loss_fn=mse).sync() as pipe:
        for is_sparse in (True, False):
            model[0].sparse = bare[0].sparse = is_sparse
            mse(bare(IDS), target).backward()
            pipe.step(IDS, target)
    same(model, bare)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.promise(
    "Right results", "Tensors of 8-bit floats and of `complex32` travel between stages and between workers."
)
async def test_workers_send_sparse_gradients_and_small_types_and_keep_their_parameters():
    model, bare = seeded(lambda: tied(EmbedsAgain)), seeded(lambda: tied(EmbedsAgain))
    target, optimizer = torch.zeros(8, 5, 6), sgd(bare.parameters())
    state = copy.deepcopy(model.state_dict())
    mse(bare(IDS), target).backward()
    optimizer.step()
    options = {"balance": [2, 1], "workers": "processes", "optimizer": sgd, "checkpoint": "always"}
    async with Pipeline(model, DEVICES, microbatches=4, loss_fn=mse, **options) as pipe:
        await pipe.step(IDS, target)
        for name, value in pipe.state_dict().items():
            assert torch.allclose(value, bare.state_dict()[name], atol=1e-6), name
        model.load_state_dict(state, assign=True)
        with pytest.raises(OptionError, match=r"'0\.embedding\.weight' was replaced after the pipeline was made"):
            await pipe.step(IDS, target)


# Nested tensors


class ToNested(nn.Linear):
    """A jagged tensor, whose lengths follow from the values."""

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        lengths = (x[:, 0, 0].abs() * 10).long() % 3 + 2
        parts = [row[:length] for row, length in zip(super().forward(x), lengths.tolist(), strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


class Sum(nn.Module):
    def forward(self, nested):
        return torch.stack([part.sum(0) for part in nested.unbind()])


def linear():
    return nn.Linear(6, 6)


@pytest.mark.promise(
    "Right results", "Jagged nested tensors are cut between samples, and travel between stages on threads."
)
@pytest.mark.parametrize(("schedule", "checkpoint"), SHAPES)
def test_jagged_tensors_between_stages(schedule, checkpoint):
    layers = lambda: nn.Sequential(ToNested(), linear(), linear(), Sum(), linear())  # noqa: E731
    check(layers, torch.cat([X[:, None]] * 5, 1), TARGET, [2, 3], schedule, checkpoint)


@pytest.mark.promise(
    "Right results", "Jagged nested tensors are cut between samples, and travel between stages on threads."
)
@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(("schedule", "checkpoint"), SHAPES)
def test_jagged_tensors_as_input(schedule, checkpoint, in_pieces):
    parts = [X[:1].expand(2 + k % 3, 6) for k in range(8)]
    model = seeded(lambda: nn.Sequential(linear(), linear(), Sum(), linear()))
    bare = copy.deepcopy(model)
    x, target = torch.nested.as_nested_tensor(parts, layout=torch.jagged), TARGET
    mse(bare(x), target).backward()
    if in_pieces:
        pieces = [parts[2 * k : 2 * k + 2] for k in range(4)]
        x = Microbatches([torch.nested.as_nested_tensor(piece, layout=torch.jagged) for piece in pieces])
        target = Microbatches(TARGET.split(2))
    options = {"schedule": schedule, "checkpoint": checkpoint, "balance": [1, 3]}
    with Pipeline(model, DEVICES, microbatches=4, loss_fn=mse, **options).sync() as pipe:
        pipe.step(x, target)
        same(model, bare)
        if not in_pieces:
            model.zero_grad()
            mse(pipe(x), target).backward()
            same(model, bare)


# Attributes of tensors


class Marked(torch.Tensor):
    """A subclass, whose functions return it."""


class Sets(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        marked = x.as_subclass(self.kind) * 1
        marked.scale = 3.0
        return marked


class Reads(nn.Module):
    def forward(self, x):
        return x.as_subclass(torch.Tensor) * getattr(x, "scale", 1)


@pytest.mark.promise(
    "Refused, not wrong",
    "An attribute that Python code has given a tensor is refused between stages, where copies would lack it.",
)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", [torch.Tensor, Marked])
def test_attributes_of_tensors_between_stages_are_refused(kind, checkpoint):
    layers = lambda: nn.Sequential(linear(), Sets(kind), Reads(), linear())  # noqa: E731
    check(layers, X, TARGET, [1, 3], "1f1b", checkpoint)
    options = {"balance": [2, 2], "checkpoint": checkpoint}
    with Pipeline(layers(), DEVICES, microbatches=4, loss_fn=mse, **options).sync() as pipe:
        with pytest.raises(TaskError) as caught:
            pipe.step(X, TARGET)
        assert isinstance(caught.value.__cause__, StageError)
        assert "sends a tensor with the attribute 'scale'" in str(caught.value.__cause__)


@pytest.mark.promise(
    "Refused, not wrong",
    "An attribute that Python code has given a tensor is refused between stages, where copies would lack it.",
)
def test_attributes_of_inputs_are_refused():
    x = X.clone()
    x.scale = 2.0
    with Pipeline(nn.Sequential(Reads(), linear()), DEVICES, microbatches=4, loss_fn=mse).sync() as pipe:
        for call in (lambda: pipe(x), lambda: pipe.step(x, TARGET), lambda: pipe(Microbatches([x]))):
            with pytest.raises(BatchError, match="a tensor with the attribute 'scale', which its micro-batches would"):
                call()


# Parameters that are replaced


@pytest.mark.promise(
    "Refused, not wrong",
    "A parameter that was replaced is trained, or refused where an optimizer, a worker or a tied stage has it too.",
)
@pytest.mark.parametrize("held", [True, False], ids=["by an optimizer", "by nobody"])
def test_parameters_that_are_replaced_are_followed_or_refused(held):
    model = seeded(lambda: nn.Sequential(linear(), nn.Tanh(), linear()))
    new = {name: value + 0.5 for name, value in model.state_dict().items()}
    options = {"optimizer": sgd} if held else {}
    with Pipeline(model, DEVICES, microbatches=4, loss_fn=mse, **options).sync() as pipe:
        pipe.step(X, TARGET)
        model.load_state_dict(new)
        model[2].load_state_dict({"weight": new["2.weight"], "bias": new["2.bias"]}, assign=True)
        model.zero_grad()
        bare = copy.deepcopy(model)
        if held:
            for call in (lambda: pipe.step(X, TARGET), lambda: pipe(X)):
                with pytest.raises(OptionError, match=r"'2\.weight' was replaced after .* load without assign"):
                    call()
            return
        mse(bare(X), TARGET).backward()
        pipe.step(X, TARGET)
        same(model, bare)


@pytest.mark.promise(
    "Refused, not wrong",
    "A parameter that was replaced is trained, or refused where an optimizer, a worker or a tied stage has it too.",
)
def test_ties_do_not_lose_their_parameter():
    model = nn.Sequential(linear(), linear())
    model[1].weight = model[0].weight
    with Pipeline(model, DEVICES, microbatches=4, loss_fn=mse).sync() as pipe:
        pipe.step(X, TARGET)
        model.load_state_dict(model.state_dict(), assign=True)
        with pytest.raises(OptionError, match=r"'0\.weight' was replaced after"):
            pipe.step(X, TARGET)


# Wrappers of torch.distributed


def ddp(layer):
    return nn.parallel.DistributedDataParallel(layer)


def fsdp(layer):
    return dist.fsdp.FullyShardedDataParallel(layer, device_id=torch.device("cpu"))


def fsdp2(layer):
    return dist.fsdp.fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))


@pytest.mark.promise(
    "Refused, not wrong",
    "Layers inside `DistributedDataParallel`, `FullyShardedDataParallel`, `fully_shard` or `replicate` are refused.",
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("wrap", [ddp, fsdp, fsdp2])
def test_a_layer_that_waits_for_other_processes_is_refused(wrap):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(linear(), nn.Sequential(wrap(linear())))
        with pytest.raises(
            OptionError, match=r"the layer '1\.0' is wrapped in .*; leave the wrapper off, and give replicas="
        ):
            Pipeline(model, DEVICES, microbatches=4, loss_fn=mse)
    finally:
        dist.destroy_process_group()
