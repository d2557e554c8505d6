"""How the workers of a job find each other, and what they have then: ``connect`` and ``Edges``."""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from asyncpipe.core.checks import check_choice, check_positive
from asyncpipe.errors import EdgeError, OptionError
from asyncpipe.ops.edges.channel import EdgeChannel
from asyncpipe.ops.edges.edge_in import EdgeIn
from asyncpipe.ops.edges.edge_out import EdgeOut
from asyncpipe.ops.edges.gloo import Gloo
from asyncpipe.ops.edges.message import ReceivedMessage
from asyncpipe.ops.edges.nccl import Nccl
from asyncpipe.ops.edges.pair_store import PairStore
from asyncpipe.ops.edges.payload import Transport
from asyncpipe.ops.edges.shared_memory import SharedMemory

__all__ = ["HOST_TRANSPORTS", "TRANSPORTS", "Edges", "Pair", "connect"]

Pair = tuple[int, int]
"""The workers that an edge leads from and to."""
HOST_TRANSPORTS: dict[str, Callable[[torch.device], Transport]] = {"shared_memory": SharedMemory, "gloo": Gloo}
"""Those by which tensors arrive on the host, wherever they were; given the worker's device."""
TRANSPORTS = {**HOST_TRANSPORTS, "nccl": Nccl}
"""All."""
VERSION = 1
RETRY_SECONDS = 0.01
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 16


class Edges:
    """The edges of one worker: ``out`` by the worker that receives, ``into`` by the worker that sends."""

    def __init__(self, out: Mapping[int, EdgeOut], into: Mapping[int, EdgeIn]) -> None:
        self.out = out
        self.into = into

    def start(self) -> None:
        for incoming in self.into.values():
            incoming.start()
        for outgoing in self.out.values():
            outgoing.start()

    def advance(self, epoch: int) -> None:
        """Begin ``epoch`` on all edges; see ``EdgeIn.advance``."""
        for outgoing in self.out.values():
            outgoing.advance(epoch)
        for incoming in self.into.values():
            incoming.advance(epoch)

    def close(self) -> None:
        """Close all edges; see ``EdgeOut.close`` and ``EdgeIn.close``."""
        for outgoing in self.out.values():
            outgoing.close()
        for incoming in self.into.values():
            incoming.close()


def connect(
    me: int,
    pairs: Sequence[Pair],
    *,
    job: str,
    folder: str | os.PathLike[str],
    on_message: Callable[[ReceivedMessage], None],
    on_broken: Callable[[EdgeError], None],
    window: int | Mapping[Pair, int] = 64,
    transport: str | Mapping[Pair, str] = "shared_memory",
    shared: bool = False,
    device: torch.device | None = None,
    timeout: float = 60.0,
) -> Edges:
    """This worker's edges, connected and running, when the workers at their other ends have come.

    Every worker of the job calls it with the same ``pairs`` in the same order, the same ``transport`` and the same
    ``job``; ``me`` is this worker's number. ``folder`` must be this user's alone: who can write to it can be a worker.
    Nothing is left in it. ``on_message`` and ``on_broken`` are called on the edges' threads: see ``EdgeIn`` and
    ``EdgeOut``. ``device`` is this worker's accelerator, if it has one. ``window`` is how many messages of an edge may
    wait to be released; that of the receiver counts. ``shared`` as for ``EdgeIn``.

    Raises ``OptionError`` for wrong arguments, and ``EdgeError``, which names the workers that have not come within
    ``timeout`` seconds, or that refuse. Nothing is left then.
    """
    mine = _checked(me, pairs, transport)
    windows = {
        pair: check_positive("window", window if isinstance(window, int) else window[pair])
        for pair in mine
        if pair[1] == me
    }
    transports = {name: TRANSPORTS[name](device or torch.device("cpu")) for name in set(mine.values())}
    meeting = _Meeting(me, job, Path(folder), time.monotonic() + timeout, timeout)
    out: dict[int, EdgeOut] = {}
    into: dict[int, EdgeIn] = {}
    with ExitStack() as made, ExitStack() as undo:
        for each in transports.values():
            made.callback(each.close)
        channels = meeting.channels(mine)
        for channel in channels.values():
            undo.callback(channel.close)
        # In the agreed order on both sides: a transport may wait for the other end of this very edge.
        for pair in mine:
            sender, receiver = pair
            by = transports[mine[pair]]
            with meeting.making(pair, channels[pair]) as store:
                if sender == me:
                    payload_out = by.sender(store)
                    undo.callback(payload_out.close)
                    out[receiver] = EdgeOut(me, receiver, channels[pair], payload_out, on_broken)
                else:
                    payload_in = by.receiver(store)
                    undo.callback(payload_in.close)
                    into[sender] = EdgeIn(
                        me, sender, channels[pair], payload_in, windows[pair], on_message, on_broken, shared=shared
                    )
        undo.pop_all()
    edges = Edges(out, into)
    edges.start()
    return edges


def _checked(me: int, pairs: Sequence[Pair], transport: str | Mapping[Pair, str]) -> dict[Pair, str]:
    """The pairs of worker ``me``, with their transports."""
    wrong = [pair for pair in pairs if pair[0] == pair[1] or min(pair) < 0]
    if wrong or len(set(pairs)) < len(pairs):
        raise OptionError(f"pairs must be of two different workers, each pair once, got {list(pairs)}")
    found = {pair: transport if isinstance(transport, str) else transport[pair] for pair in pairs if me in pair}
    for each in found.values():
        check_choice("transport", each, list(TRANSPORTS))
    return found


class _Meeting:
    """Where the workers of a job find each other: a folder, with a socket for each worker until all have come."""

    def __init__(self, me: int, job: str, folder: Path, deadline: float, timeout: float) -> None:
        self._me = me
        self._job = job
        self._folder = folder
        self._deadline = deadline
        self._timeout = timeout

    def channels(self, pairs: Mapping[Pair, str]) -> dict[Pair, EdgeChannel]:
        """A connection for each pair. Senders dial; nobody waits for one peer before it has tried all."""
        if not pairs:
            return {}
        self._check_folder()
        with ExitStack() as undo:
            dialed: dict[Pair, socket.socket] = {}
            accepted: dict[Pair, socket.socket] = {}
            with self._listening(len(pairs)) as listener:
                while len(dialed) + len(accepted) < len(pairs):
                    self._check_folder()  # It is removed if the job is given up meanwhile.
                    for pair in [pair for pair in pairs if pair[0] == self._me and pair not in dialed]:
                        if (connection := self._dial(pair[1])) is not None:
                            dialed[pair] = undo.enter_context(connection)
                            with suppress(OSError):  # It has gone away, which its answer tells.
                                _send(connection, {"version": VERSION, "job": self._job, "pair": pair})
                    if select.select([listener], [], [], RETRY_SECONDS)[0]:
                        connection = undo.enter_context(listener.accept()[0])
                        if (greeted := self._greeted(connection, pairs)) is not None:
                            accepted[greeted] = connection
                    if self._seconds() <= 0:
                        self._miss([pair for pair in pairs if pair not in dialed and pair not in accepted])
            for (_, peer), connection in dialed.items():
                self._hear_answer(connection, peer)
            # The channels have duplicates, and what is here is closed.
            return {pair: EdgeChannel(connection.dup()) for pair, connection in (dialed | accepted).items()}

    @contextmanager
    def making(self, pair: Pair, channel: EdgeChannel) -> Iterator[PairStore]:
        """What the two ends make an edge with. At the end of the block the other end has made it, too."""
        peer = pair[1] if pair[0] == self._me else pair[0]
        store = PairStore(channel, self._deadline)
        try:
            yield store
            store.finish()
        except TimeoutError:
            self._miss([pair])
        except (OSError, EOFError, ValueError, RuntimeError) as error:
            if isinstance(error, EdgeError):
                raise
            if self._seconds() <= 0:
                self._miss([pair])
            raise EdgeError(f"worker {peer} went away while edges were connected: {error}", [peer]) from error

    def _check_folder(self) -> None:
        try:
            found = self._folder.stat()
        except OSError as error:
            raise EdgeError(f"the workers' folder {self._folder} is not there: {error}") from error
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise EdgeError(
                f"the workers' folder {self._folder} must belong to this user and be closed to others (mode 700): "
                f"who can write to it can be a worker; it has mode {stat.S_IMODE(found.st_mode):o}"
            )

    def _path(self, worker: int) -> str:
        return str(self._folder / str(worker))

    @contextmanager
    def _listening(self, backlog: int) -> Iterator[socket.socket]:
        path = self._path(self._me)
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(path)
            except OSError as error:
                raise EdgeError(
                    f"worker {self._me} cannot listen at {path}: {error}. The folder's name must be short (about 100 "
                    "letters), and new for each start of the job"
                ) from error
            try:
                listener.listen(backlog)
                yield listener
            finally:
                with suppress(FileNotFoundError):
                    Path(path).unlink()

    def _dial(self, peer: int) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._path(peer))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        return connection

    def _greeted(self, connection: socket.socket, pairs: Mapping[Pair, str]) -> Pair | None:
        """The pair that a worker which has dialed names. It is told what is wrong, if something is."""
        connection.settimeout(max(0.001, self._seconds()))
        try:
            greeting = _received(connection)
            pair: Pair = (greeting["pair"][0], greeting["pair"][1])
        except (OSError, EOFError, ValueError, LookupError, TypeError):
            return None  # It was no worker, or it has died; a worker that is missed is named in the end.
        error = None
        if (greeting.get("version"), greeting.get("job")) != (VERSION, self._job):
            error = f"worker {self._me} is of job {self._job!r} and version {VERSION}"
        elif pair not in pairs or pair[1] != self._me:
            error = f"worker {self._me} knows of no edge from {pair[0]} to {pair[1]}"
        with suppress(OSError):
            _send(connection, {"error": error})
        return None if error else pair

    def _hear_answer(self, connection: socket.socket, peer: int) -> None:
        connection.settimeout(max(0.001, self._seconds()))
        try:
            answer = _received(connection)
        except TimeoutError:
            self._miss([(self._me, peer)])
        except (OSError, EOFError, ValueError) as error:
            raise EdgeError(f"worker {peer} went away while edges were connected: {error}", [peer]) from error
        if answer["error"]:
            raise EdgeError(f"worker {peer} refuses the edge from worker {self._me}: {answer['error']}", [peer])

    def _seconds(self) -> float:
        return self._deadline - time.monotonic()

    def _miss(self, pairs: Sequence[Pair]) -> None:
        peers = sorted({sender if receiver == self._me else receiver for sender, receiver in pairs})
        names = ", ".join(f"worker {peer}" for peer in peers)
        edges = ", ".join(f"{sender} > {receiver}" for sender, receiver in pairs)
        raise EdgeError(f"{names} did not come within {self._timeout:g} s; waiting for the edges {edges}", peers)


def _send(connection: socket.socket, value: Mapping[str, Any]) -> None:
    data = json.dumps(value).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _received(connection: socket.socket) -> dict[str, Any]:
    """What ``_send`` has sent. Raises ``ValueError`` if it is nothing of the kind."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"a greeting of {length} bytes")
    value = json.loads(_exactly(connection, length))
    if not isinstance(value, dict):
        raise ValueError("a greeting that is no table")
    return value


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError("the connection was closed")
        data += more
    return data
