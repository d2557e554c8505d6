"""The store by which the two ends of an edge find each other in ``torch.distributed``: the edge's own socket."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from asyncpipe.ops.edges.channel import EdgeChannel
from asyncpipe.ops.edges.wire import HEADER_SIZE, EdgeFrameKind, Frame

__all__ = ["PairStore"]


class PairStore(Store):
    """Values of two ends, while an edge is made: what one sets, the other gets.

    It needs no port and no file, and who is at the other end is known. torch calls ``set``, ``get``, ``wait`` and
    ``check``, on the thread that makes the edge. What it asks for later, when messages use the socket, it does not get.
    ``TimeoutError`` is raised at ``deadline``, a monotonic time; ``EOFError`` or ``OSError`` if the peer goes away.
    """

    def __init__(self, channel: EdgeChannel, deadline: float) -> None:
        super().__init__()
        self.deadline = deadline
        self.channel = channel
        """The edge's."""
        self._values: dict[str, bytes] = {}
        self._is_made = False
        """The peer has said so, and is done with the store."""

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        name = key.encode()
        frame = Frame(EdgeFrameKind.VALUE, len(name), size=len(value))
        self._values[key] = value
        if not self._is_made:
            self.channel.write([frame.encode(), name, value])

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        while not self.check(keys):
            self._receive()

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def finish(self) -> None:
        """This end is made; wait until the other one is."""
        self.channel.write([Frame(EdgeFrameKind.MADE).encode()])
        while not self._is_made:
            self._receive()

    def _receive(self) -> None:
        if self._is_made:
            raise LookupError("the other end of the edge sets no more values")
        frame = Frame.decode(self.channel.read(HEADER_SIZE, self.deadline))
        if frame.kind == EdgeFrameKind.MADE:
            self._is_made = True
        elif frame.kind == EdgeFrameKind.VALUE:
            name = bytes(self.channel.read(frame.layout, self.deadline)).decode()
            self._values[name] = bytes(self.channel.read(frame.size, self.deadline))
        else:
            raise ValueError(f"a frame of kind {frame.kind} came while the edge was made")
