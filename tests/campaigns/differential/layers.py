"""Layers as people write them, which torch.nn does not have."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from asyncpipe import pop, skippable, stash

WIDTH = 6
TIME = 4
CHANNELS = 4
SIDE = 6
TOKENS = 11


class Fn(nn.Module):
    """A function as a layer, on a parameter of its own, so that the gradient of its input and of a weight count."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


class Residual(nn.Module):
    """``x + layer(x)``; in place if told so."""

    def __init__(self, inner: nn.Module, in_place: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y.add_(x) if self.in_place else y + x


class Last(nn.Module):
    """The channels of an image as the last dimension, for a layer that wants them there, and back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.movedim(1, -1)).movedim(-1, 1)


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` of a sequence with itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class CausalAttention(nn.Module):
    """Scaled dot product attention with a causal mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)


class Decoder(nn.Module):
    """A decoder layer whose memory is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.tanh())


class Unrolled(nn.Module):
    """A cell over time."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, states = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, 1)


class Recurrent(nn.Module):
    """A recurrent network's output."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.bidirectional = options.get("bidirectional", False)
        self.network = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.network(x)
        return output[..., :WIDTH] + output[..., WIDTH:] if self.bidirectional else output


class Swapped(nn.Module):
    """A layer that wants the channels before the time."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Bucketed(nn.Module):
    """Looks rows up by the signs of the input, in an ``nn.Embedding`` or an ``nn.EmbeddingBag``."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach() > 0).long()
        if isinstance(self.table, nn.EmbeddingBag):
            return x + self.table(ids.flatten(0, -2)).view_as(x)
        return x + self.table(ids.sum(-1))


class Bilinear(nn.Module):
    """``nn.Bilinear`` of the input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.tanh())


class Experts(nn.Module):
    """Sends each row to one of two experts: control flow that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.sum(-1) > 0
        y = torch.zeros_like(x)
        for expert, rows in zip(self.experts, (chosen, ~chosen), strict=True):
            if rows.any():
                y[rows] = expert(x[rows])
        return y


class PartlyUsed(nn.Module):
    """Has a parameter that nothing uses, a frozen one, and one that a branch detaches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.cut = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.frozen + self.cut.detach()


class Complex(nn.Module):
    """A filter in the frequency domain, with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        return torch.fft.irfft(spectrum * self.filter.to(spectrum.dtype), n=WIDTH)


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.pow(3) * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * 3 * x.pow(2) * w, (gradient * x.pow(3)).sum(tuple(range(x.dim() - 1)))


class Cubed(nn.Module):
    """A ``torch.autograd.Function`` of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return _Cubed.apply(x.tanh(), self.weight)


class InnerGradient(nn.Module):
    """Calls ``torch.autograd.grad`` inside its forward (an energy's force); its own backward is a double backward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(at).pow(2).sum(), at, create_graph=True)
        return x + force


class Vmapped(nn.Module):
    """A layer under ``torch.func.vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: row @ self.weight)(x)


class Half(nn.Module):
    """Computes a part in float32: another dtype inside a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().tanh().to(x.dtype)


# Buffers that a forward writes


class Ema(nn.Module):
    """Divides by a running mean of the input's size, which it updates in place first."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                new = self.size * 0.7 + x.abs().mean() * 0.3
                if self.in_place:
                    self.size.copy_(new)
                else:
                    self.size = new
        return x * self.weight / (self.size.clone() + 0.1)


class Counter(nn.Module):
    """Counts its forwards in a buffer, and depends on the count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight * (1 + 0.1 * self.calls.to(x.dtype))


class Centroids(nn.Module):
    """A codebook that follows its inputs (as in VQ-VAE), with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.randn(3, WIDTH))
        self.register_buffer("hits", torch.ones(3))
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        flat = x.detach().reshape(-1, WIDTH)
        nearest = torch.cdist(flat, self.book).argmin(-1)
        quantized = self.book[nearest].view_as(x)
        if self.training:
            with torch.no_grad():
                self.hits.index_add_(0, nearest, torch.ones_like(nearest, dtype=self.hits.dtype))
                self.book.index_add_(0, nearest, 0.1 * (flat - self.book[nearest]))
        return x + (quantized - x).detach() + 0.1 * (x - quantized).pow(2)


class Memory(nn.Module):
    """Keeps its last output (detached) in a buffer that is not persistent, and adds its mean to the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.last
        self.last = y.detach().reshape(-1, WIDTH).mean(0)
        return y


# In place


class InPlace(nn.Module):
    """Writes into what it received."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "add":
            return x.add_(self.weight.mean())
        if self.how == "relu":
            return functional.relu_(x)
        if self.how == "slice":
            x[..., 0] = x[..., 0] * 2 + self.weight[0]
            return x
        if self.how == "masked":
            return x.masked_fill_(x < -0.5, 0.0)
        assert self.how == "own"
        y = x * self.weight.mean()
        y += 1
        return y.tanh_()


class View(nn.Module):
    """Returns its input through views: flattened and back, a part of a larger tensor, an expanded one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "flatten":
            return x.flatten().view(x.shape)
        if self.how == "part":
            return torch.stack([x, x.tanh()])[0]
        if self.how == "expand":
            return x.mean(-1, keepdim=True).expand(x.shape)
        if self.how == "strided":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        assert self.how == "same"
        return x


# Hooks and checkpoints inside


class TensorHook(nn.Module):
    """Scales the gradient of its input with a hook on the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.7)
        return y


class Checkpointed(nn.Module):
    """``torch.utils.checkpoint`` around a layer."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return result


class SavedTensors(nn.Module):
    """Saves what its layer keeps for the backward in a form of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return self.linear(x).tanh()


# Draws


class Noise(nn.Module):
    """Draws by another function than dropout's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.how == "randn_like":
            return x + torch.randn_like(x) * self.weight
        if self.how == "rand":
            return x * torch.rand(x.shape, dtype=x.dtype) + self.weight
        if self.how == "bernoulli":
            return x * torch.bernoulli(torch.full_like(x, 0.5)) + self.weight
        if self.how == "uniform_":
            return x + torch.empty_like(x).uniform_() * self.weight
        if self.how == "randperm":
            return x + x[torch.randperm(x.shape[0])] * self.weight
        if self.how == "gumbel":
            return functional.gumbel_softmax(x * self.weight, tau=0.8)
        if self.how == "branch":
            return x * self.weight if torch.rand(()) < 0.5 else x.tanh() + self.weight
        assert self.how == "multinomial"
        return x * self.weight[torch.multinomial(torch.ones(WIDTH), 1)]


# TorchScript


def _scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and in use.
        return torch.jit.script(function)


@_scripted
def scripted_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """A fused function, as Megatron has."""
    y = x + bias
    return 0.5 * y * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))


@_scripted
def scripted_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float, training: bool) -> Tensor:
    """Megatron's bias-dropout-add."""
    return residual + torch.nn.functional.dropout(x + bias, p=p, training=training)


class ScriptedFunction(nn.Module):
    """Calls a TorchScript function; one that draws, if told so."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        if self.dropout:
            return scripted_dropout_add(self.linear(x), self.bias, x, self.dropout, self.training)
        return scripted_gelu(self.linear(x), self.bias)


class Scriptable(nn.Module):
    """What ``torch.jit.script`` makes a module of, with a buffer that it counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
        return self.linear(x).tanh() * (1 + 0.1 * self.calls)


# Values between layers


class Pair(NamedTuple):
    """A named tuple between layers."""

    x: Any
    rest: Any


@dataclass
class Bag:
    """A dataclass between layers."""

    x: Any
    rest: Any


@dataclass(frozen=True)
class FrozenBag:
    """A frozen dataclass between layers."""

    x: Any
    rest: Any


class Opaque:
    """An object that holds tensors, of which nobody knows anything."""

    def __init__(self, x: Any, rest: Any) -> None:
        self.x, self.rest = x, rest


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda x, rest: (x, rest),
    "list": lambda x, rest: [x, rest],
    "dict": lambda x, rest: {"x": x, "rest": rest},
    "named tuple": Pair,
    "dataclass": Bag,
    "frozen dataclass": FrozenBag,
    "nested": lambda x, rest: {"rest": (rest, [None, 3, "text"]), "x": {"x": [x]}},
    "twice": lambda x, rest: (x, (x, rest)),
    "dataclass in dict": lambda x, rest: {"bag": Bag(x, [rest, None])},
    "opaque": Opaque,
    "integers": lambda x, rest: (x, (rest, torch.arange(x.shape[0]), (x > 0.05).detach())),
    "function": lambda x, rest: {"x": x, "rest": rest, "function": torch.tanh},
}


def _unpack(container: str, value: Any) -> tuple[Tensor, Tensor]:
    if container in ("tuple", "list"):
        return value[0], value[1]
    if container in ("dict", "function"):
        return value["x"], value["rest"]
    if container == "nested":
        assert value["rest"][1] == [None, 3, "text"]
        return value["x"]["x"][0], value["rest"][0]
    if container == "twice":
        return (value[0] + value[1][0]) / 2, value[1][1]
    if container == "dataclass in dict":
        return value["bag"].x, value["bag"].rest[0]
    if container == "integers":
        return value[0] * value[1][2].to(value[0].dtype).add(1), value[1][0]
    kinds = {"named tuple": Pair, "dataclass": Bag, "frozen dataclass": FrozenBag, "opaque": Opaque}
    assert type(value) is kinds[container]
    return value.x, value.rest


class Pack(nn.Module):
    """Puts its input into a container, with another tensor that is computed from it."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Any:
        return CONTAINERS[self.container](x, x.tanh() * self.weight)


class OnPacked(nn.Module):
    """A layer on the tensor in a container."""

    def __init__(self, container: str, inner: nn.Module) -> None:
        super().__init__()
        self.container = container
        self.inner = inner

    def forward(self, value: Any) -> Any:
        x, rest = _unpack(self.container, value)
        if isinstance(value, Bag | FrozenBag):
            return replace(value, x=self.inner(x))
        return CONTAINERS[self.container](self.inner(x), rest)


class Unpack(nn.Module):
    """The tensors of a container, added up."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container

    def forward(self, value: Any) -> Tensor:
        x, rest = _unpack(self.container, value)
        return x + rest


# Skips and ties


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes its input; the result is the input itself or a new tensor."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.same = same

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x if self.same else x * 0.9


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds what was stashed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip * self.weight


class TiedOut(nn.Module):
    """Multiplies by the transposed weight of an earlier layer, which is also this one's parameter."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class ToVector(nn.Module):
    """Flattens a sample and maps it to a vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))
