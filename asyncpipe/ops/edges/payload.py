"""What a transport is, and how the memory of tensors is copied.

Small tensors follow their header on the socket, whatever the transport (``inline``). Others go the transport's way: it
puts them somewhere and names the place, its *slot*, in the header, or sends them behind the header.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from asyncpipe.ops.edges.channel import EdgeChannel, memory_at
from asyncpipe.ops.edges.message import MessageLayout, TensorLayout
from asyncpipe.ops.edges.pair_store import PairStore
from asyncpipe.ops.edges.wire import STREAMED

__all__ = [
    "PayloadIn",
    "PayloadOut",
    "Transport",
    "empty",
    "flat",
    "host_tensor",
    "inline",
    "is_laid_out",
    "read_inline",
    "write_to",
]


class PayloadOut:
    """The sending side of a transport, for one edge. All but ``settle`` and ``abort``: by one thread at a time.

    Transports override what they need: either ``place`` and ``returned``, or ``follow``, ``begun`` and ``settle``.
    """

    inline_bytes: int
    """Messages of at most so many bytes go on the socket."""
    direct_bytes: int
    """Messages of at most so many bytes may be sent by a thread that must not wait."""

    def place(self, layout: MessageLayout, tensors: Sequence[Tensor | None]) -> int:
        """Put the tensors into a slot, before the header is sent; ``STREAMED`` where they follow it."""
        return STREAMED

    def returned(self, slots: Iterable[int]) -> None:
        """The receiver no longer uses these slots."""

    def follow(self, layout: MessageLayout, tensors: Sequence[Tensor | None]) -> None:
        """Begin to send the tensors behind the header. Does not wait for the receiver."""

    def begun(self) -> int:
        """How much ``follow`` has begun that nobody has waited for."""
        return 0

    def settle(self, begun: int) -> None:
        """Wait until the first ``begun`` have been sent, whose headers were. ``follow`` may be called meanwhile."""

    def abort(self) -> None:
        """End a blocked ``settle`` with an error; from any thread."""

    def close(self) -> None:
        """Let go of what belongs to this side."""


class PayloadIn:
    """The receiving side of a transport, for one edge, for its thread; ``freed`` and ``abort`` for any."""

    receives_at_once = False
    """Whether ``receive`` never blocks."""

    def receive(self, layout: MessageLayout, slot: int) -> tuple[list[Tensor | None], torch.Event | None]:
        """The tensors of the message announced last, and the event behind which they can be read, if there is one.

        May block while the sender is sending, and for nothing else.
        """
        raise NotImplementedError

    def freed(self) -> list[int]:
        """Slots that are free again; each once."""
        return []

    def abort(self) -> None:
        """End a blocked ``receive`` with an error; from any thread."""

    def close(self) -> None:
        """Let go of what belongs to this side."""


class Transport(Protocol):
    """Makes the sides of a worker's edges. There is one for all edges of a worker."""

    def sender(self, store: PairStore) -> PayloadOut:
        """For one edge, made together with the receiver at the other end of ``store``."""
        ...

    def receiver(self, store: PairStore) -> PayloadIn: ...


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
