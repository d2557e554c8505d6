"""Messages over one connected socket, in both directions, large ones in pieces.

Each direction has two streams, an ordinary and an urgent one. Messages of a stream arrive in the order in which they
were sent. A message is cut into frames; after each frame, urgent messages go first. So a model of some hundred
megabytes delays a ping or an abort by what the operating system has taken of it. A second connection would do this as
well, but then there would be two losses of a connection, and no order of messages::

    frame:   kind (1 byte)  stream (1)  size (4)  then, by kind
      BEGIN    role (1)  number (8)  size of each part (8)      a message begins
      PIECE    bytes of its next part, at most FRAME_BYTES      it is complete when all its parts are

The parts of a message are the pickle and the buffers outside it. A piece is read into its place in the message: the
sender copies nothing, and the receiver once. Between hosts a MAC follows what has a fixed size, and another one the
rest of a frame (``asyncpipe/secured.py``): so a message is complete, and is unpickled, only if all its MACs were right.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from enum import IntEnum
from typing import Protocol

from asyncpipe.runtime.workers.packed import EMPTY, SMALLEST_OUT_OF_BAND, Packed
from asyncpipe.secured import MAC_BYTES, Piece, Secured

__all__ = ["Channel", "Receiver", "Role"]

FRAME_BYTES = 1 << 18
"""At a gigabyte a second, the time of one frame is a quarter of a millisecond."""
FRAMES_AT_ONCE = 4
"""How many are sent on the thread of who sends a message."""
ROOM = 1 << 21
"""Bytes that the operating system is to take before they are read, on one host: a mini-batch as a rule."""
READS_PER_TURN = FRAMES_PER_TURN = 32
"""How often a channel reads, or sends, before other work of its loop has its turn."""

_FRAME = struct.Struct("!BBI")
_BEGIN = struct.Struct("!BQ")
_SIZE = struct.Struct("!Q")


class Role(IntEnum):
    """What a message is. Its number ties an answer to what was asked, and a pong to its ping."""

    MESSAGE = 0
    ASK = 1
    ANSWER = 2
    FAILURE = 3
    LOG = 4
    READY = 5
    STOP = 6
    PING = 7
    PONG = 8
    QUERY = 9
    """Is answered as what is asked, but by the thread that answers pings."""


class _FrameKind(IntEnum):
    BEGIN = 0
    PIECE = 1


class Receiver(Protocol):
    """Who is told what arrives on a channel, on its loop. Must be quick and not raise."""

    def received(self, role: Role, number: int, packed: Packed) -> None:
        """A message is complete."""

    def closed(self, error: Exception) -> None:
        """The other side is gone (``OSError``), or has sent what is no message. Called once; not after ``close``."""


class Channel:
    """A connection between two processes that know each other. Send from any thread; ``loop``'s thread receives."""

    def __init__(self, secured: Secured, loop: asyncio.AbstractEventLoop, receiver: Receiver) -> None:
        """Made on the thread of ``loop``, which must have ``add_reader``. Owns the connection."""
        connected, self._macs = secured
        connected.setblocking(False)
        if connected.family == socket.AF_UNIX:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
        self._socket = connected
        self._loop = loop
        self._receiver = receiver
        self._parser = self._parse()
        self._wanted = next(self._parser)
        self.heard_at = time.perf_counter()
        """When something was read last."""
        self._lock = threading.Lock()
        """Guards what follows."""
        self._is_open = True
        self._frames: tuple[deque[Iterator[list[Piece]]], ...] = (deque(), deque())
        """The frames of the messages to be sent: urgent ones, others."""
        self._under_way: list[Piece] = []
        """What is left of a frame that was sent in part."""
        self._waits = False
        """Whether the loop's thread has been told to send what there is to send."""
        self._all_sent = threading.Event()
        self._all_sent.set()
        loop.add_reader(connected, self._read)

    def send(self, role: Role, number: int = 0, packed: Packed = EMPTY, *, urgent: bool = False) -> None:
        """Send a message; from any thread, never blocks. It is lost if the other side is gone, or the loop closed."""
        stream = 0 if urgent else 1
        with self._lock:
            if not self._is_open or self._loop.is_closed():
                return
            self._frames[stream].append(_frames(stream, role, number, packed.parts))
            # Nobody waits before it: what there is room for is sent here at once, which saves a change of threads.
            if not self._waits and not any(self._write() for _ in range(FRAMES_AT_ONCE)):
                self._waits = True
                self._all_sent.clear()
                self._loop.call_soon_threadsafe(self._await_writable)

    def flush(self, seconds: float) -> bool:
        """Wait until the operating system has taken all messages; false if it has not within ``seconds``."""
        return self._all_sent.wait(seconds)

    def drain(self) -> None:
        """Take in what has arrived. On the loop's thread, before ``close``, when the other side has ended."""
        while self._is_open and self._read():
            pass

    def close(self) -> None:
        """Close the connection. On the loop's thread; may be called again."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            for frames in self._frames:
                frames.clear()
            self._under_way.clear()
            self._all_sent.set()

    def _await_writable(self) -> None:
        with self._lock:
            if self._is_open:
                self._loop.add_writer(self._socket, self._go_on)

    def _go_on(self) -> None:
        for _ in range(FRAMES_PER_TURN):
            with self._lock:  # Not for all of them: somebody may wait to send.
                if not self._is_open:
                    return
                if self._write():
                    self._waits = False
                    self._all_sent.set()
                    self._loop.remove_writer(self._socket)
                    return

    def _write(self) -> bool:
        """Send a frame, or as much as there is room for; whether all is sent. With the lock."""
        if not self._under_way and not self._next_frame():
            return True
        try:
            sent = self._socket.sendmsg(self._under_way)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            # The other side is gone, which is noticed where it is read.
            for frames in self._frames:
                frames.clear()
            self._under_way = []
            return True
        self._under_way = list(_without(self._under_way, sent))
        return not self._under_way and not self._next_frame()

    def _next_frame(self) -> bool:
        """Take the next frame under way, an urgent one first; false if there is none."""
        for frames in self._frames:
            while frames:
                if (frame := next(frames[0], None)) is not None:
                    self._under_way = frame if self._macs is None else list(self._macs.sealed(frame))
                    return True
                frames.popleft()
        return False

    def _read(self) -> bool:
        """Read what has arrived, within limits; whether there may be more."""
        for _ in range(READS_PER_TURN):
            try:
                size = self._socket.recv_into(self._wanted)
                if not size:
                    raise ConnectionResetError("the other side has closed the connection")
                self._wanted = self._wanted[size:]
                self.heard_at = time.perf_counter()
                while not self._wanted:
                    self._wanted = next(self._parser)
                    if not self._is_open:  # By a receiver.
                        return False
            except (BlockingIOError, InterruptedError):
                return False
            except (OSError, ValueError, struct.error) as error:
                self.close()
                self._receiver.closed(error)
                return False
        return True

    def _parse(self) -> Generator[memoryview, None, None]:
        """Yields where the next bytes belong. Goes on when they have arrived."""
        header = bytearray(_FRAME.size)
        arriving: dict[int, _Arriving] = {}
        while True:
            yield from self._arrives(memoryview(header))
            kind, stream, size = _FRAME.unpack(header)
            if kind == _FrameKind.BEGIN:
                if stream in arriving:
                    raise ValueError("a message begins inside another one")
                begin = bytearray(size)
                yield from self._arrives(memoryview(begin))
                message = arriving[stream] = _Arriving(begin)
            elif kind == _FrameKind.PIECE and stream in arriving:
                message = arriving[stream]
                yield from self._arrives(message.place_of(size))
            else:
                raise ValueError(f"no frame begins with {header!r}")
            if message.is_complete():
                del arriving[stream]
                self._receiver.received(message.role, message.number, Packed(message.parts))
            del message  # An idle connection must not keep its last message.

    def _arrives(self, piece: memoryview) -> Generator[memoryview, None, None]:
        yield piece
        if self._macs is not None:
            mac = bytearray(MAC_BYTES)
            yield memoryview(mac)
            self._macs.check(piece, mac)


class _Arriving:
    """A message whose parts are being received."""

    def __init__(self, begin: bytearray) -> None:
        role, self.number = _BEGIN.unpack_from(begin)
        self.role = Role(role)
        sizes = [size for (size,) in _SIZE.iter_unpack(memoryview(begin)[_BEGIN.size :])]
        self.parts = [_memory(size) for size in sizes]
        self._missing = deque(part for part in self.parts if part)

    def place_of(self, size: int) -> memoryview:
        """Where the next piece, of ``size`` bytes, belongs."""
        part = self._missing[0]
        if not 0 < size <= len(part):
            raise ValueError(f"a piece of {size} bytes, where {len(part)} are missing")
        if size == len(part):
            self._missing.popleft()
        else:
            self._missing[0] = part[size:]
        return part[:size]

    def is_complete(self) -> bool:
        """Whether nothing is missing, once the last piece is read."""
        return not self._missing


def _memory(size: int) -> memoryview:
    """Large parts are mapped: nobody must fill them with zeros first, and tensors in them need not be copied to where
    vectors of the processor begin."""
    if size < SMALLEST_OUT_OF_BAND:
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _frames(stream: int, role: Role, number: int, parts: Sequence[memoryview]) -> Iterator[list[Piece]]:
    """The frames of a message, as many at a time as have ``FRAME_BYTES`` together: of each its header and the rest."""
    sizes = b"".join(_SIZE.pack(part.nbytes) for part in parts)
    begin = _BEGIN.pack(role, number) + sizes
    together: list[Piece] = [_FRAME.pack(_FrameKind.BEGIN, stream, len(begin)), begin]
    size = 0
    for part in parts:
        start = 0
        while start < part.nbytes:
            piece = part[start : start + FRAME_BYTES - size]
            together += _FRAME.pack(_FrameKind.PIECE, stream, piece.nbytes), piece
            start += piece.nbytes
            size += piece.nbytes
            if size == FRAME_BYTES:
                yield together
                together, size = [], 0
    if together:
        yield together


def _without(parts: Sequence[Piece], sent: int) -> Iterator[Piece]:
    """What is left of ``parts`` when the first ``sent`` bytes are gone."""
    for part in parts:
        if sent < len(part):
            yield memoryview(part)[sent:]
        sent = max(0, sent - len(part))
