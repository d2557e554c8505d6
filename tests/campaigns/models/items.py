"""A model as plain data: pieces, and spans that begin before other pieces and end behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from torch import nn

from asyncpipe import Namespace
from tests.campaigns.models import layers as own
from tests.campaigns.models.pieces import PIECES, Piece

__all__ = [
    "CONTAINERS",
    "SPANS",
    "Item",
    "Layer",
    "balance",
    "count",
    "draw_items",
    "draw_plain",
    "layers_of",
    "tags_of",
]

SPANS = ("stash", "stash the input", "tie", "tied weight", "shared buffer")
CONTAINERS = tuple(own.CONTAINERS)


@dataclass(frozen=True)
class Item:
    """A piece of a model, or a span: something that begins before ``inner`` and ends behind it."""

    name: str
    inner: tuple[Item, ...] = ()
    hooks: tuple[str, ...] = ()

    def walk(self) -> Iterator[Item]:
        """The item and those in it."""
        yield self
        for item in self.inner:
            yield from item.walk()

    @property
    def is_span(self) -> bool:
        """Whether it is more than one layer."""
        return self.name in SPANS or self.name.startswith("pack ")


@dataclass(frozen=True)
class Layer:
    """A layer of a built model, with the hooks that it gets."""

    name: str
    module: nn.Module
    hooks: tuple[str, ...]


def tags_of(kind: str, items: Iterable[Item]) -> set[str]:
    """The tags of all pieces."""
    found = (PIECES[kind].get(each.name) for item in items for each in item.walk())
    return {tag for piece in found if piece is not None for tag in piece.tags}


def count(items: Iterable[Item]) -> int:
    """How many layers they are."""
    return sum(2 + count(item.inner) if item.is_span else 1 for item in items)


def layers_of(kind: str, item: Item) -> Iterator[Layer]:
    """The layers of an item, made anew."""
    if not item.is_span:
        yield Layer(item.name, PIECES[kind][item.name].make(), item.hooks)
        return
    inner = [layer for each in item.inner for layer in layers_of(kind, each)]
    if item.name in SPANS:
        first, last = _ends(item.name, kind)
    else:
        container = item.name.removeprefix("pack ")
        first, last = own.Pack(container), own.Unpack(container)
        inner = [Layer(layer.name, own.OnPacked(container, layer.module), layer.hooks) for layer in inner]
    yield Layer(item.name, first, item.hooks)
    yield from inner
    yield Layer(f"end of {item.name}", last, ())


def _ends(span: str, kind: str) -> tuple[nn.Module, nn.Module]:
    if span.startswith("stash"):
        namespace = Namespace()
        return own.Stash(span == "stash the input").isolate(namespace), own.Pop().isolate(namespace)
    if span == "shared buffer":
        return (first := own.Scale()), own.Scale(first.factor)
    if kind == "image":
        conv = nn.Conv2d(own.CHANNELS, own.CHANNELS, 3, padding=1)
        return conv, conv
    linear = nn.Linear(own.WIDTH, own.WIDTH)
    return linear, linear if span == "tie" else own.TiedOut(linear.weight)


def balance(cuts: Sequence[float], layers: int) -> list[int]:
    """How many layers each stage has: at least one, near the fractions of ``cuts``, where stages end."""
    ends: list[int] = []
    for number, cut in enumerate(sorted(cuts)):
        least, most = (ends[-1] if ends else 0) + 1, layers - (len(cuts) - number)
        ends.append(min(max(round(cut * layers), least), most))
    return [end - start for start, end in zip([0, *ends], [*ends, layers], strict=True)]


Plain = Callable[[], Item]
"""Draws a piece."""


def draw_items(random: Random, plain: Plain, containers: Sequence[str]) -> list[Item]:
    """Some pieces and spans."""
    items: list[Item] = []
    for _ in range(random.randint(1, 4)):
        if random.random() < 0.7:
            items.append(plain())
            continue
        packed = [f"pack {container}" for container in random.sample(containers, 4)]
        span = random.choice((*SPANS, *SPANS, *packed))
        inner = [plain() for _ in range(random.randint(0, 3))]
        if span.startswith("stash") and random.random() < 0.3:
            inner.append(Item(random.choice(SPANS), (plain(),)))
        items.append(Item(span, tuple(inner)))
    return items


def draw_plain(random: Random, kind: str, *, draws: bool, suits: Callable[[Piece], bool] = lambda _: True) -> str:
    """The name of a piece that ``suits``; if it ``draws``, often one that does."""
    table = {name: piece for name, piece in PIECES[kind].items() if "fails" not in piece.tags and suits(piece)}
    names = [name for name, piece in table.items() if draws or "draws" not in piece.tags]
    if draws and random.random() < 0.5:
        names = [name for name in names if "draws" in table[name].tags]
    name = random.choice(names)
    if "slow" in table[name].tags and random.random() < 0.5:
        name = random.choice(names)
    return name
