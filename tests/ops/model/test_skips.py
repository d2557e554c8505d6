"""Skips of one forward: a U-shaped model against one without skips, and the error for every misuse."""

from __future__ import annotations

import copy
import pickle
import re
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.errors import OptionError, SkipError
from asyncpipe.ops.model.skip_layout import verify_skippables
from asyncpipe.ops.model.skips import (
    Namespace,
    SkipKey,
    SkipStore,
    pop,
    skippable,
    stash,
    use_skips,
)

Skips = Generator[Any, Any, Any]
Gradients = Callable[[nn.Module, Callable[[Tensor], Tensor]], list[Tensor]]
ONE = torch.ones(())
A: SkipKey = (None, "a")
B: SkipKey = (None, "b")


@skippable(stash=["a"])
class Down(nn.Module):
    def __init__(self) -> None:
        super(Down, self).__init__()  # noqa: UP008  # The explicit form must find the class that it names.
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Skips:
        """Stash the input."""
        yield stash("a", x)
        return self.linear(x)


@skippable(pop=["a"])
class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Skips:
        a = yield pop("a")
        return self.linear(x) * a


class Wider(Down):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + 1


def layer(forward: Callable[..., Any], stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Any:
    """An instance of a decorated class called Layer with this forward."""
    return skippable(stash, pop)(type("Layer", (nn.Module,), {"forward": forward}))()


def stashing(*names: str) -> Any:
    def forward(self: nn.Module, x: Tensor) -> Skips:
        for name in names:
            yield stash(name, x)
        return x

    return layer(forward, stash=names)


def popping(*names: str) -> Any:
    """A layer that adds what it pops to its input."""

    def forward(self: nn.Module, x: Tensor) -> Skips:
        for name in names:
            x = x + (yield pop(name))
        return x

    return layer(forward, pop=names)


def u_shape() -> nn.Sequential:
    """Two pairs, one inside the other, of the same names."""
    outer, inner = Namespace(), Namespace()
    middle = nn.Linear(3, 3)
    return nn.Sequential(Down().isolate(outer), Down().isolate(inner), middle, Up().isolate(inner), Up().isolate(outer))


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Without a pipeline


@pytest.mark.usefixtures("no_leaks")
def test_gradients_equal_those_by_hand(gradients: Gradients) -> None:
    model = u_shape()

    def by_hand(x: Tensor) -> Tensor:
        first, second, middle, third, fourth = model
        y = first.linear(x)
        return fourth.linear(third.linear(middle(second.linear(y))) * y) * x

    for _ in range(2):
        assert same(gradients(model, model), gradients(model, by_hand))


def test_nothing_is_kept_but_the_skips_of_a_failed_forward() -> None:
    def fail(self: nn.Module, x: Tensor) -> Skips:
        yield stash("a", x)
        raise KeyError("mine")

    model, x = nn.Sequential(stashing("a"), popping("a")), torch.ones(3)
    model(x)
    failing = layer(fail, stash=["a"])
    with pytest.raises(KeyError, match="mine"):
        failing(ONE)
    gone = weakref.ref(x), weakref.ref(failing)
    del x, failing
    assert [ref() for ref in gone] == [None, None]
    assert model(ONE * 3).item() == 6, "what the failed forward stashed is replaced"


# The class


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copied: Callable[[nn.Sequential], nn.Sequential], gradients: Gradients) -> None:
    model = u_shape()
    twin = copied(model)
    assert [type(module) for module in twin] == [Down, Down, nn.Linear, Up, Up]
    assert same(gradients(twin, twin), gradients(model, model)), "layers that shared a namespace still do"
    verify_skippables([twin[0], twin[1], model[3], model[4]])
    assert isinstance(copied(Wider()), Wider)


def test_what_cannot_be_decorated() -> None:
    for bad in (Namespace, 3, nn.ReLU()):
        with pytest.raises(TypeError, match=r"@skippable decorates a subclass of nn\.Module, got "):
            skippable(stash=["a"])(bad)  # type: ignore[type-var]
    for option in ("stash", "pop"):
        for names in ("name", [1]):
            message = f"{option} must be a list of names such as ['a'], got {names!r}"
            with pytest.raises(OptionError, match=re.escape(message)):
                skippable(**{option: names})


# Subclasses


def generator(self: nn.Module, x: Tensor) -> Skips:
    yield stash("a", 2 * x)
    return x


def around(self: nn.Module, x: Tensor) -> Skips:
    doubled = nn.Sequential(stashing("z"), popping("z"))(x)  # Another module's forward between this one's parts.
    return Down.forward(self, x) + doubled
    yield


def derived(forward: Callable[..., Any], *bases: type) -> type[nn.Module]:
    return type("Derived", bases or (Down,), {"forward": forward})


SUBCLASSES: dict[str, tuple[type[nn.Module], int, int | None]] = {
    "inherited": (type("Derived", (Down,), {}), 1, 0),
    "plain": (Wider, 1, 1),
    "generator": (derived(generator), 2, None),
    "generator around": (derived(around), 1, 2),
    "abstract base": (derived(generator, skippable(stash=["a"])(type("Abstract", (nn.Module,), {}))), 2, None),
}


@pytest.mark.parametrize(("kind", "factor", "added"), SUBCLASSES.values(), ids=SUBCLASSES.keys())
def test_subclasses(kind: type[nn.Module], factor: int, added: int | None) -> None:
    """What each stashes is ``factor`` times x; what it returns is x, or Down's output and ``added``."""
    module, x = kind(), torch.ones(3)
    for _ in range(2):
        with use_skips(SkipStore()) as store:
            y = module(x)
        assert torch.allclose(y, x if added is None else module.linear(x) + added)
        assert list(store.outgoing) == [A]
        assert torch.equal(store.outgoing[A], factor * x)


# Misuse: of a class that stashes 'a' and pops 'b'

FROM = "yield stash(name, tensor) or pop(name), and call super().forward(...) without 'yield from'"
DECLARED = "is not declared; the class has @skippable(stash=['a'], pop=['b'])"
UNUSED = "is declared but was not yielded; yield every declared name once, with None where there is no tensor"
TWICE = "was yielded twice; use a name for each tensor"
MISUSES: dict[str, tuple[list[Any], type[Exception], str]] = {
    "stash undeclared": ([stash("c", ONE)], SkipError, f"stash('c') {DECLARED}"),
    "pop undeclared": ([pop("c")], SkipError, f"pop('c') {DECLARED}"),
    "nothing": ([], SkipError, f"stash('a'), pop('b') {UNUSED}"),
    "no pop": ([stash("a", ONE)], SkipError, f"pop('b') {UNUSED}"),
    "stash twice": ([stash("a", None), stash("a", None)], SkipError, f"stash('a') {TWICE}"),
    "pop twice": ([pop("b"), pop("b")], SkipError, f"pop('b') {TWICE}"),
    "tensor": ([ONE], TypeError, f"yielded a value of type Tensor; {FROM}"),
}


@pytest.mark.parametrize(("commands", "kind", "message"), MISUSES.values(), ids=MISUSES.keys())
def test_misuse(commands: list[Any], kind: type[Exception], message: str) -> None:
    def forward(self: nn.Module, x: Tensor) -> Skips:
        yield from (command for command in commands)

    module = layer(forward, ["a"], ["b"])
    with use_skips(SkipStore({B: ONE})):
        with pytest.raises(kind) as raised:
            module(ONE)
        assert str(raised.value) == f"in the forward of Layer: {message}"
        assert raised.value.__context__ is None
        assert nn.Sequential(stashing("z"), popping("z"))(ONE).item() == 2, "the next one is not impaired"
