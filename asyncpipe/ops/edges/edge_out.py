"""The sender's end of an edge."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from asyncpipe.core.hangs.reports import SenderReport
from asyncpipe.core.records.worker_notes import EdgeTraffic
from asyncpipe.errors import EdgeError, OptionError
from asyncpipe.ops.edges.channel import HUNG_UP, ClosedByPeerError, EdgeChannel, StoppedError, broken, join_or
from asyncpipe.ops.edges.message import EdgeMessage, MessageLayout, TensorLayout, layout_of
from asyncpipe.ops.edges.payload import PayloadOut, await_ready, inline
from asyncpipe.ops.edges.wire import CREDIT_SIZE, INLINE, STREAMED, Credit, EdgeFrameKind, Frame

__all__ = ["EdgeOut"]

KEPT_LAYOUTS = 1024
KEPT_META_BYTES = 1 << 16
"""Larger metas are sent each time, so that what the receiver keeps is bounded."""
LAST_SECONDS = 0.5
"""How long a closed edge goes on sending what it can send."""


class QueuedMessage(NamedTuple):
    message: EdgeMessage
    key: tuple[bytes, tuple[TensorLayout | None, ...]]
    layout: MessageLayout
    direct: bool


class EdgeOut:
    """Sends messages to one worker, in the order in which ``send`` is called.

    ``send`` is safe from any thread and never waits for the peer. Where nothing is in the way it sends at once;
    otherwise the edge's thread does: large tensors, tensors on accelerators, and what waits for credit. ``on_broken``
    is called once, on the edge's thread, if the peer is gone without having closed the edge; messages are dropped then.
    """

    def __init__(
        self, me: int, peer: int, channel: EdgeChannel, payload: PayloadOut, on_broken: Callable[[EdgeError], None]
    ) -> None:
        self.me = me
        self.peer = peer
        self._channel = channel
        self._payload = payload
        self._on_broken = on_broken
        self._queue: deque[QueuedMessage] = deque()
        self._epoch = 0
        self._closing = False
        self._until = 0.0
        self._turn = threading.Lock()
        """Held by the thread that sends; what follows is that thread's own."""
        self._layouts: dict[Any, tuple[int, MessageLayout]] = {}
        """By meta and layouts of tensors; the oldest goes first."""
        self._limit = 0
        self._has_heard_bye = False
        self._messages = self._bytes = 0
        self._starved_at: float | None = None
        self._waited = 0.0
        self._failure: Exception | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"asyncpipe edge {me}>{peer}", daemon=True)

    def start(self) -> None:
        """Start the thread. What was sent before is sent now."""
        self._thread.start()

    def send(self, message: EdgeMessage) -> None:
        """Send ``message``, soon. Never waits for the peer.

        Raises ``ArgumentTypeError`` for tensors that edges do not carry, ``OptionError`` for tensors of accelerators
        without ``ready``, and ``EdgeError`` if the edge was closed. A message of an old epoch is dropped, and so is one
        for a peer that is gone.
        """
        key = (message.meta, tuple(None if each is None else layout_of(each) for each in message.tensors))
        on_host = all(tensor is None or tensor.is_cpu for tensor in message.tensors)
        if not on_host and message.ready is None:
            raise OptionError("a message with tensors of an accelerator needs ready, the event behind what makes them")
        if self._closing:
            raise EdgeError(f"the edge {self.me} > {self.peer} is closed", [self.peer])
        _, layout = self._layouts.get(key) or (0, MessageLayout(*key))
        direct = on_host and message.ready is None and layout.size <= self._payload.direct_bytes
        self._queue.append(QueuedMessage(message, key, layout, direct))
        if not self._turn.acquire(blocking=False):
            # The thread that sends may have looked for the last time.
            self._channel.ring()
            return
        try:
            waits = 0 if self._over else self._pump(direct=True)
        except Exception as error:  # noqa: BLE001 - the edge's thread tells it; a task's has nothing to do with it
            self._failure, waits = error, True
        finally:
            self._turn.release()
        if self._over:
            self._drop_left()
        elif waits:
            self._channel.ring()

    def advance(self, epoch: int) -> None:
        """Begin ``epoch``: messages of older ones that were not sent are dropped."""
        self._epoch = max(self._epoch, epoch)
        self._channel.ring()

    def close(self) -> None:
        """Close the edge: the thread ends, nothing is left, the peer is told.

        What can be sent within half a second is sent, unless it would have to wait for the peer; the rest is dropped.

        A thread that waits for a device that hangs is left behind, to end with it.
        """
        if not self._closing:
            self._until = time.monotonic() + LAST_SECONDS
            self._closing = True
        self._channel.stop()
        if self._thread.ident is None:
            self._end()
        else:
            join_or(self._payload.abort, self._thread)

    def traffic(self) -> EdgeTraffic:
        """What was sent since the edge was made."""
        starved_at = self._starved_at
        waiting = 0.0 if starved_at is None else time.perf_counter() - starved_at
        return EdgeTraffic(self._messages, self._bytes, self._waited + waiting)

    def report(self, step: int) -> SenderReport:
        """Where it stands, and what it has still to send of ``step``. From any thread, whatever the others do."""
        queued = [each.message.header for each in self._queue.copy()]
        return SenderReport(
            self._messages,
            self._limit,
            frozenset((header.task, header.source) for header in queued if header.step == step),
            is_held_up=self._channel.is_held_up,
            is_over=self._over,
        )

    # For the thread that has the turn

    def _pump(self, *, direct: bool) -> int:
        """Send what can be sent. Returns the events that the edge's thread must wait for, or 0: nothing is to be sent.

        ``direct``: on the thread of a caller, which is not for large tensors.
        """
        while self._queue:
            if self._closing and time.monotonic() > self._until:
                self._queue.clear()
                break
            if not self._channel.flush():
                return select.POLLOUT
            queued = self._queue[0]
            if queued.message.header.epoch < self._epoch:
                self._queue.popleft()
                continue
            if self._messages >= self._limit:
                self._hear()
                if self._messages >= self._limit:
                    self._starved_at = self._starved_at or time.perf_counter()
                    return select.POLLIN
            if self._starved_at is not None:
                self._waited += time.perf_counter() - self._starved_at
                self._starved_at = None
            if direct and not queued.direct:
                return select.POLLOUT
            self._transmit(queued)
        return 0

    def _transmit(self, queued: QueuedMessage) -> None:
        message, layout = queued.message, queued.layout
        number, buffers = self._number(queued.key, layout)
        owners: list[Tensor] = []
        slot = INLINE
        memory: list[memoryview] = []
        if layout.size <= self._payload.inline_bytes:
            await_ready(message)
            memory, owners = inline(layout, message.tensors)
        else:
            self._hear()  # Memory that is free again comes first.
            slot = self._payload.place(layout, message)
            if news := self._payload.news:
                buffers += Frame(EdgeFrameKind.NEWS, slot=slot, size=len(news)).encode(), news
                self._payload.news = b""
        buffers.append(Frame(EdgeFrameKind.MESSAGE, number, slot, *message.header, layout.size).encode())
        self._queue.popleft()
        self._messages += 1
        self._bytes += layout.size
        self._channel.write([*buffers, *memory], owners)
        del owners, memory
        if slot == STREAMED:
            self._channel.ring()  # For ``settle``.

    def _number(self, key: Any, layout: MessageLayout) -> tuple[int, list[bytes]]:
        """The number of a layout, and the frame that says so, if the receiver does not know it."""
        known = self._layouts.get(key)
        if known is not None:
            return known[0], []
        if len(layout.meta) > KEPT_META_BYTES:
            number = KEPT_LAYOUTS
        else:
            number = len(self._layouts)
            if number == KEPT_LAYOUTS:
                number, _ = self._layouts.pop(next(iter(self._layouts)))
            self._layouts[key] = number, layout
        data = layout.encode()
        return number, [Frame(EdgeFrameKind.LAYOUT, number, size=len(data)).encode(), data]

    def _hear(self) -> None:
        """Take what the receiver has said."""
        channel = self._channel
        while True:
            while channel.buffered >= CREDIT_SIZE and not self._has_heard_bye:
                size = CREDIT_SIZE + Credit.decode(channel.peek(CREDIT_SIZE)).slots_size
                if channel.buffered < size + channel.mac_bytes:
                    break
                data = channel.pop(size)
                credit = Credit.decode(data)
                self._has_heard_bye = credit.kind == EdgeFrameKind.BYE
                self._payload.returned(credit.decode_slots(data[CREDIT_SIZE:]))
                self._limit = max(self._limit, credit.limit)
            if self._has_heard_bye:
                raise ClosedByPeerError
            if not channel.fill():
                return

    # The edge's thread

    def _run(self) -> None:
        error: Exception | None = None
        try:
            while True:
                with self._turn:
                    if self._failure is not None:
                        raise self._failure
                    events, begun = self._pump_all()
                self._payload.settle(begun)
                try:
                    happened = self._channel.wait(events)
                except StoppedError:
                    self._send_the_last()
                    break
                if happened & HUNG_UP:
                    with self._turn:
                        self._hear()
        except ClosedByPeerError:
            pass
        except Exception as caught:  # noqa: BLE001 - it is told
            error = caught
        if isinstance(error, OSError | RuntimeError) and self._has_said_bye():
            error = None
        self._end()
        if error is not None and not self._closing:
            self._on_broken(broken(self.me, self.peer, self.peer, error))

    def _pump_all(self) -> tuple[int, int]:
        """Send what can be sent. Returns the events to wait for, and how much of the payload to wait for before."""
        events = self._pump(direct=False)
        begun = self._payload.begun()
        # The receiver takes nothing whose header it does not have.
        return (events, begun) if not begun or self._channel.flush() else (events | select.POLLOUT, 0)

    def _send_the_last(self) -> None:
        events = select.POLLOUT
        while events & select.POLLOUT:
            with self._turn:
                events, begun = self._pump_all()
            self._payload.settle(begun)
            if not self._channel.drain(self._until):
                break

    def _has_said_bye(self) -> bool:
        """Whether the peer, which takes no more, has closed the edge in order."""
        try:
            with self._turn:
                self._hear()
        except ClosedByPeerError:
            return True
        except (OSError, EOFError, ValueError):
            pass
        return False

    def _end(self) -> None:
        with self._turn:
            if self._over:
                return
            self._over = True
            self._queue.clear()
            with suppress(OSError):
                self._channel.write([Frame(EdgeFrameKind.BYE).encode()])
            self._payload.close()
            self._channel.close()
        self._drop_left()

    def _drop_left(self) -> None:
        """Drop what was sent to an edge that is over. Who found the turn taken has left it to who had the turn."""
        while self._queue and self._turn.acquire(blocking=False):
            try:
                self._queue.clear()
            finally:
                self._turn.release()
