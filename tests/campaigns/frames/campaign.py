"""Frames that somebody on the path between two hosts has changed, and what the real ends make of them.

Each case is one changed frame, before, in or after the handshake. Every good frame before it must arrive, and nothing
behind it; the end that receives must tell an error; nothing may be unpickled but good messages of control connections.
Behind each hundred cases the same process must still serve good connections.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import struct
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from asyncpipe.errors import EdgeError
from asyncpipe.ops.device.memory_layout import MemoryLayout
from asyncpipe.ops.edges.connect import connect
from asyncpipe.ops.edges.message import EdgeHeader, EdgeMessage, MessageLayout, ReceivedMessage, layout_of
from asyncpipe.ops.edges.wire import EdgeFrameKind, Frame, encode_credit
from asyncpipe.ops.model.descriptions import decode, encode
from asyncpipe.ops.model.nested import flatten, rebuild
from asyncpipe.runtime.portal import Portal
from asyncpipe.runtime.workers import packed as packed_module
from asyncpipe.runtime.workers.channel import Channel, Role, _frames
from asyncpipe.runtime.workers.door import Door
from asyncpipe.runtime.workers.handshake import GREETING, _digest, introduce, let_in, receive_values
from asyncpipe.runtime.workers.meeting import meet
from asyncpipe.runtime.workers.packed import Packed, pack, unpack
from asyncpipe.secured import Piece, Secured
from tests.campaigns.frames.wires import MUTATIONS, Canary, Changed, Keys, bomb, forged, mutated, pair, sealed
from tests.campaigns.harness import OPTIONS, Campaign, Verdict

__all__ = ["CAMPAIGN", "TARGETS", "run_case"]

SECONDS = 20.0
SECRET, TOKEN = b"s" * 32, b"t" * 16
AT_ONCE = 100


class _Unpickled:
    """How often something is unpickled in this process."""

    def __init__(self, stack: ExitStack) -> None:
        self.times = 0
        load = packed_module._MessageUnpickler.load

        def counted(unpickler: Any) -> Any:
            self.times += 1
            return load(unpickler)

        def refused(*args: Any, **options: Any) -> Any:
            self.times += 1
            raise AssertionError("something is unpickled")

        stack.enter_context(patch.object(packed_module._MessageUnpickler, "load", counted))
        for name in ("load", "loads"):
            stack.enter_context(patch.object(pickle, name, refused))


def _messages(chance: Random) -> list[EdgeMessage]:
    """Some that an edge carries in one frame each, besides that of their layout."""
    tensors = [torch.randn(chance.choice([1, 3, 300])) for _ in range(3)]
    return [
        EdgeMessage(EdgeHeader(0, 7, task, task + 1), chance.choices(tensors, k=chance.randint(0, 3)), encode(task))
        for task in range(chance.randint(1, 3))
    ]


def _sent(messages: list[EdgeMessage]) -> Iterator[list[bytes]]:
    """The frames of an edge, which an end sends that is made, and closed in order."""
    yield [Frame(EdgeFrameKind.MADE).encode()]
    for number, message in enumerate(messages):
        layout = MessageLayout(message.meta, tuple(layout_of(each) for each in message.tensors if each is not None))
        data = layout.encode()
        yield [Frame(EdgeFrameKind.LAYOUT, number, size=len(data)).encode(), data]
        memory = [each.numpy().tobytes() for each in message.tensors if each is not None]
        yield [Frame(EdgeFrameKind.MESSAGE, number, 0, *message.header, layout.size).encode(), *memory]
    yield [Frame(EdgeFrameKind.BYE).encode()]


class Case:
    """One changed frame, and the ends that are open meanwhile."""

    def __init__(self, seed: int, stack: ExitStack) -> None:
        self.chance = Random(seed)
        self.how = self.chance.choice(list(MUTATIONS))
        self.target = self.chance.choice(list(TARGETS))
        self.expected_pickles = 0
        self._stack = stack

    def received(self, frames: Iterable[Sequence[Piece]], echo: Iterable[Sequence[Piece]]) -> tuple[Secured, Changed]:
        """The receiver's end of a connection, on which everything has arrived; ``echo`` is what it has sent itself."""
        chance, keys, other = self.chance, Keys.drawn(self.chance), Keys.drawn(self.chance)
        sent = list(frames)
        changed = mutated(
            chance, self.how, sealed(sent, keys.ours), sealed(sent, other.ours), sealed(echo, keys.theirs)
        )
        return Secured(self.connected(changed.data), keys.theirs), changed

    def connected(self, data: bytes) -> socket.socket:
        """An end to which ``data`` has come, and nothing will come any more."""
        here, there = pair()
        self._stack.enter_context(here)
        self._stack.enter_context(there)
        here.sendall(data)
        here.shutdown(socket.SHUT_WR)
        there.setblocking(False)
        return there


def _same(got: object, good: object) -> str:
    return "" if got == good else f"{got} was accepted, and {good} was good"


def _edge_in(case: Case) -> str:
    """The receiver's end of an edge."""
    messages = _messages(case.chance)
    echo = [[Frame(EdgeFrameKind.MADE).encode()], [encode_credit(64, ())]]
    secured, changed = case.received(_sent(messages), echo)
    arrived: SimpleQueue[ReceivedMessage] = SimpleQueue()
    broken: SimpleQueue[EdgeError] = SimpleQueue()
    callbacks = {"on_message": arrived.put, "on_broken": broken.put}
    try:
        edges = connect(1, {(0, 1): secured}, transport="connection", timeout=SECONDS, **callbacks)
    except EdgeError:
        return _same(0, changed.good)
    edges.into[0]._thread.join(SECONDS)
    edges.close()
    if broken.empty():
        return "no error was told"
    got = [arrived.get() for _ in range(arrived.qsize())]
    return _same([_shown(each) for each in got], [_shown(each) for each in messages[: (changed.good - 1) // 2]])


def _shown(message: EdgeMessage) -> tuple[EdgeHeader, bytes, list[list[float]]]:
    return message.header, message.meta, [each.tolist() for each in message.tensors if each is not None]


def _edge_out(case: Case) -> str:
    """The sender's end of an edge, to which credits come."""
    limits = sorted(case.chance.sample(range(1, 8), 3))
    frames = [[Frame(EdgeFrameKind.MADE).encode()], *([encode_credit(limit, ())] for limit in limits)]
    secured, changed = case.received(
        [*frames, [encode_credit(0, (), EdgeFrameKind.BYE)]], _sent(_messages(case.chance))
    )
    broken: SimpleQueue[EdgeError] = SimpleQueue()
    callbacks: dict[str, Any] = {"on_message": lambda message: None, "on_broken": broken.put}
    try:
        edges = connect(0, {(0, 1): secured}, transport="connection", timeout=SECONDS, **callbacks)
    except EdgeError:
        return _same(0, changed.good)
    for task in range(9):
        edges.out[1].send(EdgeMessage(EdgeHeader(0, 7, task, 0)))
    edges.out[1]._thread.join(SECONDS)
    edges.close()
    if broken.empty():
        return "no error was told"
    limit = edges.out[1].report(7).limit
    return _same(limit, [0, *limits][changed.good - 1])


class _Taken:
    """What a control connection has brought, unpickled as its ends do."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.closed_by: SimpleQueue[Exception] = SimpleQueue()

    def received(self, role: Role, number: int, packed: Packed) -> None:
        self.messages.append(unpack(packed, lambda name: None))

    def closed(self, error: Exception) -> None:
        self.closed_by.put(error)


def _control(case: Case) -> str:
    """An end of a control connection. All its loops are alike, so each case has one of its own."""
    messages = [("message", number, case.chance.randbytes(case.chance.choice([0, 9, 300]))) for number in range(3)]
    frames = [_control_frame(number, message) for number, message in enumerate(messages)]
    secured, changed = case.received(frames, [_control_frame(0, Canary())])
    taken = _Taken()
    portal = Portal()
    portal.call(_open_channel(secured, taken))
    taken.closed_by.get(timeout=SECONDS)
    portal.close()
    portal.join()
    case.expected_pickles = changed.good
    return _same(taken.messages, messages[: changed.good])


def _control_frame(number: int, message: object) -> list[Piece]:
    return [piece for each in _frames(1, Role.MESSAGE, number, pack(message).parts) for piece in each]


async def _open_channel(secured: Secured, taken: _Taken) -> Channel:
    return Channel(secured, asyncio.get_running_loop(), taken)


def _greeting(case: Case) -> str:
    """What follows the handshake before an edge is made."""
    values = [{"version": 3, "job": "job", "number": number} for number in range(3)]
    frames = [[struct.pack("<I", len(data := json.dumps(each).encode())), data] for each in values]
    secured, changed = case.received(frames, frames)
    got = []

    async def receive() -> None:
        while True:
            got.append(await receive_values(secured))

    with suppress(OSError, ValueError):
        asyncio.run(receive())
    return _same(got, values[: changed.good])


def _handshake(case: Case) -> str:
    """Either end, before it knows the other one: all challenges are known before, but not to it."""
    chance = case.chance
    role = chance.choice([b"worker", b"controller"])
    own, other, third = (chance.randbytes(32) for _ in range(3))

    def shown(challenge: bytes, token: bytes, greeting: bytes = GREETING) -> list[bytes]:
        if role == b"worker":  # It shows itself to the controller, which has given it its own challenge.
            return [token, challenge, _digest(SECRET, role, own, challenge, token)]
        return [greeting, challenge, _digest(SECRET, role, challenge, own, token)]

    echo = _digest(SECRET, b"controller" if role == b"worker" else b"worker", own, other, TOKEN)
    changed = mutated(
        chance, case.how, shown(other, TOKEN), shown(third, bytes(16), b"asyncpipe workers 1\n"), [GREETING, own, echo]
    )
    if len(changed.data) >= len(b"".join(shown(other, TOKEN))) and changed.good == 3:
        return "the case changes nothing"
    end = case.connected(changed.data)
    meets: Coroutine[Any, Any, object] = let_in(end, SECRET) if role == b"worker" else introduce(end, SECRET, TOKEN)
    with patch("os.urandom", lambda size: own):
        try:
            asyncio.run(meets)
        except OSError:
            return ""
    return "a stranger is let in"


def _description(case: Case) -> str:
    """What an edge of one machine brings beside tensors: it has no MAC, and holds no code."""
    chance = case.chance
    structures = [None, flatten((1, {"a": 2}))[1], flatten(_LAYOUT)[1], flatten(deque([1], 2))[1]]
    values = [(chance.choice(structures), [None, (chance.random(),), (b"x",)], [True]), ((1, _LAYOUT), {"a": "b"})]
    frames = [encode(value) for value in chance.sample(values, 2)]
    text = mutated(chance, case.how, frames, [bomb(), bomb()], [forged(chance)]).data
    before = set(sys.modules)
    with suppress(Exception):
        structure, rest, _ = decode(text)
        rebuild(structure, rest)
    return _same(set(sys.modules) - before, set())


_LAYOUT = MemoryLayout((2, 3), (1, 2), 1, False)
TARGETS: dict[str, Callable[[Case], str]] = {
    "edge, receiver": _edge_in,
    "edge, sender": _edge_out,
    "control": _control,
    "greeting": _greeting,
    "handshake": _handshake,
    "description": _description,
}


def run_case(seed: int) -> Verdict:
    """What became of one changed frame."""
    with ExitStack() as stack:
        unpickled = _Unpickled(stack)
        case = Case(seed, stack)
        told = TARGETS[case.target](case)
        if not told and unpickled.times != case.expected_pickles:
            told = f"{unpickled.times} messages were unpickled, and {case.expected_pickles} were good"
    if not told and Canary.path.exists():
        told = "a pickle was run"
    label = f"{case.target}: {case.how}"
    return Verdict("accepted", f"{label}: {told}") if told else Verdict("right", label=label)


def still_serves() -> str:
    """Whether this process has good edges and control connections."""
    door, found = Door(1, host="127.0.0.1"), {}
    arrived: SimpleQueue[ReceivedMessage] = SimpleQueue()

    def begin(me: int, door: Door) -> None:
        addresses = {} if door.remote else {1: there}
        sockets = meet(me, [(0, 1)], door, addresses, job="job", secret=SECRET, timeout=SECONDS)
        found[me] = connect(
            me, sockets, transport="connection", on_message=arrived.put, on_broken=print, timeout=SECONDS
        )

    assert door.remote is not None
    there = door.remote
    receiver = threading.Thread(target=begin, args=(1, door))
    receiver.start()
    begin(0, Door(0))
    receiver.join()
    (message,) = [EdgeMessage(EdgeHeader(0, 7, 1, 2), (torch.randn(1 << 18),), b"meta")]
    found[0].out[1].send(message)
    got = arrived.get(timeout=SECONDS)
    for edges in found.values():
        edges.close()
    return "" if _shown(got) == _shown(message) else "a good message arrives otherwise"


def _judged(seeds: Sequence[int]) -> Iterator[Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        Canary.path = Path(folder) / "canary"
        yield from map(run_case, seeds[:-1])
        last = run_case(seeds[-1])
        yield last if last.is_finding or not (told := still_serves()) else Verdict("lost", told)


CAMPAIGN = Campaign(
    "frames",
    lambda run: run.judge(run.chunks(AT_ONCE), _judged, 60 + SECONDS),
    {"cases": (20_000, "how many")} | {name: OPTIONS[name] for name in ("processes", "case", "here")},
)
