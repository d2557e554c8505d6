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


class Of(nn.Module):
    """``function(layer, x)`` with what the layer holds: modules, parameters, and buffers from plain tensors."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def fn(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A function as a layer, on a parameter of its own, so that the gradient of its input and of a weight count."""
    return Of(lambda layer, x: function(x * layer.scale), scale=nn.Parameter(torch.tensor(1.1)))


def ones(*shape: int, value: float = 1.0) -> nn.Parameter:
    """A weight."""
    return nn.Parameter(torch.full(shape, value))


def linear(**options: Any) -> nn.Module:
    """Of the width that rows have."""
    return nn.Linear(WIDTH, WIDTH, **options)


def moved(inner: nn.Module, to: int = 1) -> nn.Module:
    """A layer that wants the last dimension elsewhere; with ``to=-1``, the channels of an image last."""
    one, other = (1, -1) if to == -1 else (-1, to)
    return Of(lambda layer, x: layer.inner(x.movedim(one, other)).movedim(other, one), inner=inner)


def residual(inner: nn.Module, in_place: bool = False) -> nn.Module:
    """``inner(x) + x``; in place if told so."""
    return Of(lambda layer, x: layer.inner(x).add_(x) if in_place else layer.inner(x) + x, inner=inner)


def self_attention(**options: Any) -> nn.Module:
    """``nn.MultiheadAttention`` of a sequence with itself."""
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)
    return Of(lambda layer, x: layer.attention(x, x, x, need_weights=False)[0], attention=attention)


def causal_attention(dropout: float = 0.0) -> nn.Module:
    """Scaled dot product attention with a causal mask."""

    def attend(layer: Any, x: Tensor) -> Tensor:
        chance = dropout if layer.training else 0.0
        q, k, v = layer.project(x).chunk(3, -1)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=chance)

    return Of(attend, project=nn.Linear(WIDTH, 3 * WIDTH))


def decoder() -> nn.Module:
    """A decoder layer whose memory is its input."""
    made = nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
    return Of(lambda layer, x: layer.decoder(x, x.tanh()), decoder=made)


def unrolled(cell: nn.Module) -> nn.Module:
    """A cell over time."""

    def unroll(layer: Any, x: Tensor) -> Tensor:
        state, states = None, []
        for t in range(x.shape[1]):
            state = layer.cell(x[:, t], state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, 1)

    return Of(unroll, cell=cell)


def recurrent(kind: type[nn.Module], **options: Any) -> nn.Module:
    """A recurrent network's output; of both directions, if it has two, their sum."""

    def output(layer: Any, x: Tensor) -> Tensor:
        found, _ = layer.network(x)
        return found[..., :WIDTH] + found[..., WIDTH:] if options.get("bidirectional") else found

    return Of(output, network=kind(WIDTH, WIDTH, batch_first=True, **options))


def bucketed(table: nn.Module) -> nn.Module:
    """Looks rows up by the signs of the input, in an ``nn.Embedding`` or an ``nn.EmbeddingBag``."""

    def look_up(layer: Any, x: Tensor) -> Tensor:
        ids = (x.detach() > 0).long()
        if isinstance(layer.table, nn.EmbeddingBag):
            return x + layer.table(ids.flatten(0, -2)).view_as(x)
        return x + layer.table(ids.sum(-1))

    return Of(look_up, table=table)


def experts() -> nn.Module:
    """Sends each row to one of two experts: control flow that depends on data."""

    def send(layer: Any, x: Tensor) -> Tensor:
        chosen = x.sum(-1) > 0
        y = torch.zeros_like(x)
        for expert, rows in zip(layer.experts, (chosen, ~chosen), strict=True):
            if rows.any():
                y[rows] = expert(x[rows])
        return y

    return Of(send, experts=nn.ModuleList(linear() for _ in range(2)))


def partly_used() -> nn.Module:
    """Has a parameter that nothing uses, a frozen one, and one that a branch detaches."""
    frozen = ones(WIDTH, value=0.5).requires_grad_(False)
    parts = {"linear": linear(), "unused": ones(2), "frozen": frozen, "cut": ones(WIDTH)}
    return Of(lambda layer, x: layer.linear(x) * layer.frozen + layer.cut.detach(), **parts)


def complex_filter() -> nn.Module:
    """A filter in the frequency domain, with a complex parameter."""

    def apply(layer: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        return torch.fft.irfft(spectrum * layer.filter.to(spectrum.dtype), n=WIDTH)

    return Of(apply, filter=nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128)))


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.pow(3) * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * 3 * x.pow(2) * w, (gradient * x.pow(3)).sum(tuple(range(x.dim() - 1)))


def cubed() -> nn.Module:
    """A ``torch.autograd.Function`` of the user's."""
    return Of(lambda layer, x: _Cubed.apply(x.tanh(), layer.weight), weight=ones(WIDTH, value=0.5))


def inner_gradient() -> nn.Module:
    """Calls ``torch.autograd.grad`` inside its forward (an energy's force); its own backward is a double backward."""

    def force(layer: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (found,) = torch.autograd.grad(layer.energy(at).pow(2).sum(), at, create_graph=True)
        return x + found

    return Of(force, energy=nn.Linear(WIDTH, 1))


# Buffers that a forward writes


class Ema(nn.Module):
    """Divides by a running mean of the input's size, which it updates in place first."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        self.weight = ones(WIDTH)
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


def counter() -> nn.Module:
    """Counts its forwards in a buffer, and depends on the count."""

    def count(layer: Any, x: Tensor) -> Tensor:
        layer.calls += 1
        return x * layer.weight * (1 + 0.1 * layer.calls.to(x.dtype))

    return Of(count, weight=ones(), calls=torch.zeros((), dtype=torch.long))


def centroids() -> nn.Module:
    """A codebook that follows its inputs (as in VQ-VAE), with a straight-through gradient."""

    def quantize(layer: Any, x: Tensor) -> Tensor:
        x = x * layer.weight
        flat = x.detach().reshape(-1, WIDTH)
        nearest = torch.cdist(flat, layer.book).argmin(-1)
        quantized = layer.book[nearest].view_as(x)
        if layer.training:
            with torch.no_grad():
                layer.hits.index_add_(0, nearest, torch.ones_like(nearest, dtype=layer.hits.dtype))
                layer.book.index_add_(0, nearest, 0.1 * (flat - layer.book[nearest]))
        return x + (quantized - x).detach() + 0.1 * (x - quantized).pow(2)

    return Of(quantize, book=torch.randn(3, WIDTH), hits=torch.ones(3), weight=ones(WIDTH))


class Memory(nn.Module):
    """Keeps its last output (detached) in a buffer that is not persistent, and adds its mean to the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.last
        self.last = y.detach().reshape(-1, WIDTH).mean(0)
        return y


class Scale(nn.Module):
    """Multiplies by a buffer, which may be another layer's."""

    def __init__(self, factor: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(0.7) if factor is None else factor)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


# In place, and views


def in_place(how: str) -> nn.Module:
    """Writes into what it received."""

    def write(layer: Any, x: Tensor) -> Tensor:
        if how == "add":
            return x.add_(layer.weight.mean())
        if how == "relu":
            return functional.relu_(x)
        if how == "slice":
            x[..., 0] = x[..., 0] * 2 + layer.weight[0]
            return x
        if how == "masked":
            return x.masked_fill_(x < -0.5, 0.0)
        assert how == "own"
        y = x * layer.weight.mean()
        y += 1
        return y.tanh_()

    return Of(write, weight=ones(WIDTH, value=0.9))


def _overlapping(x: Tensor) -> Tensor:
    """Rows of which each begins in the middle of the one before."""
    width = x.shape[-1]
    flat = torch.cat([x.reshape(-1), x.reshape(-1)[:width]])
    half = torch.empty(x.shape[:-1]).stride()
    return flat.as_strided(x.shape, (*(width // 2 * stride for stride in half), 1))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.flatten().view(x.shape),
    "part of a stack": lambda x: torch.stack([x, x.tanh()])[0],
    "expanded": lambda x: x.mean(-1, keepdim=True).expand(x.shape),
    "strided": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "turned": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "with gaps": lambda x: torch.cat([x, x.detach()], -1)[..., : x.shape[-1]],
    "not at the beginning": lambda x: torch.cat([x[:1].detach(), x])[1:],
    "between others": lambda x: torch.cat([x[..., :1].detach(), x, x[..., :2].detach()], -1)[..., 1:-2],
    "behind a number": lambda x: torch.cat([x.detach().reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape),
    "overlapping": _overlapping,
    "its input": lambda x: x,
}
"""The input through views: with other strides, a part of a larger tensor, elements that share memory."""


# Hooks and checkpoints inside


def tensor_hook() -> nn.Module:
    """Scales the gradient of its input with a hook on the tensor."""

    def hooked(layer: Any, x: Tensor) -> Tensor:
        y = x * layer.weight
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.7)
        return y

    return Of(hooked, weight=ones())


def checkpointed(*inner: nn.Module, reentrant: bool = False) -> nn.Module:
    """``torch.utils.checkpoint`` around layers."""
    return Of(lambda layer, x: checkpoint(layer.inner, x, use_reentrant=reentrant), inner=nn.Sequential(*inner))


def saved_tensors() -> nn.Module:
    """Saves what its layer keeps for the backward in a form of its own."""

    def save(layer: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return layer.linear(x).tanh()

    return Of(save, linear=linear())


# Draws


def _branch(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight if torch.rand(()) < 0.5 else x.tanh() + weight


NOISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "randn_like": lambda x, weight: x + torch.randn_like(x) * weight,
    "rand": lambda x, weight: x * torch.rand(x.shape, dtype=x.dtype) + weight,
    "bernoulli": lambda x, weight: x * torch.bernoulli(torch.full_like(x, 0.5)) + weight,
    "uniform_": lambda x, weight: x + torch.empty_like(x).uniform_() * weight,
    "randperm": lambda x, weight: x + x[torch.randperm(x.shape[0])] * weight,
    "gumbel": lambda x, weight: functional.gumbel_softmax(x * weight, tau=0.8),
    "branch": _branch,
    "multinomial": lambda x, weight: x * weight[torch.multinomial(torch.ones(WIDTH), 1)],
}
"""Draws by other functions than dropout's."""


def noise(how: str) -> nn.Module:
    """Draws in training."""
    draw = NOISE[how]
    return Of(lambda layer, x: draw(x, layer.weight) if layer.training else x, weight=ones(WIDTH, value=0.3))


def fail_if_nan(_: nn.Module, x: Tensor) -> Tensor:
    """Raise for a micro-batch with a number that is none, which the caller puts there to have it fail."""
    if x.isnan().any():
        raise ValueError("a number that is none")
    return x


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
        self.linear = linear(bias=False)
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
        self.linear = linear()
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


def _signs(value: Any) -> tuple[Tensor, Tensor]:
    return value[0] * value[1][2].to(value[0].dtype).add(1), value[1][0]


def _from_nested(value: Any) -> tuple[Tensor, Tensor]:
    assert value["rest"][1] == [None, 3, "text"]
    return value["x"]["x"][0], value["rest"][0]


def _members(value: Any) -> tuple[Tensor, Tensor]:
    return value.x, value.rest


def _items(value: Any) -> tuple[Tensor, Tensor]:
    return value["x"], value["rest"]


CONTAINERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda x, rest: (x, rest), lambda value: (value[0], value[1])),
    "list": (lambda x, rest: [x, rest], lambda value: (value[0], value[1])),
    "dict": (lambda x, rest: {"x": x, "rest": rest}, _items),
    "named tuple": (Pair, _members),
    "dataclass": (Bag, _members),
    "frozen dataclass": (FrozenBag, _members),
    "nested": (lambda x, rest: {"rest": (rest, [None, 3, "text"]), "x": {"x": [x]}}, _from_nested),
    "twice": (lambda x, rest: (x, (x, rest)), lambda value: ((value[0] + value[1][0]) / 2, value[1][1])),
    "views": (lambda x, rest: (x, None, rest, x[..., 1:]), lambda value: (value[0], value[2] + value[3].mean())),
    "dataclass in dict": (
        lambda x, rest: {"bag": Bag(x, [rest, None])},
        lambda value: (value["bag"].x, value["bag"].rest[0]),
    ),
    "opaque": (Opaque, _members),
    "integers": (lambda x, rest: (x, (rest, torch.arange(x.shape[0]), (x > 0.05).detach(), rest[:0])), _signs),
    "function": (lambda x, rest: {"x": x, "rest": rest, "function": torch.tanh}, _items),
}
"""By name: what packs two tensors, and what takes them out again."""


class Pack(nn.Module):
    """Puts its input into a container, with another tensor that is computed from it."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Any:
        return CONTAINERS[self.container][0](x, x.tanh() * self.weight)


class OnPacked(nn.Module):
    """A layer on the tensor in a container."""

    def __init__(self, container: str, inner: nn.Module) -> None:
        super().__init__()
        self.container = container
        self.inner = inner

    def forward(self, value: Any) -> Any:
        pack, unpack = CONTAINERS[self.container]
        x, rest = unpack(value)
        if isinstance(value, Bag | FrozenBag):
            return replace(value, x=self.inner(x))
        return pack(self.inner(x), rest)


class Unpack(nn.Module):
    """The tensors of a container, added up."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container

    def forward(self, value: Any) -> Tensor:
        x, rest = CONTAINERS[self.container][1](value)
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
