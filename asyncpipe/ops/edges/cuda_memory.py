"""Memory of a GPU that two processes of one host share (CUDA IPC): the default between workers that have one GPU each.

The GPUs may be one, or two that reach each other. The sender copies a message's tensors into a *slot*, memory of its
own GPU, which the receiver has opened, and the receiver copies them out into memory of its own GPU::

    sender's thread    waits for ``ready`` │ copy ─▶ slot ─▶ event │ header              (nobody waits for the copy)
                                                              ┊        │
                                           the event travels  ┊        ▼
    receiver's thread                               its stream waits, slot ─▶ copy ─▶ ``ready`` ─▶ on_message
                                                                                        ┊
    lane                                               its stream waits for the receiver's ``ready``, then computes
    receiver's thread  sees that the event of its copy has happened: the slot goes back with a credit
    sender's thread    uses the slot again, for which no stream waits: the copies out of it are over

So on the way no host waits for a copy. And no stream waits for what another worker has still to compute: when the
header comes, all that is before it is a copy that runs (some microseconds for a megabyte). So a worker that is lost
holds up nobody's device for ever, but in those microseconds; then the watchdog finds the task that hangs behind it.

**Who owns what.** Slots are the sender's, and it has as many as there are messages that the receiver has not given
back: credits bound them. A slot that is too small for a message is replaced by a larger one under the same number. Its
handles, and those of its event, are told once, before the first header that names it (``cuda_calls.py``); after that a
message costs a header. Epochs change nothing: a message of an old one is copied out like all others, dropped, and its
slot comes back. A slot is never used again before the receiver's copy is over, and what was sent is kept from reuse by
``record_stream``. When the edge ends, the sender frees all slots. What a peer that is gone, or that has aborted, may
still read there is then of no use to it; the driver keeps memory mapped that another process has open.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from asyncpipe.ops.device.streams import AcceleratorStream
from asyncpipe.ops.edges import cuda_calls
from asyncpipe.ops.edges.message import EdgeMessage, MessageLayout
from asyncpipe.ops.edges.payload import PayloadIn, PayloadOut, Reading, await_ready, queue_in, queue_out
from asyncpipe.ops.model.descriptions import decode, encode

__all__ = ["CudaMemoryIn", "CudaMemoryOut"]

GRAIN = 1 << 20
"""Slots have multiples of so many bytes, so that messages of about the same size share them."""


class CudaMemoryOut(PayloadOut):
    """The sender's side."""

    inline_bytes = direct_bytes = 0
    """Nothing passes through the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = AcceleratorStream(device)
        self._slots: dict[int, tuple[Tensor, torch.Event, cuda_calls.Handles]] = {}
        self._free: list[int] = []

    def place(self, layout: MessageLayout, message: EdgeMessage) -> int:
        await_ready(message)
        slot = self._slot(layout.offsets[-1])
        memory, event, _ = self._slots[slot]
        queue_in(self._stream, layout, message, memory)
        # Hazard: the receiver's stream must not read before the copies are over, for which nobody waits here.
        event.record(self._stream.stream)
        # Hazard: what was sent goes as soon as its header has left. Its memory, a lane's, must not be reused before the
        # copies have read it.
        self._stream.keep(tensor for tensor in message.tensors if tensor is not None)
        return slot

    def _slot(self, size: int) -> int:
        """The smallest free slot of ``size`` bytes or more; else a new one, in the place of the largest free one."""
        free = sorted(self._free, key=lambda slot: self._slots[slot][0].nbytes)
        fits = [slot for slot in free if self._slots[slot][0].nbytes >= size]
        slot = fits[0] if fits else free[-1] if free else len(self._slots) + 1
        if not fits:
            # Hazard: none. All copies out of the memory that is replaced are over, as for every free slot.
            self._forget(slot)
            with self._stream.use():
                memory = torch.empty(-(-size // GRAIN) * GRAIN, dtype=torch.uint8, device=self._stream.device)
                event = cuda_calls.shareable_event()
                event.record(self._stream.stream)  # It has a device from then on, and handles.
                handles = cuda_calls.share(memory, event)
            self._slots[slot] = memory, event, handles
            self.news = encode(handles)
        if free:
            self._free.remove(slot)
        return slot

    def returned(self, slots: Iterable[int]) -> None:
        self._free += slots

    def _forget(self, slot: int) -> None:
        if slot in self._slots:
            cuda_calls.forget(self._slots.pop(slot)[2])

    def close(self) -> None:
        for slot in tuple(self._slots):
            self._forget(slot)
        self._free.clear()


class CudaMemoryIn(PayloadIn):
    """The receiver's side. Tensors arrive on its device."""

    receives_at_once = True
    freed_together = 2
    """Slots take memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = AcceleratorStream(device)
        self._slots: dict[int, tuple[Tensor, torch.Event]] = {}
        self._reading = Reading[int]()

    def learn(self, slot: int, news: bytes) -> None:
        self._slots.pop(slot, None)  # Before: memory is mapped once in a process.
        self._slots[slot] = cuda_calls.open_shared(decode(news), self._stream.device)

    def receive(self, layout: MessageLayout, slot: int) -> tuple[list[Tensor | None], torch.Event | None]:
        memory, there = self._slots[slot]
        # Hazard: the sender's stream may still be copying into the slot.
        self._stream.wait(there)
        tensors, ready = queue_out(self._stream, layout, memory)
        self._reading.begin(ready, slot)
        return tensors, ready

    def read(self, layout: MessageLayout, slot: int) -> list[int]:
        """The numbers of the first tensor of a message, which is released."""
        tensors, ready = self.receive(layout, slot)
        assert ready is not None and tensors[0] is not None  # noqa: PT018
        ready.synchronize()
        self._reading.wait()
        return [int(each) for each in tensors[0].tolist()]

    def freed(self) -> list[int]:
        # Hazard: the sender writes to a slot that comes back. The copy out of it must be over.
        return self._reading.over()

    def close(self) -> None:
        self._reading.wait()
        self._slots.clear()
