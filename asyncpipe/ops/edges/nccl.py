"""The transport by NCCL, between workers that have one CUDA device each, and different ones: a communicator an edge.

Headers take the edge's socket, as with every transport. The tensors behind a header take the communicator, in the same
order, on a stream that only this end of the edge uses::

    sender's thread     waits for ``ready``, header, queues the sends, waits until they are over
    receiver's thread                        header, queues the receives, waits until they are over, on_message

**Who waits for another worker.** The threads of edges, on the host, and nobody else. A send is queued when its tensors
are there and a receive when its header is, so a kernel of NCCL waits for no task. No stream of a lane waits for a
kernel of NCCL, since a message is delivered when its tensors have arrived. So what a worker queues never waits inside
the device for what another worker has still to queue, whatever shares a hardware queue. And when a peer is gone, a
kernel that waits for it for ever holds up its own stream alone, until the communicator is aborted.

**When a peer is gone** the edge's socket says so, which the thread that waits looks at. What was announced may still
come for a moment; then the communicator is aborted, which ends its kernels, and the edge is broken. Messages of old
epochs are received like all others (the communicator has an order), and then dropped.

Not to be had: two workers on one device, which NCCL refuses, and tensors that stay on the host. Take shared memory
there. Known limit: ``cudaFree`` waits for all kernels of a device, those of NCCL too. So a worker that runs out of
memory, and has its allocator give some back, may wait there until its peers have taken what they were sent.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from asyncpipe.errors import EdgeError
from asyncpipe.ops.device.streams import AcceleratorStream, record
from asyncpipe.ops.edges.channel import EdgeChannel
from asyncpipe.ops.edges.message import MessageLayout
from asyncpipe.ops.edges.pair_store import PairStore
from asyncpipe.ops.edges.payload import PayloadIn, PayloadOut, empty, flat, is_laid_out
from asyncpipe.ops.torch_internals import nccl_options

__all__ = ["Nccl", "NcclIn", "NcclOut"]

SENDER, RECEIVER = 0, 1
MOST_BLOCKS = 8
"""Of a kernel of NCCL. Those of all edges of a device may run at the same time, and tasks need the rest."""
FOREVER = timedelta(days=1000)
"""Whether a peer is there, the edge's socket tells."""
GRACE_SECONDS = 1.0
"""For what a peer that has hung up has sent before."""
SHORTEST_PAUSE, LONGEST_PAUSE = 1e-5, 1e-3
ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


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
        self._channel: EdgeChannel = store.channel
        self._aborting = threading.Lock()
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
        pause, until = SHORTEST_PAUSE, None
        while not event.query():
            if self._is_aborted:
                break
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if pause == LONGEST_PAUSE:
                if self._has_failed():
                    self.abort()
                elif self._channel.hung_up():
                    until = until or time.monotonic() + GRACE_SECONDS
                    if time.monotonic() > until:
                        self.abort()
        if self._is_aborted:  # The event has happened then, too, without what it stood for.
            raise ConnectionAbortedError("a transfer by NCCL was aborted: the other end is gone, or this one closes")

    def _has_failed(self) -> bool:
        return bool(self._group.get_error().name != "SUCCESS")

    def abort(self) -> None:
        """End what is under way, and all later transfers, with an error."""
        with self._aborting:
            if not self._is_aborted:
                self._is_aborted = True
                with suppress(RuntimeError):
                    self._group.abort()

    def await_peer(self) -> None:
        """Wait for a moment until the peer has closed its end, and with it has all that was sent."""
        until = time.monotonic() + GRACE_SECONDS
        while not (self._is_aborted or self._channel.hung_up()) and time.monotonic() < until:
            time.sleep(LONGEST_PAUSE)

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
        self._begun: deque[tuple[torch.Event, list[Tensor]]] = deque()
        """With the tensors. Hazard: their memory must not be used again before NCCL has read it, on its own stream. The
        thread holds them until the host knows that it has, so no stream needs to be recorded."""

    def follow(self, layout: MessageLayout, tensors: Sequence[Tensor | None]) -> None:
        with self._communicator.stream.use(), torch.no_grad():
            sources: list[Tensor] = []
            for each, tensor in zip(layout.tensors, tensors, strict=True):
                if each is None or tensor is None or not each.size:
                    continue
                if tensor.device != self._communicator.device or not is_laid_out(tensor, each):
                    # Hazard: this stream reads what a lane's has written. The edge's thread has waited for ``ready``.
                    tensor = empty(each, self._communicator.device).copy_(tensor)
                sources.append(flat(tensor))
        self._begun.append((self._communicator.begin(sources), sources))

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

    def __init__(self, communicator: _Communicator) -> None:
        self._communicator = communicator

    def receive(self, layout: MessageLayout, slot: int) -> tuple[list[Tensor | None], torch.Event | None]:
        communicator = self._communicator
        # The memory belongs to this stream. Hazard: a lane may still read it when its tensor is gone and the memory is
        # used for the next message. The copy task records the lane's stream (``Copier.copy``), for which the allocator
        # waits.
        with communicator.stream.use():
            tensors = [None if each is None else empty(each, communicator.device) for each in layout.tensors]
        event = communicator.begin(flat(tensor) for tensor in tensors if tensor is not None and tensor.numel())
        # Hazard: a lane reads what has not arrived. It is told of the message when the host knows that it has.
        communicator.finish(event)
        return tensors, None

    def abort(self) -> None:
        self._communicator.abort()

    def close(self) -> None:
        self._communicator.close()


def _group(store: PairStore, rank: int) -> Any:
    """A process group of two. Its watchdog must not end this process when the peer's has ended."""
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl_options(FOREVER)
    options.config.max_ctas = MOST_BLOCKS
    before = os.environ.get(ERRORS)
    os.environ[ERRORS] = "0"  # Read when a group is made; groups of the stages' own keep theirs.
    try:
        return nccl(store, rank, 2, options)
    finally:
        if before is None:
            del os.environ[ERRORS]
        else:
            os.environ[ERRORS] = before
