"""Nested values: leaves and structure of containers, and objects that hold tensors out of sight."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_unflatten

from asyncpipe.errors import BatchError, StageError
from asyncpipe.ops.model.nested import flatten, places, rebuild

T = TypeVar("T")


@dataclasses.dataclass
class Plain:
    hidden: Tensor
    name: str = "plain"
    count: int = dataclasses.field(default=3, init=False)
    shared: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.later = self.hidden + 1


@dataclasses.dataclass(frozen=True)
class Frozen(Generic[T]):
    inner: Any
    mask: Tensor | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class Slotted:
    first: Tensor
    second: Any
    third: Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(kw_only=True)
class Derived(Plain):
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Named(NamedTuple):
    first: Any
    second: Any = None


def tensor(value: float = 0.0) -> Tensor:
    return torch.full((2,), value)


VALUES = {
    "tensor": tensor(),
    "none": None,
    "tuple": (tensor(), [tensor(1), 3], ()),
    "dict": {"b": tensor(), "a": {"c": 1}},
    "ordered": OrderedDict(b=tensor(), a=None),
    "default": defaultdict(list, a=[tensor()]),
    "deque": deque([tensor(), 1], maxlen=4),
    "named": Named(tensor(), Named(1, tensor())),
    "old named": namedtuple("Old", "x y")(tensor(), 2),
    "maximum": torch.zeros(2, 2).max(dim=0),
    "packed": pack_padded_sequence(torch.zeros(2, 3), torch.tensor([3, 2]), batch_first=True),
}


@pytest.mark.promise(
    "Right results", "Tensors in containers and dataclasses travel between stages with their gradients."
)
@pytest.mark.parametrize("name", VALUES)
def test_containers_are_those_of_torch(name: str) -> None:
    value = VALUES[name]
    leaves, structure = flatten(value)
    theirs, spec = tree_flatten(value)
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in theirs]
    made = rebuild(structure, leaves)
    assert type(made) is type(value)
    assert tree_flatten(made)[1] == spec
    assert flatten(copy.copy(value))[1] == structure
    assert flatten((value, 1))[1] != structure
    assert repr(made) == repr(tree_unflatten(theirs, spec))


@pytest.mark.promise(
    "Right results", "Tensors in containers and dataclasses travel between stages with their gradients."
)
@pytest.mark.parametrize(
    ("value", "where"),
    [
        (Plain(tensor()), [".hidden", ".name", ".count", ".later"]),
        (Frozen[int]([Plain(tensor())], tensor()), [".inner[0].hidden", ".inner[0].name", ".inner[0].count"]),
        (Slotted(tensor(), {"a": Named(tensor(), Frozen(None))}), [".first", ".second['a'].first"]),
        (Derived(tensor(), extra={"more": (tensor(),)}), [".hidden", ".name", ".extra['more'][0]", ".count", ".later"]),
    ],
    ids=["plain", "frozen", "slotted", "derived"],
)
def test_dataclasses(value: Any, where: list[str]) -> None:
    """With defaults, without ``__init__``: what that has made travels, too. What has no value stays so."""
    leaves, structure = flatten(value)
    assert set(where) <= set(places(structure))
    doubled = rebuild(structure, [leaf * 2 if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    assert type(doubled) is type(value)
    assert flatten(doubled)[1] == structure
    assert type(value) not in SUPPORTED_NODES
    assert not hasattr(doubled, "third")


class InSlots:
    __slots__ = ("_a", "b")


def in_slots() -> InSlots:
    made = InSlots()
    made.b = {"deep": [tensor()]}
    return made


class Dictionary(dict[str, Any]):
    pass


@dataclasses.dataclass
class OfDictionary(Dictionary):
    field: Any


@pytest.mark.promise("Refused, not wrong", "An object that hides tensors is refused by the name of its class.")
@pytest.mark.parametrize(
    "value",
    [
        SimpleNamespace(x=tensor()),
        SimpleNamespace(layers=[SimpleNamespace(keys=tensor())]),
        in_slots(),
        Dictionary(x=tensor()),
        OfDictionary(tensor()),
        UserDict(x=tensor()),
        {tensor()},
        torch.distributions.Normal(tensor(), tensor(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_that_holds_tensors_is_refused(value: Any) -> None:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    with pytest.raises(StageError) as raised:
        flatten(({"x": value}, tensor()))
    assert str(raised.value) == (
        f"a value of the class {name} holds tensors that a pipeline cannot see; use a dataclass, a named tuple or a "
        "dict in its place, or register the class with torch.utils._pytree.register_pytree_node"
    )
    with pytest.raises(BatchError, match="holds tensors"):
        flatten(value, error=BatchError)
    assert flatten(value, wraps=(type(value),)) == ([value], None)


@pytest.mark.promise("Right results", "Objects without tensors pass from stage to stage as they are.")
def test_what_holds_no_tensor_is_a_leaf() -> None:
    cyclic = SimpleNamespace(name="a", sizes=[1, 2], kinds={int}, f=len)
    cyclic.me = cyclic
    for value in (cyclic, object(), Plain, nn.Linear(2, 2), lambda: 0, torch.Generator(), range(3), SimpleNamespace):
        assert flatten([value])[0] == [value]
