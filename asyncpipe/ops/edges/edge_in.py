"""The receiver's end of an edge."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from asyncpipe.core.checks import check_positive
from asyncpipe.core.hangs.reports import ReceiverReport
from asyncpipe.errors import EdgeError
from asyncpipe.ops.edges.channel import ClosedByPeerError, EdgeChannel, StoppedError, broken, join_or
from asyncpipe.ops.edges.message import EdgeHeader, MessageLayout, ReceivedMessage
from asyncpipe.ops.edges.payload import PayloadIn, read_inline
from asyncpipe.ops.edges.window import Window
from asyncpipe.ops.edges.wire import HEADER_SIZE, INLINE, EdgeFrameKind, Frame, encode_credit

__all__ = ["EdgeIn"]

FREED_AT_MOST = 1024
LEFT_SECONDS = 0.02
"""What nobody else has taken for so long is taken by the edge's thread."""
STUCK_SECONDS = 0.25
"""Nobody takes so long to take what is there."""


class EdgeIn:
    """Receives the messages of one worker, in its order, on a thread of its own.

    ``on_message`` is called there with each, and must not wait for anything: it takes a note of it. Messages of a newer
    epoch than this side has are kept until ``advance``; those of an older one are dropped. At most ``window`` messages
    that were not released are here. ``on_broken`` is called once, on the edge's thread, if the peer is gone without
    having closed the edge, or if ``on_message`` raises.

    With ``shared`` others may ``take`` what has come: who waits for a message anyway has it sooner than through another
    thread. What nobody takes, because all that might are in tasks, the edge's thread takes after a while.
    """

    def __init__(
        self,
        me: int,
        peer: int,
        channel: EdgeChannel,
        payload: PayloadIn,
        window: int,
        on_message: Callable[[ReceivedMessage], None],
        on_broken: Callable[[EdgeError], None],
        *,
        shared: bool = False,
    ) -> None:
        self.me = me
        self.peer = peer
        self._channel = channel
        self._payload = payload
        self._on_message = on_message
        self._on_broken = on_broken
        self.is_shared = shared and payload.receives_at_once
        """Whether ``take`` may be called."""
        self.descriptor = channel.descriptor
        """Where there is something to read when there is something to ``take``."""
        self._taking = threading.Lock()
        """Held by who takes what has come, if several may."""
        self._taking_since: float | None = None
        """Since when somebody takes what has come."""
        self._taker = 0
        """The thread that does."""
        self._failure: Exception | None = None
        """Why nothing can be taken any more; told by the edge's thread."""
        self._layouts: dict[int, MessageLayout] = {}
        self._delivering = threading.Lock()
        """Held while a message is delivered, and while the epoch changes. Never taken by ``release``."""
        self._epoch = 0
        self._early: list[ReceivedMessage] = []
        self._lock = threading.Lock()
        """Of what follows."""
        self._window = Window(window)
        self._held: dict[int, EdgeHeader] = {}
        """The headers of messages that were not released, by their number on this edge."""
        self._freed: list[int] = []
        self._messages = 0
        self._closing = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"asyncpipe edge {peer}>{me}", daemon=True)

    def start(self) -> None:
        """Start the thread, which lets the sender begin."""
        self._thread.start()

    def advance(self, epoch: int) -> None:
        """Begin ``epoch``. When this returns, no message of an older one will be delivered, and their credits are back.

        Delivers what has arrived of the new one. Not to be called from ``on_message``, nor with a lock that it takes.
        """
        with self._delivering:
            self._epoch = max(self._epoch, epoch)
            with self._lock:
                old = [number for number, of in self._held.items() if of.epoch < self._epoch]
                for number in old:
                    del self._held[number]
                self._window.release(len(old))
                self._tell()
            early, self._early = self._early, []
            for message in early:
                self._deliver(message)

    def set_window(self, window: int) -> None:
        """Let the sender have ``window`` messages here from now on. A smaller one holds once so many were released."""
        with self._lock:
            self._window.size = check_positive("window", window)
            self._tell()

    @property
    def held(self) -> list[EdgeHeader]:
        """What the messages are for that hold a credit. From any thread."""
        return list(self._held.values())

    def report(self, holders: frozenset[str]) -> ReceiverReport:
        """Where it stands. From any thread, whatever the others do.

        ``holders`` are the devices that have still to take messages.
        """
        since = self._taking_since
        is_stuck = since is not None and time.perf_counter() - since > STUCK_SECONDS
        if not self.is_shared:
            is_stuck = is_stuck and not self._channel.is_waiting  # For the rest of a message.
        taker = next((each.name for each in threading.enumerate() if each.ident == self._taker), "") if is_stuck else ""
        return ReceiverReport(self._messages, self._window.told, holders, is_stuck, taker, self._over)

    def close(self) -> None:
        """Close the edge: the thread ends, nothing is left. Tensors that have arrived stay as they are."""
        self._closing = True
        self._channel.stop()
        if self._thread.ident is None:
            self._end()
        else:
            join_or(self._payload.abort, self._thread)

    # The edge's thread

    def _run(self) -> None:
        error: Exception | None = None
        self._taker = threading.get_ident()
        try:
            with self._lock:
                self._tell()
            if self.is_shared:
                self._take_what_is_left()
            while not self._closing:
                frame = Frame.decode(self._channel.read(HEADER_SIZE))
                self._taking_since = time.perf_counter()
                self._receive(frame)
                self._taking_since = None
        except (StoppedError, ClosedByPeerError):
            pass
        except Exception as caught:  # noqa: BLE001 - it is told
            error = caught
        self._end()
        if error is not None and not self._closing:
            self._on_broken(broken(self.peer, self.me, self.peer, error))

    def _take_what_is_left(self) -> None:
        while not self._closing:
            self.take()
            if self._failure is not None:
                raise self._failure
            self._channel.wait(0, LEFT_SECONDS)

    def take(self) -> bool:
        """Take what has come, on any thread; never waits. False if nothing will come any more."""
        if not self._taking.acquire(blocking=False):
            return True  # Somebody does.
        self._taking_since, self._taker = time.perf_counter(), threading.get_ident()
        try:
            if self._failure is not None or self._over:
                return False
            while (frame := self._whole_frame()) is not None:
                self._receive(frame)
        except Exception as error:  # noqa: BLE001 - the edge's thread tells it
            self._failure = error
            self._channel.ring()
            return False
        finally:
            self._taking_since = None
            self._taking.release()
        return True

    def _whole_frame(self) -> Frame | None:
        """The next frame, if everything that follows its header is here as well."""
        channel = self._channel
        if not channel.has(HEADER_SIZE):
            return None
        frame = Frame.decode(channel.peek(HEADER_SIZE))
        follows = 0
        if frame.kind in (EdgeFrameKind.LAYOUT, EdgeFrameKind.NEWS):
            follows = frame.size
        elif frame.kind == EdgeFrameKind.MESSAGE and frame.slot == INLINE:
            follows = self._layouts[frame.layout].size
        if follows and not channel.has(HEADER_SIZE + follows):
            return None
        channel.pop(HEADER_SIZE)
        return frame

    def _receive(self, frame: Frame) -> None:
        if frame.kind == EdgeFrameKind.MESSAGE:
            self._arrive(frame)
        elif frame.kind == EdgeFrameKind.LAYOUT:
            self._layouts[frame.layout] = MessageLayout.decode(bytes(self._channel.read(frame.size)))
        elif frame.kind == EdgeFrameKind.NEWS:
            self._payload.learn(frame.slot, bytes(self._channel.read(frame.size)))
        elif frame.kind == EdgeFrameKind.BYE:
            raise ClosedByPeerError
        else:
            raise ValueError(f"a frame of unknown kind {frame.kind} came")

    def _arrive(self, frame: Frame) -> None:
        layout = self._layouts[frame.layout]
        if layout.size != frame.size:
            raise ValueError(f"a message of {frame.size} bytes came, and its layout has {layout.size}")
        if frame.slot == INLINE:
            tensors, ready = read_inline(layout, self._channel), None
        else:
            tensors, ready = self._payload.receive(layout, frame.slot)
        at = time.perf_counter()
        header = EdgeHeader(frame.epoch, frame.step, frame.task, frame.source)
        with self._lock:
            if not self._window.arrive():
                raise ValueError(f"a message came that is beyond the window of {self._window.size}")
            self._messages += 1
            self._held[self._messages] = header
            self._tell()
            release = partial(self._release, self._messages)
        with self._delivering:
            self._deliver(ReceivedMessage(header, tensors, layout.meta, ready, self.peer, release, at))

    def _deliver(self, message: ReceivedMessage) -> None:
        """With ``_delivering``."""
        if message.header.epoch < self._epoch:
            message.release()
        elif message.header.epoch > self._epoch:
            self._early.append(message)
        else:
            self._on_message(message)

    def _end(self) -> None:
        with self._taking, self._lock:
            if self._over:
                return
            self._over = True
            with suppress(OSError):
                self._channel.write([encode_credit(0, (), EdgeFrameKind.BYE)])
            self._channel.close()
            self._payload.close()
        self._early.clear()

    # Any thread

    def _release(self, number: int) -> None:
        with self._lock:
            if self._held.pop(number, None) is not None:
                self._window.release()
                self._tell()

    def _tell(self) -> None:
        """Tell the sender what is free again, if it is time to. With ``_lock``."""
        self._freed += self._payload.freed()
        if self._over or not (self._window.due() or len(self._freed) >= self._payload.freed_together):
            return
        freed, self._freed = self._freed[:FREED_AT_MOST], self._freed[FREED_AT_MOST:]
        with suppress(OSError):  # The edge's thread sees the same.
            self._channel.write([encode_credit(self._window.tell(), freed)])
