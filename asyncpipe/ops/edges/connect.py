"""What the edges of a worker are made of: ``connect`` and ``Edges``."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from asyncpipe.core.checks import check_choice, check_positive
from asyncpipe.errors import EdgeError, OptionError
from asyncpipe.ops.edges.channel import EdgeChannel
from asyncpipe.ops.edges.connection import EdgeConnection
from asyncpipe.ops.edges.edge_in import EdgeIn
from asyncpipe.ops.edges.edge_out import EdgeOut
from asyncpipe.ops.edges.message import ReceivedMessage
from asyncpipe.ops.edges.nccl import Nccl
from asyncpipe.ops.edges.pair_store import PairStore
from asyncpipe.ops.edges.payload import Transport
from asyncpipe.ops.edges.shared_memory import HostMemory, SharedMemory
from asyncpipe.secured import Secured

__all__ = ["HOST_TRANSPORTS", "TRANSPORTS", "Edges", "Pair", "connect"]

Pair = tuple[int, int]
"""The workers that an edge leads from and to."""
HOST_TRANSPORTS: dict[str, Callable[[torch.device], Transport]] = {
    "shared_memory": SharedMemory,
    "connection": EdgeConnection,
}
"""Those for workers without an accelerator; given the worker's device."""
TRANSPORTS = {**HOST_TRANSPORTS, "host_memory": HostMemory, "nccl": Nccl}
"""All."""


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
    sockets: Mapping[Pair, Secured],
    *,
    on_message: Callable[[ReceivedMessage], None],
    on_broken: Callable[[EdgeError], None],
    window: int = 64,
    transport: str | Mapping[Pair, str] = "shared_memory",
    shared: bool = False,
    device: torch.device | None = None,
    timeout: float = 60.0,
) -> Edges:
    """This worker's edges over ``sockets``, made and running, when those at their other ends are made, too.

    ``me`` is this worker's number. The ``sockets`` are connected to the workers that all workers know by the same
    numbers, in one order for all, and with the same ``transport``; they belong to the edges from now on. ``on_message``
    and ``on_broken`` are called on the edges' threads: see ``EdgeIn`` and ``EdgeOut``. ``device`` is this worker's
    accelerator, if it has that alone. ``window`` is how many messages of an edge may wait to be released; that of the
    receiver counts. ``shared`` as for ``EdgeIn``.

    Raises ``OptionError`` for wrong arguments, and ``EdgeError``, which names the workers that have not made their
    ends within ``timeout`` seconds, or that went away. Nothing is left then.
    """
    deadline = time.monotonic() + timeout
    out: dict[int, EdgeOut] = {}
    into: dict[int, EdgeIn] = {}
    with ExitStack() as undo:
        for each in sockets.values():
            undo.callback(each.socket.close)
        by_pair = _transports(me, sockets, transport, device or torch.device("cpu"))
        check_positive("window", window)
        channels = {pair: EdgeChannel(connected) for pair, connected in sockets.items()}
        for channel in channels.values():
            undo.callback(channel.close)
        # In the agreed order on both sides: a transport may wait for the other end of this very edge.
        for pair, channel in channels.items():
            sender, receiver = pair
            with _making(me, pair, channel, deadline, timeout) as store:
                if sender == me:
                    payload_out = by_pair[pair].sender(store)
                    undo.callback(payload_out.close)
                    out[receiver] = EdgeOut(me, receiver, channel, payload_out, on_broken)
                else:
                    payload_in = by_pair[pair].receiver(store)
                    undo.callback(payload_in.close)
                    into[sender] = EdgeIn(me, sender, channel, payload_in, window, on_message, on_broken, shared=shared)
        undo.pop_all()
    edges = Edges(out, into)
    edges.start()
    return edges


def _transports(
    me: int, sockets: Mapping[Pair, Secured], transport: str | Mapping[Pair, str], device: torch.device
) -> dict[Pair, Transport]:
    """The transport of each edge; one for all that have the same name."""
    found: dict[str, Transport] = {}
    by_pair: dict[Pair, Transport] = {}
    for pair, connected in sockets.items():
        if pair[0] == pair[1] or min(pair) < 0 or me not in pair:
            raise OptionError(f"worker {me} cannot have an edge from worker {pair[0]} to worker {pair[1]}")
        name = transport if isinstance(transport, str) else transport[pair]
        check_choice("transport", name, list(TRANSPORTS))
        between_hosts = connected.socket.family != socket.AF_UNIX
        if between_hosts and connected.macs is None:
            raise OptionError(f"the edge {pair[0]} > {pair[1]} is by TCP without keys for its MACs; use one of meet")
        if name in ("shared_memory", "host_memory") and between_hosts:
            raise OptionError(
                f"the edge {pair[0]} > {pair[1]} is between machines, which have no shared memory; use connection"
            )
        if name not in found:
            found[name] = TRANSPORTS[name](device)
        by_pair[pair] = found[name]
    return by_pair


@contextmanager
def _making(me: int, pair: Pair, channel: EdgeChannel, deadline: float, timeout: float) -> Iterator[PairStore]:
    """What the two ends make an edge with. At the end of the block the other end has made it, too."""
    peer = pair[1] if pair[0] == me else pair[0]
    store = PairStore(channel, deadline)
    try:
        yield store
        store.finish()
    except EdgeError:
        raise
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        if isinstance(error, TimeoutError) or time.monotonic() >= deadline:
            raise EdgeError.not_there(me, [pair], timeout) from error
        raise EdgeError(f"worker {peer} went away while edges were connected: {error}", [peer]) from error
