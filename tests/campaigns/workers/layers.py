"""Layers of random models. All are importable, so workers can unpickle them, and all pass a carrier on.

A carrier is what stages send: a tensor, or a tuple, dict or dataclass with it and with an integer tensor beside it, or
a tuple with views of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe import Namespace, pop, skippable, stash

__all__ = ["CHANGING", "WIDTH", "Carried", "Piece", "build_model", "draw_pieces"]

WIDTH = 8
CHANGING = ("batch norm", "counter", "average")
"""Pieces whose forwards change buffers."""


class Piece(NamedTuple):
    """One layer."""

    name: str
    other: int = -1
    """The number of the layer that it shares a tensor with, or gets a skip from."""


@dataclass
class Carried:
    """What is sent where the carrier is a dataclass."""

    x: Tensor
    count: Tensor
    note: str = "kept"
    nothing: None = None


def wrap(x: Tensor, carrier: str) -> Any:
    """``x`` as what stages send, with an integer tensor, and one without elements."""
    if carrier == "tensor":
        return x
    if carrier == "aliases":
        return x, None, x, x[..., 1:]
    count = torch.arange(x.numel() // WIDTH).reshape(x.shape[:-1]).to(torch.int32)
    if carrier == "tuple":
        return x, (count, count[:0]), 3
    return {"x": x, "count": count} if carrier == "dict" else Carried(x, count)


def opened(value: Any) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Any]]:
    """The tensor in a carrier, what is beside it, and what makes a carrier of another tensor."""
    if isinstance(value, Tensor):
        return value, None, lambda x: x
    if isinstance(value, tuple) and value[1] is None:
        return value[0], None, lambda x: wrap(x, "aliases")
    if isinstance(value, tuple):
        return value[0], value[1][0], lambda x: (x, *value[1:])
    if isinstance(value, dict):
        return value["x"], value["count"], lambda x: {**value, "x": x}
    return value.x, value.count, lambda x: replace(value, x=x)


class Layer(nn.Module):
    """Does ``module`` to the tensor in a carrier; the first one makes the carrier, the last one opens it."""

    def __init__(self, module: nn.Module, carrier: str = "", *, is_last: bool = False) -> None:
        super().__init__()
        self.module = module
        self.carrier = carrier
        self.is_last = is_last

    def forward(self, value: Any) -> Any:
        x, count, closed = opened(value)
        y = self.module(x)
        if count is not None:
            y = y + count.to(y.dtype).remainder(2).unsqueeze(-1) * 0.125
        elif not isinstance(value, Tensor):
            y = y + 0.01 * value[2] - 0.02 * value[3].sum(-1, keepdim=True)
        if self.is_last:
            return y
        return wrap(y, self.carrier) if self.carrier else closed(y)


class Apply(nn.Module):
    """A function by its name in this module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = globals()[self.name](x)
        return y


def turned(x: Tensor) -> Tensor:
    """The same, with other strides."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def with_gaps(x: Tensor) -> Tensor:
    """The same, as part of a larger tensor."""
    return torch.cat([x, x.detach()], -1)[..., :WIDTH]


def shifted(x: Tensor) -> Tensor:
    """The same, not at the beginning of its memory."""
    return torch.cat([x[:1].detach(), x])[1:]


def between(x: Tensor) -> Tensor:
    """The same, between others, where no vector of a processor begins."""
    return torch.cat([x[..., :1].detach(), x, x[..., :2].detach()], -1)[..., 1:-2]


def behind(x: Tensor) -> Tensor:
    """The same, behind another number."""
    return torch.cat([x.detach().reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape)


def overlapping(x: Tensor) -> Tensor:
    """Rows of which each begins in the middle of the one before."""
    flat = torch.cat([x.reshape(-1), x.reshape(-1)[:WIDTH]])
    length = x.shape[1] if x.dim() == 3 else 1
    return flat.as_strided(x.shape, (length * WIDTH // 2, WIDTH // 2, 1)[-x.dim() :])


def spread(x: Tensor) -> Tensor:
    """One number for each sample, everywhere, without memory for each."""
    return x.sum(-1, keepdim=True).tanh().expand_as(x)


class OfSequence(nn.Module):
    """A layer that wants (samples, length, width), for any shape."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y = self.module(x if x.dim() == 3 else x.unsqueeze(1))
        y = y[0] if isinstance(y, tuple) else y
        return y.reshape(x.shape)


class Norm(nn.Module):
    """A batch norm over all but the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.reshape(-1, WIDTH)).reshape(x.shape)
        return y


class Pictures(nn.Module):
    """A convolution of pictures of 2 × 2 with 2 channels, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        pictures = x.reshape(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        y: Tensor = self.convolution(pictures).reshape(x.shape)
        return y


class Counter(nn.Module):
    """Scales by how often it was called, which it counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls = self.calls + 1
        return x * (1 + 0.01 * torch.remainder(self.calls, 7))


class Average(nn.Module):
    """Adds a moving average of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(x.detach().reshape(-1, WIDTH).mean(0), alpha=0.1)
        return x + self.seen


class Scale(nn.Module):
    """Multiplies by a buffer, which may be another layer's."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor: Tensor
        self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Tied(nn.Module):
    """A linear layer with another one's weight, and a bias of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.T, self.bias)


class Fails(nn.Module):
    """Raises for a micro-batch that has a number which is none, which the caller puts there to have it fail."""

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("a number that is none")
        return x


@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, value: Any) -> Any:
        x, _, closed = opened(value)
        yield stash("skip", x)
        return closed(x * 0.5)


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, value: Any) -> Any:
        skip = yield pop("skip")
        x, _, closed = opened(value)
        return closed(x + skip.tanh())


PLAIN = ("linear", "linear", "linear", "tanh", "relu", "layer norm", "dropout", "dropout", "frozen", "nothing")
VIEWS = ("turned", "with_gaps", "shifted", "between", "behind", "overlapping", "spread")
HEAVY = ("recurrent", "transformer", "pictures", "tied", "tied", "shared buffer", "skip", "skip", "overwrite")


def draw_pieces(
    chance: random.Random, *, length: int, changing: bool, deferred: bool, fails: bool, stages: int
) -> tuple[Piece, ...]:
    """The layers of a model, at least one a stage."""
    pieces = [Piece("linear")]
    skips: list[int] = []
    wanted = max(stages, chance.randint(stages, stages + 5)) + 1
    while len(pieces) < wanted or skips:
        kind = chance.choice([PLAIN, PLAIN, HEAVY, VIEWS, CHANGING if changing else PLAIN])
        name = chance.choice(kind)
        if skips and (len(pieces) >= wanted or chance.random() < 0.3):
            pieces.append(Piece("up", skips.pop(chance.randrange(len(skips)))))
        elif name == "skip":
            skips.append(len(pieces))
            pieces.append(Piece("down"))
        elif name in ("tied", "shared buffer"):
            source = "linear" if name == "tied" else "scale"
            found = [k for k, piece in enumerate(pieces) if piece.name == source]
            pieces.append(Piece(name, chance.choice(found)) if found else Piece(source))
        else:
            pieces.append(Piece(name))
    if deferred:
        pieces.insert(chance.randint(1, len(pieces)), Piece("batch norm"))
    if fails:
        pieces.append(Piece("fails"))
    pieces.append(Piece("linear"))
    return tuple(_repaired(pieces))


def _repaired(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Skips and ties name their source by its number, which an insertion has moved."""
    repaired: list[Piece] = []
    open_skips: list[int] = []
    for number, piece in enumerate(pieces):
        if piece.name == "down":
            open_skips.append(number)
        if piece.name == "up":
            piece = piece._replace(other=open_skips.pop(piece.other % len(open_skips)))
        elif piece.other >= 0:
            source = "linear" if piece.name == "tied" else "scale"
            found = [k for k, each in enumerate(repaired) if each.name == source]
            piece = piece._replace(other=found[piece.other % len(found)])
        repaired.append(piece)
    return repaired


def build_model(pieces: Sequence[Piece], carrier: str, seed: int, dtype: torch.dtype) -> nn.Sequential:
    """The model, with the same numbers whenever it is built."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    spaces: dict[int, Namespace] = {}
    for number, piece in enumerate(pieces):
        if piece.name == "down":
            spaces[number] = Namespace()
            layers.append(Down().isolate(spaces[number]))  # type: ignore[attr-defined]
        elif piece.name == "up":
            layers.append(Up().isolate(spaces[piece.other]))  # type: ignore[attr-defined]
        else:
            module = _module(piece, layers)
            layers.append(Layer(module, carrier if not number else "", is_last=number == len(pieces) - 1))
    return nn.Sequential(*layers).to(dtype)


def _module(piece: Piece, layers: Sequence[nn.Module]) -> nn.Module:
    if piece.name == "tied":
        return Tied(layers[piece.other].module.weight)  # type: ignore[union-attr, arg-type]
    if piece.name == "shared buffer":
        return Scale(layers[piece.other].module.factor)  # type: ignore[union-attr, arg-type]
    if piece.name in VIEWS:
        return Apply(piece.name)
    return _MODULES[piece.name]()


_MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "overwrite": lambda: nn.ReLU(inplace=True),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "nothing": nn.Identity,
    "recurrent": lambda: OfSequence(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "transformer": lambda: OfSequence(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)),
    "pictures": Pictures,
    "batch norm": Norm,
    "counter": Counter,
    "average": Average,
    "scale": lambda: Scale(torch.linspace(0.5, 1.5, WIDTH)),
    "fails": Fails,
}
