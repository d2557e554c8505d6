"""The transport by NCCL, between workers that have one CUDA device each, and different ones: a communicator an edge.

Headers take the edge's socket, as with every transport. The tensors behind a header take the communicator, in the same
order, on a stream that only this end of the edge uses::

    sender's thread     waits for ``ready`` │ queues send n, header n │ waits until n is over
                                                     ┊          │
                                                     ▼          ▼
    receiver's thread                                       queues receive n │ on_message
                                                                     ┊
    lane                                   its stream waits for the event of receive n, then computes

**Who waits for another worker.** The threads of edges, on the host, and streams for what was queued before. A send is
queued when its tensors are there, and then its header leaves; a receive is queued when its header comes. So a lane that
is told of a message waits inside its device for a transfer of which the other end is queued, and never for what another
worker has still to do.

**Order.** Each directed edge has a communicator, whose transfers are in the order of its headers, and none of them
shares a kernel with one of another edge. So there is no ``batch_isend_irecv``, which puts the transfers of a call into
one kernel to save two ranks that send to each other from waiting for each other. Here they cannot: a send needs no
receive of the same worker.

**When a peer is gone** the edge's socket says so. What was announced may still come for a moment; then the communicator
is aborted, which ends its kernels, and the edge is broken. To abort lets go on whatever waits for a receive, with
memory that nothing was written to. Where a lane waits for one, that must not be, since an update could follow: then the
worker ends itself, and is lost as its peer is. That can be in the microseconds between a header and the end of its
transfer. Messages of old epochs are received like all others (the communicator has an order), and then dropped.

Not to be had: two workers on one device, which NCCL refuses, and tensors that stay on the host. Take shared memory
there. Known limit: ``cudaFree`` waits for all kernels of a device, those of NCCL too. So a worker that runs out of
memory, and has its allocator give some back, may wait there until its peers have taken what it has sent.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from asyncpipe.errors import EdgeError
from asyncpipe.ops.device.streams import AcceleratorStream, record
from asyncpipe.ops.edges.channel import EdgeChannel
from asyncpipe.ops.edges.message import EdgeMessage, MessageLayout
from asyncpipe.ops.edges.pair_store import PairStore
from asyncpipe.ops.edges.payload import PayloadIn, PayloadOut, Reading, await_ready, empty, flat, is_laid_out
from asyncpipe.ops.edges.wire import STREAMED
from asyncpipe.ops.torch_internals import nccl_options

__all__ = ["Nccl", "NcclIn", "NcclOut"]

SENDER, RECEIVER = 0, 1
MOST_BLOCKS = 8
"""Of a kernel of NCCL. Those of all edges of a device may run at the same time, and tasks need the rest."""
FOREVER = timedelta(days=1000)
"""Whether a peer is there, the edge's socket tells."""
GRACE_SECONDS = 1.0
"""For what a peer that has hung up has sent before."""
SHORTEST_PAUSE, LONGEST_PAUSE = 5e-6, 4e-5
LOOK_SECONDS = 1e-3
"""How often one who waits looks whether what it waits for can still come."""
ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
WITHOUT_WATCHDOGS = {ERRORS: "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""The environment in which a group is made: its threads end no process, and do not ask the store, which by then is an
edge's socket."""


class Nccl:
    """The transport."""

    def __init__(self, device: torch.device) -> None:
        """``device`` is this worker's, and no other's. NCCL chooses its interfaces itself (``NCCL_SOCKET_IFNAME``)."""
        if not distributed.is_nccl_available():
            raise EdgeError("this torch has no NCCL; use the transport 'shared_memory'")
        self._device = device

    def sender(self, store: PairStore) -> PayloadOut:
        return NcclOut(_Communicator(store, SENDER, self._device))

    def receiver(self, store: PairStore) -> PayloadIn:
        return NcclIn(_Communicator(store, RECEIVER, self._device))


class _Communicator:
    """One end of an edge's communicator, for the edge's thread; ``abort`` and ``close`` for any."""

    def __init__(self, store: PairStore, rank: int, device: torch.device) -> None:
        self.device = device
        self.stream = AcceleratorStream(device)
        self._peer = 1 - rank
        self._store = store
        """The group's threads may use it as long as there is a group. They would not keep it, which is Python's."""
        self._channel: EdgeChannel = store.channel
        self.awaited = Reading[None]()
        """Receives that lanes may wait for."""
        self.turn = threading.RLock()
        """Held while it is aborted, and while a receive is queued that a lane will wait for."""
        self._is_aborted = False
        self._group: Any = _group(store, rank)
        # A communicator is made when it is first used, which waits for the peer. It is at this very edge, too.
        token = torch.zeros(1, dtype=torch.uint8, device=device)
        try:
            # Hazard: the transfer reads what the thread's current stream has written.
            self.stream.wait(record(torch.get_device_module(device).current_stream(device)))
            self.finish(self.begin([token]))
        except BaseException:
            self.close()
            raise

    def begin(self, tensors: Iterable[Tensor]) -> torch.Event:
        """Queue the transfer of ``tensors``, which are flat. They must live until the event has happened."""
        with self.stream.use():
            transfer = self._group.send if self._peer == RECEIVER else self._group.recv
            for tensor in tensors:
                # torch orders the communicator's own stream behind this one when it queues the transfer, and ``wait``
                # this one behind the transfer: neither waits on the host. Hazard: without it the event would not be
                # behind the transfer.
                transfer([tensor], self._peer, 0).wait()
        return record(self.stream.stream)

    def finish(self, event: torch.Event) -> None:
        """Wait until ``event`` has happened. Raises ``ConnectionError`` when it never will, and aborts."""
        if not self._happens(event):
            self.abort()
        if self._is_aborted:  # The event has happened then, too, without what it stood for.
            raise ConnectionAbortedError("a transfer by NCCL was aborted: the other end is gone, or this one closes")

    def _happens(self, event: torch.Event) -> bool:
        """Wait until ``event`` has happened; false if it never will."""
        pause, looked, until = SHORTEST_PAUSE, time.monotonic(), None
        while not (event.query() or self._is_aborted):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if (now := time.monotonic()) - looked > LOOK_SECONDS:
                looked = now
                if self._group.get_error().name != "SUCCESS":
                    return False
                if self._channel.hung_up() and now > (until := until or now + GRACE_SECONDS):
                    return False
        return True

    def abort(self) -> None:
        """End what is under way, and all later transfers, with an error; or this process, if a lane waits for one."""
        with self.turn:
            if not self._is_aborted:
                if self.awaited.unfinished():
                    # Hazard: lanes read, and updates use, what has not come and never will.
                    _end_process()
                self._is_aborted = True
                with suppress(RuntimeError):
                    self._group.abort()

    def await_peer(self) -> None:
        """Wait for a moment until the peer has closed its end, and with it has all that was sent."""
        until = time.monotonic() + GRACE_SECONDS
        while not (self._is_aborted or self._channel.hung_up()) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)

    def await_lanes(self) -> None:
        """Wait until no lane waits for a receive, unless that never comes."""
        for event in self.awaited.unfinished():
            self._happens(event)

    def close(self) -> None:
        # Not by ``shutdown``, which needs the peer. Nothing is under way, or nobody wants it any more.
        self.abort()
        self._group = None


class NcclOut(PayloadOut):
    """The sender's end."""

    inline_bytes = direct_bytes = 0
    """A message goes on the socket if its tensors are empty."""

    def __init__(self, communicator: _Communicator) -> None:
        self._communicator = communicator
        self._device = communicator.device
        self._begun: deque[tuple[torch.Event, list[Tensor]]] = deque()
        """With the tensors. Hazard: their memory must not be used again before NCCL has read it, on its own stream. The
        thread holds them until the host knows that it has, so no stream needs to be recorded."""

    def place(self, layout: MessageLayout, message: EdgeMessage) -> int:
        await_ready(message)
        with self._communicator.stream.use(), torch.no_grad():
            sources: list[Tensor] = []
            for each, tensor in zip(layout.tensors, message.tensors, strict=True):
                if each is None or tensor is None or not each.size:
                    continue
                if tensor.device != self._device or not is_laid_out(tensor, each):
                    # Hazard: this stream reads what a lane's has written. The edge's thread has waited for ``ready``.
                    tensor = empty(each, self._device).copy_(tensor)
                sources.append(flat(tensor))
        self._begun.append((self._communicator.begin(sources), sources))
        return STREAMED

    def begun(self) -> int:
        return len(self._begun)

    def settle(self, begun: int) -> None:
        for _ in range(begun):
            event, sources = self._begun.popleft()
            try:
                self._communicator.finish(event)
            finally:
                del sources  # A traceback would keep them.

    def abort(self) -> None:
        self._communicator.abort()

    def close(self) -> None:
        # Hazard: a send is over when NCCL has the tensors in buffers of its own, which the peer may still read.
        self._communicator.await_peer()
        self._communicator.close()
        self._begun.clear()


class NcclIn(PayloadIn):
    """The receiver's end."""

    receives_at_once = True

    def __init__(self, communicator: _Communicator) -> None:
        self._communicator = communicator

    def receive(self, layout: MessageLayout, slot: int) -> tuple[list[Tensor | None], torch.Event | None]:
        communicator = self._communicator
        with communicator.turn:
            # The memory belongs to this stream. Hazard: a lane may still read it when its tensor is gone and the memory
            # is used for the next message. The copy task records the lane's stream (``Copier.copy``), for which the
            # allocator waits.
            with communicator.stream.use():
                tensors = [None if each is None else empty(each, communicator.device) for each in layout.tensors]
            ready = communicator.begin([flat(each) for each in tensors if each is not None and each.numel()])
            communicator.awaited.over()
            communicator.awaited.begin(ready, None)
        return tensors, ready

    def abort(self) -> None:
        self._communicator.abort()

    def close(self) -> None:
        self._communicator.await_lanes()
        self._communicator.close()


def _end_process() -> None:
    os.write(2, b"a worker is gone in the middle of a transfer by NCCL that this one computes with, so it ends, too\n")
    os._exit(1)


def _group(store: PairStore, rank: int) -> Any:
    """A process group of two. Its watchdog must not end this process when the peer's has ended."""
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl_options(FOREVER)
    options.config.max_ctas = MOST_BLOCKS
    before = {name: os.environ.get(name) for name in WITHOUT_WATCHDOGS}
    os.environ.update(WITHOUT_WATCHDOGS)  # Read when a group is made; groups of the stages' own keep theirs.
    try:
        return nccl(store, rank, 2, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
