"""A socket that never blocks its users, and a doorbell for the one thread that waits for it."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from asyncpipe.errors import EdgeError
from asyncpipe.secured import MAC_BYTES, Piece, Secured

__all__ = ["HUNG_UP", "EdgeChannel", "ClosedByPeerError", "Memory", "StoppedError", "broken", "join_or", "memory_at"]

HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
ABORT_SECONDS = 1.0
JOIN_SECONDS = 5.0
_BUFFER_SIZE = 1 << 17
_MOST_BUFFERS = 1024
"""That the system takes at a time."""
_RECORD_BYTES = 1 << 18
"""Of a larger buffer, each so many bytes have a MAC of their own, and are sent while that of the next ones is made."""
_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


Memory = ctypes.c_char * (1 << 46)
"""What begins at an address. One type for all sizes: a type for each would be made anew, and kept."""


class StoppedError(Exception):
    """The thread that waited is to end."""


class ClosedByPeerError(Exception):
    """The peer has closed the edge in order."""


def broken(sender: int, receiver: int, peer: int, error: Exception) -> EdgeError:
    """The error of an edge that broke by ``error``, at the end that is not ``peer``."""
    how = f"broke: {type(error).__name__}: {error}"
    found = EdgeError(f"the edge {sender} > {receiver} to worker {peer} {how}", [peer], (sender, receiver))
    found.__cause__ = error
    return found


def join_or(abort: Callable[[], None], thread: threading.Thread) -> None:
    """Wait for the end of an edge's thread; one that is still there after a while is in a transport: ``abort`` it.

    A thread that waits for a device that hangs is left behind, to end with it. From the thread itself, nothing is done.
    """
    if thread is not threading.current_thread():
        thread.join(ABORT_SECONDS)
        if thread.is_alive():
            abort()
            thread.join(JOIN_SECONDS)


class EdgeChannel:
    """Bytes to and from one peer.

    ``write`` takes all it is given and sends what the system takes; the rest follows while a thread is in ``wait``. It
    is safe from any thread, and so are ``ring`` and ``stop``. Everything else is for one thread at a time. Errors are
    ``OSError``; the end of what the peer has sent is an ``EOFError``. Between hosts a MAC follows each buffer, so what
    is written as one buffer is read as one; a wrong one is a ``MacError``, and so is all that is read behind it.
    """

    def __init__(self, secured: Secured) -> None:
        connected, self._macs = secured
        connected.setblocking(False)
        self._socket = connected
        self.descriptor = connected.fileno()
        """The socket's, to wait for what comes elsewhere."""
        self.mac_bytes = 0 if self._macs is None else MAC_BYTES
        """What is received behind each buffer."""
        self._view = memoryview(bytearray(_BUFFER_SIZE))
        self._start = self._end = 0
        self._writing = threading.Lock()
        self._rest: list[memoryview] = []
        """What is still to be sent,"""
        self._owners: list[object] = []
        """and what has its memory."""
        self._bell, self._button = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._button, False)
        self._ringing = threading.Lock()
        self._open = True
        self._stopped = False
        self.is_waiting = False
        """Whether a thread is in ``wait``."""
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._poll.register(connected, 0)

    # Writing

    def write(self, buffers: Sequence[bytes | memoryview], owners: Sequence[object] = ()) -> bool:
        """Send ``buffers``; whether nothing waits to be sent. Nobody may write to them before they are.

        ``owners`` have the memory of ``buffers`` that have not, and live as long.
        """
        with self._writing:
            if not self._open:
                raise BrokenPipeError("the edge is closed")
            was_held_up = bool(self._rest)
            records = _records(buffers)
            for piece in records if self._macs is None else self._macs.sealed(records):
                self._rest.append(memoryview(piece))
                if len(piece) == _RECORD_BYTES and not was_held_up:
                    self._send()
            self._owners += owners
            return not was_held_up and self._send()

    def send_descriptor(self, descriptor: int) -> None:
        """Send a file descriptor to a peer on this machine, before anything else is sent."""
        socket.send_fds(self._socket, [b"!"], [descriptor])

    @property
    def is_held_up(self) -> bool:
        """Whether the system has not taken all that was written."""
        return bool(self._rest)

    def flush(self) -> bool:
        """Send what ``write`` has left; whether nothing is left."""
        with self._writing:
            return not self._rest or self._send()

    def _send(self) -> bool:
        try:
            sent = self._socket.sendmsg(self._rest[:_MOST_BUFFERS])
        except BlockingIOError:
            sent = 0
        whole = 0
        for buffer in self._rest:
            if buffer.nbytes > sent:
                break
            sent -= buffer.nbytes
            whole += 1
        del self._rest[:whole]
        if not self._rest:
            self._owners.clear()
            return True
        self._rest[0] = self._rest[0][sent:]
        self.ring()
        return False

    def drain(self, until: float) -> bool:
        """Send what ``write`` has left, also after ``stop``, before a monotonic time; whether nothing is left."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while not self.flush():
            if (seconds := until - time.monotonic()) <= 0:
                return False
            poll.poll(seconds * 1000)
        return True

    # Reading

    @property
    def buffered(self) -> int:
        """Bytes that have been received and not taken."""
        return self._end - self._start

    def fill(self) -> bool:
        """Receive what is there; ``False`` if there is nothing."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._view):
            kept = self.buffered
            self._view[:kept] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, kept
        try:
            count = self._socket.recv_into(self._view[self._end :])
        except BlockingIOError:
            return False
        if not count:
            raise EOFError("the other end has closed the connection")
        self._end += count
        return True

    def has(self, count: int) -> bool:
        """Whether the next ``count`` bytes are here; receives what is there of them."""
        if count > len(self._view):
            larger = memoryview(bytearray(count))
            larger[: self.buffered] = self._view[self._start : self._end]
            self._view, self._start, self._end = larger, 0, self.buffered
        while self.buffered < count:
            if not self.fill():
                return False
        return True

    def pop(self, count: int) -> memoryview:
        """The next buffer, of ``count`` bytes, which is here with its MAC; valid until ``fill`` is called."""
        found = self._take(count)
        if self._macs is not None:
            self._macs.check(found, self._take(MAC_BYTES))
        return found

    def _take(self, count: int) -> memoryview:
        start = self._start
        self._start += count
        return self._view[start : self._start]

    def peek(self, count: int) -> memoryview:
        """The next ``count`` bytes of what is buffered, which stay, whoever has sent them."""
        return self._view[self._start : self._start + count]

    def read(self, count: int, deadline: float | None = None) -> memoryview | bytes:
        """The next ``count`` bytes, which are waited for. At ``deadline``, a monotonic time: ``TimeoutError``."""
        if count + self.mac_bytes > len(self._view):
            large = memoryview(bytearray(count))
            self.read_into(large)
            return large
        self._await(count + self.mac_bytes, deadline)
        return self.pop(count)

    def _await(self, count: int, deadline: float | None = None) -> None:
        while self.buffered < count:
            if not self.fill():
                self._await_more(deadline)

    def _await_more(self, deadline: float | None) -> None:
        seconds = None if deadline is None else deadline - time.monotonic()
        if seconds is not None and seconds <= 0:
            raise TimeoutError
        self.wait(select.POLLIN, seconds)

    def read_into(self, target: memoryview) -> None:
        """Fill ``target``, without a copy of what is not here yet."""
        for record in _records([target]):
            done = min(self.buffered, len(record))
            record[:done] = self._take(done)
            while done < len(record):
                try:
                    count = self._socket.recv_into(record[done:])
                except BlockingIOError:
                    self.wait(select.POLLIN)
                    continue
                if not count:
                    raise EOFError("the other end has closed the connection")
                done += count
            if self._macs is not None:
                self._await(MAC_BYTES)
                self._macs.check(record, self._take(MAC_BYTES))

    def receive_descriptor(self, deadline: float | None = None) -> int:
        """What ``send_descriptor`` has sent; the caller's to close. As ``read``, before anything else is read."""
        while True:
            try:
                byte, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1, _FLAGS)
            except BlockingIOError:
                self._await_more(deadline)
                continue
            if not byte:
                raise EOFError("the other end has closed the connection")
            if not descriptors:
                raise ValueError("a descriptor was to come, and there is none")
            return descriptors[0]

    # Waiting

    def wait(self, events: int, seconds: float | None = None) -> int:
        """Wait for ``events`` of the socket or its end, and meanwhile send what is left. Returns what happened.

        That is 0 if somebody rang, or after ``seconds``. Raises ``StoppedError`` after ``stop``.
        """
        while True:
            self._poll.modify(self._socket, events | HUNG_UP | (select.POLLOUT if self._rest else 0))
            self.is_waiting = True
            try:
                happened = dict(self._poll.poll(None if seconds is None else max(0, seconds * 1000)))
            finally:
                self.is_waiting = False
            if happened.pop(self._bell, 0):
                os.read(self._bell, 4096)
                if self._stopped:
                    raise StoppedError
                return 0
            if not happened:
                return 0
            (seen,) = happened.values()
            if seen & select.POLLOUT:
                self.flush()
            if seen & (events | HUNG_UP):
                return seen

    def hung_up(self) -> bool:
        """Whether the peer is gone, or has closed the edge. What it has sent before may still be read."""
        poll = select.poll()
        with self._writing:
            if not self._open:
                return True
            poll.register(self._socket, HUNG_UP)
            return bool(poll.poll(0))

    def stop(self) -> None:
        """Let the thread that is in ``wait``, or will be, end."""
        self._stopped = True
        self.ring()

    def ring(self) -> None:
        """Let the thread that is in ``wait``, or will be, look around."""
        with self._ringing:
            if self._open:
                with suppress(BlockingIOError):  # It has not heard the bell for a long time, and will.
                    os.write(self._button, b"!")

    def close(self) -> None:
        """Close the socket and everything else; twice is once."""
        with self._writing, self._ringing:
            if not self._open:
                return
            self._open = False
            self._poll.unregister(self._socket)
            self._socket.close()
            os.close(self._bell)
            os.close(self._button)
            self._rest.clear()
            self._owners.clear()


def _records(buffers: Iterable[Piece]) -> Iterator[memoryview]:
    """The pieces that have a MAC each."""
    for buffer in buffers:
        for start in range(0, max(len(buffer), 1), _RECORD_BYTES):
            yield memoryview(buffer)[start : start + _RECORD_BYTES]


def memory_at(address: int, count: int) -> memoryview:
    """The ``count`` bytes of memory at ``address``, which the caller keeps alive."""
    return memoryview(Memory.from_address(address)).cast("B")[:count]
