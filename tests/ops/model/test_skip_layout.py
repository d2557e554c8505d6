"""Skips of a whole model: stores, namespaces, the list of all mismatches, and which skips go from stage to stage."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.errors import OptionError, SkipError
from asyncpipe.ops.model.skip_layout import skip_layout, verify_skippables
from asyncpipe.ops.model.skips import (
    Namespace,
    SkipKey,
    SkipStore,
    pop,
    skippable,
    stash,
    use_skips,
)

ONE = torch.ones(())
A: SkipKey = (None, "a")


def kind(name: str, stashes: Iterable[str] = (), pops: Iterable[str] = (), power: int = 1) -> Any:
    """A class of layers of this name: they stash their input, add to it what they pop, and return a power of it."""

    def forward(self: nn.Module, x: Tensor) -> Generator[Any, Any, Any]:
        for skip in stashes:
            yield stash(skip, x)
        for skip in pops:
            x = x + (yield pop(skip))
        return x**power

    return skippable(stashes, pops)(type(name, (nn.Module,), {"forward": forward}))


Down, Up, Both = kind("Down", ["a"], power=2), kind("Up", pops=["a"], power=3), kind("Layer", ["a"], ["a"])
Wider = type("Wider", (Down,), {})


def stashing(*names: str) -> Any:
    return kind("Layer", names)()


def popping(*names: str) -> Any:
    return kind("Layer", pops=names)()


# Isolation


def test_isolated_names_do_not_meet() -> None:
    left, right = Namespace(), Namespace()
    give, take = stashing("a", "b"), popping("a", "b")
    assert give.isolate(left) is give
    twin = copy.copy(take.isolate(left)).isolate(right, only=[])
    give_right, take = stashing("a", "b").isolate(left).isolate(right), take.isolate(right, only=["b"])
    take.isolate(right, only=["a"])
    model = nn.Sequential(give, nn.Softplus(), give_right, take, twin)
    assert list(skip_layout([model])) == [(left, "a"), (left, "b"), (right, "a"), (right, "b")]
    assert torch.allclose(model(ONE), 3 * nn.Softplus()(ONE) + 2)
    part = stashing("a", "b").isolate(left, only=["b"])
    with use_skips(SkipStore()) as store:
        part(ONE)
    assert list(store.outgoing) == [A, (left, "b")]
    with pytest.raises(SkipError, match=r"skip 'a' in Namespace\(id="):
        twin(ONE)


def test_what_cannot_be_isolated() -> None:
    with pytest.raises(OptionError) as raised:
        kind("Layer", ["b", "a"], ["c"])().isolate(Namespace(), only=["a", "x", "y"])
    assert str(raised.value) == "Layer cannot isolate ['x', 'y']; the names that it declares: ['b', 'a', 'c']"
    with pytest.raises(OptionError, match=r"isolated in a Namespace\(\), got 'left'"):
        Down().isolate("left")
    with pytest.raises(OptionError, match="only must be a list of names"):
        Down().isolate(Namespace(), only="a")


# Verifying

FIX = (
    "Every skip needs one stash and one pop in a later layer; where a name is used by several pairs, give each pair "
    "its own with isolate(Namespace())."
)
UNPOPPED, UNSTASHED = "which no layer after it pops", "which no layer before it stashes"
SPACE = Namespace()
MISMATCHES: dict[str, tuple[Iterable[nn.Module], list[str]]] = {
    "never popped": ([Down()], [f"0 (Down) stashes skip 'a', {UNPOPPED}"]),
    "wrong order": ([Up(), Down()], [f"0 (Up) pops skip 'a', {UNSTASHED}", f"1 (Down) stashes skip 'a', {UNPOPPED}"]),
    "stashed twice": (nn.Sequential(Down(), Wider(), Up()), ["1 (Wider) stashes skip 'a', as layer 0 (Down) does"]),
    "both": ([Down(), Both(), Up()], ["1 (Layer) both stashes and pops skip 'a'"]),
    "inside a layer": (nn.Sequential(nn.Sequential(nn.ReLU(), Down())), [f"0.1 (Down) stashes skip 'a', {UNPOPPED}"]),
    "namespace": (
        [Down().isolate(SPACE), Up()],
        [f"0 (Down) stashes skip 'a' in {SPACE!r}, {UNPOPPED}", f"1 (Up) pops skip 'a', {UNSTASHED}"],
    ),
    "all at once": (
        nn.ModuleDict({"x": stashing("a", "b"), "y": Both(), "z": Down(), "last": popping("c", "d")}).values(),
        [
            f"0 (Layer) stashes skip 'a', {UNPOPPED}",
            f"0 (Layer) stashes skip 'b', {UNPOPPED}",
            "1 (Layer) both stashes and pops skip 'a'",
            "2 (Down) stashes skip 'a', as layer 0 (Layer) does",
            f"3 (Layer) pops skip 'c', {UNSTASHED}",
            f"3 (Layer) pops skip 'd', {UNSTASHED}",
        ],
    ),
}


@pytest.mark.parametrize(("model", "lines"), MISMATCHES.values(), ids=MISMATCHES.keys())
def test_every_mismatch_is_listed(model: Iterable[nn.Module], lines: list[str]) -> None:
    with pytest.raises(TypeError) as raised:
        verify_skippables(model)
    expected = ["stashes and pops do not match:", *(f"  layer {line}" for line in lines), FIX]
    assert str(raised.value).splitlines() == expected
