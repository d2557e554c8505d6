"""What a transport is, and how the memory of tensors is copied.

Small tensors follow their header on the socket, whatever the transport (``inline``). Others go the transport's way: it
puts them somewhere and names the place, its *slot*, in the header, or sends them on a way of its own.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from asyncpipe.ops.device.streams import AcceleratorStream, record
from asyncpipe.ops.edges.channel import EdgeChannel, memory_at
from asyncpipe.ops.edges.message import EdgeMessage, MessageLayout, TensorLayout
from asyncpipe.ops.edges.pair_store import PairStore

__all__ = [
    "PayloadIn",
    "PayloadOut",
    "Reading",
    "Transport",
    "await_ready",
    "empty",
    "flat",
    "host_tensor",
    "inline",
    "is_laid_out",
    "queue_in",
    "queue_out",
    "read_inline",
    "write_to",
]

_What = TypeVar("_What")


class PayloadOut:
    """The sending side of a transport, for one edge. All but ``settle`` and ``abort``: by one thread at a time.

    Transports override what they need: ``place``, and ``returned``, or ``begun`` and ``settle``.
    """

    news = b""
    """What the receiver must ``learn`` of the slot that ``place`` gave last, before it is told the slot."""

    inline_bytes: int
    """Messages of at most so many bytes go on the socket."""
    direct_bytes: int
    """Messages of at most so many bytes may be sent by a thread that must not wait."""

    def place(self, layout: MessageLayout, message: EdgeMessage) -> int:
        """Put the tensors into a slot, before the header is sent; ``STREAMED`` where they come beside it.

        Waits until the message is ready: whoever hears of it must not wait for what is still to be computed.
        """
        raise NotImplementedError

    def returned(self, slots: Iterable[int]) -> None:
        """The receiver no longer uses these slots."""

    def begun(self) -> int:
        """How much ``place`` has begun that nobody has waited for."""
        return 0

    def settle(self, begun: int) -> None:
        """Wait until the first ``begun`` have been sent, whose headers were. ``place`` may be called meanwhile."""

    def abort(self) -> None:
        """End a blocked ``settle`` with an error; from any thread."""

    def close(self) -> None:
        """Let go of what belongs to this side."""


class PayloadIn:
    """The receiving side of a transport, for one edge, for its thread; ``freed`` and ``abort`` for any."""

    receives_at_once = False
    """Whether a thread that must not wait may receive: nothing large comes by the socket."""
    freed_together = 8
    """So many free slots are told of without a credit to tell."""

    def learn(self, slot: int, news: bytes) -> None:
        """What a slot is, from the sender's ``news``."""
        raise ValueError("news of a slot came by a transport that has none")

    def receive(self, layout: MessageLayout, slot: int) -> tuple[list[Tensor | None], torch.Event | None]:
        """The tensors of the message announced last, and the event behind which they can be read, if there is one.

        Does not wait.
        """
        raise NotImplementedError

    def freed(self) -> list[int]:
        """Slots that are free again; each once. By one thread at a time."""
        return []

    def abort(self) -> None:
        """End a blocked ``close``; from any thread."""

    def close(self) -> None:
        """Let go of what belongs to this side."""


class Transport(Protocol):
    """Makes the sides of a worker's edges. There is one for all edges of a worker."""

    def sender(self, store: PairStore) -> PayloadOut:
        """For one edge, made together with the receiver at the other end of ``store``."""
        ...

    def receiver(self, store: PairStore) -> PayloadIn: ...


class Reading(Generic[_What]):
    """What copies under way still read, by the events behind them. ``begin`` and the others may have a thread each."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[torch.Event, _What]] = deque()

    def begin(self, event: torch.Event, what: _What) -> None:
        self._under_way.append((event, what))

    def over(self) -> list[_What]:
        """What is read no more; each once. Does not wait."""
        found: list[_What] = []
        with suppress(RuntimeError):  # A device that has failed tells nothing any more.
            while self._under_way and self._under_way[0][0].query():
                found.append(self._under_way.popleft()[1])
        return found

    def unfinished(self) -> list[torch.Event]:
        """The events of copies that are not over. From any thread."""
        with suppress(RuntimeError):
            return [event for event, _ in tuple(self._under_way) if not event.query()]
        return []

    def wait(self) -> None:
        """Wait until nothing is read any more."""
        for event in self.unfinished():
            event.synchronize()
        self._under_way.clear()


def await_ready(message: EdgeMessage) -> None:
    """Wait, on the host, until a message may be read."""
    if message.ready is not None:
        # Hazard: the device still writes the tensors. The host waits, and not a stream: no header is sent before its
        # tensors are there, so no receiver waits inside a device for what is still to be computed.
        message.ready.synchronize()


def queue_in(stream: AcceleratorStream, layout: MessageLayout, message: EdgeMessage, memory: Tensor) -> None:
    """Queue copies of the tensors of ``message`` into ``memory`` (bytes), on ``stream``."""
    if message.ready is not None:
        # Hazard: lanes may still be writing what the copies read.
        stream.wait(message.ready)
    with stream.use(), torch.no_grad():
        for tensor, place in zip(message.tensors, _places(layout, memory), strict=True):
            if tensor is not None and place is not None:
                if tensor.is_cpu:
                    # It is read here before this returns: it may change or go after that.
                    await_ready(message)
                place.copy_(tensor, non_blocking=not tensor.is_cpu)


def queue_out(
    stream: AcceleratorStream, layout: MessageLayout, memory: Tensor
) -> tuple[list[Tensor | None], torch.Event]:
    """Queue copies out of ``memory`` (bytes), on ``stream``: the tensors on its device, and the event behind them.

    ``memory`` must stay as it is until then. The tensors belong to ``stream``. Hazard: a lane may still read one when
    it is gone here and its memory is used for the next message. Whoever takes a message from its edge records the
    lane's stream (``Copier.copy``), for which the allocator waits.
    """
    with stream.use(), torch.no_grad():
        tensors = [None if each is None else empty(each, stream.device) for each in layout.tensors]
        for tensor, place in zip(tensors, _places(layout, memory), strict=True):
            if tensor is not None and place is not None:
                tensor.copy_(place, non_blocking=True)
    return tensors, record(stream.stream)


def _places(layout: MessageLayout, memory: Tensor) -> Iterator[Tensor | None]:
    for each, offset, size in zip(layout.tensors, layout.offsets, layout.sizes, strict=False):
        if each is None or not size:
            yield None
            continue
        flat = memory[offset : offset + size].view(each.dtype)
        yield flat.view(each.shape) if each.stride is None else flat.as_strided(each.shape, each.stride)


def empty(layout: TensorLayout, device: torch.device | None = None) -> Tensor:
    """New memory for a tensor."""
    if layout.stride is None:
        return torch.empty(layout.shape, dtype=layout.dtype, device=device)
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)


def host_tensor(layout: TensorLayout, tensor: Tensor) -> Tensor:
    """``tensor`` as memory of the host that looks like ``layout``: itself, or a copy."""
    if tensor.is_cpu and is_laid_out(tensor, layout):
        return tensor
    with torch.no_grad():
        return empty(layout).copy_(tensor)


def is_laid_out(tensor: Tensor, layout: TensorLayout) -> bool:
    """Whether the memory of ``tensor`` is what is to be sent: no gaps, no conjugation or negation still to be done."""
    is_plain = not (tensor.is_conj() or tensor.is_neg())
    return is_plain and (layout.stride is not None or tensor.is_contiguous())


def flat(tensor: Tensor) -> Tensor:
    """The memory of ``tensor``, which has no gaps, as bytes: transports do not know all types."""
    with torch.no_grad():
        return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def inline(layout: MessageLayout, tensors: Iterable[Tensor | None]) -> tuple[list[memoryview], list[Tensor]]:
    """The memory of ``tensors``, and the tensors that have it and must live as long."""
    owners = [
        host_tensor(each, tensor)
        for each, tensor in zip(layout.tensors, tensors, strict=True)
        if each is not None and tensor is not None and each.size
    ]
    return [memory_at(owner.data_ptr(), owner.nbytes) for owner in owners], owners


def read_inline(layout: MessageLayout, channel: EdgeChannel) -> list[Tensor | None]:
    """The tensors whose memory is next on the socket."""
    tensors: list[Tensor | None] = []
    for each, size in zip(layout.tensors, layout.sizes, strict=True):
        tensor = None if each is None else empty(each)
        if tensor is not None and size:
            channel.read_into(memory_at(tensor.data_ptr(), size))
        tensors.append(tensor)
    return tensors


def write_to(address: int, layout: TensorLayout, tensor: Tensor) -> None:
    """Copy ``tensor`` to the memory of the host at ``address``."""
    size = layout.size
    if tensor.is_cpu and is_laid_out(tensor, layout):
        ctypes.memmove(address, tensor.data_ptr(), size)  # Without the interpreter's lock, and on this thread alone.
    elif size:
        with torch.no_grad():
            flat = torch.frombuffer(memory_at(address, size), dtype=layout.dtype)
            shaped = flat.view(layout.shape) if layout.stride is None else flat.as_strided(layout.shape, layout.stride)
            shaped.copy_(tensor)
