"""What goes beside tensors from one worker to another: it arrives as it was, and what is read cannot run anything."""

from __future__ import annotations

import enum
import pickle
import struct
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.errors import StageError
from asyncpipe.ops.device.memory_layout import MemoryLayout
from asyncpipe.ops.model.descriptions import decode, encode
from asyncpipe.ops.model.microbatch import Packet

Point = namedtuple("Point", "x y")


class Typed(NamedTuple):
    a: Any
    b: Any = 1


@dataclass(frozen=True)
class Sample:
    ids: Any
    more: dict[str, Any] = field(default_factory=dict)

    class Inner(NamedTuple):
        value: Any


class Mode(enum.Enum):
    TRAIN = 1


TENSOR = torch.zeros(2, requires_grad=True)
PLAIN = [
    *(None, True, 0, -5, 2**64, -(2**200), 1.5, -0.0, float("nan"), float("-inf"), 1e-320),
    *(1j, complex(-0.0, float("nan")), "", "a\ud800é\x00", b"", b"\x00\xff\n"),
    *(torch.bfloat16, torch.float8_e4m3fn, torch.device("cuda:1"), torch.Size([2, 0])),
    *(slice(None, -1, 2), range(3, 9, 2), {1, 2}, frozenset([2.5]), int, {"a": (1, [2])}),
    MemoryLayout((2, 3), (1, 2), 1, False),
]


@pytest.mark.promise("Right results", "Containers and plain values arrive in another worker unchanged.")
@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    found = decode(encode(value))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@settings(max_examples=50)
@given(st.tuples(st.floats(width=64), st.integers(), st.text(), st.binary()))
def test_no_bit_of_a_number_or_a_text_is_lost(values: tuple[float, int, str, bytes]) -> None:
    found = decode(encode(values))
    assert struct.pack("d", found[0]) == struct.pack("d", values[0])
    assert found[1:] == values[1:]


@pytest.mark.promise("Right results", "Containers and plain values arrive in another worker unchanged.")
@pytest.mark.parametrize(
    "value",
    [
        TENSOR,
        TENSOR.detach(),
        (TENSOR, 1, None),
        {"a": [TENSOR, 2.5], 3: "b"},
        OrderedDict(a=TENSOR),
        defaultdict(list, a=TENSOR),
        deque([TENSOR], 3),
        Point(TENSOR, 1),
        Typed(TENSOR),
        Sample(TENSOR, {"a": Sample.Inner(TENSOR)}),
        torch.topk(torch.zeros(3), 2),
        [1, "no tensor"],
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_arrive_as_they_were(value: Any) -> None:
    sent = Packet(value)
    came = Packet.from_shell(sent.shell(), sent.tensors)
    found = came.rebuild(sent.tensors)
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    assert (came.count, came.wants_gradient) == (sent.count, sent.wants_gradient)


def _local() -> type:
    @dataclass
    class Local:
        value: int

    return Local


@pytest.mark.promise("Refused, not wrong", "What workers cannot send each other is refused by the name of its class.")
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Mode.TRAIN, "sends a .*test_descriptions.Mode, which edges do not carry; send tensors, numbers, strings"),
        (object, "sends a builtins.type, which edges do not carry"),
        (_local()(1), r"<locals>.Local, no container that another worker knows; define it in a module"),
    ],
    ids=["enum", "class", "local"],
)
def test_what_cannot_be_sent_is_refused_by_name(value: Any, says: str) -> None:
    with pytest.raises(StageError, match=says):
        Packet((TENSOR, value)).shell()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.promise("Security", "Nothing that arrives on an edge is unpickled, imported or called.")
def test_nothing_is_run_or_imported_by_what_is_read(tmp_path: Path) -> None:
    """A pickle, and descriptions that name what is no container, or is not imported."""
    before = set(sys.modules)
    bomb = tmp_path / "bomb"
    for text in (
        pickle.dumps(Bomb(bomb)),
        b'["Structure","os","system",null]',
        b'["Structure","pathlib","Path",null]',
        b'["Structure","subprocess","Popen",["touch"],null]',
        b'["Structure","antigravity","geohash",null]',
        b'["Structure","transformers","BertModel",null]',
        b'["type","object"]',
        b'["dtype","load"]',
        b'["eval","1"]',
        b"[" * 100_000,
        "[]".encode("utf-16"),
    ):
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it is, it breaks the edge
            decode(text)
    assert set(sys.modules) == before
    assert not bomb.exists()
