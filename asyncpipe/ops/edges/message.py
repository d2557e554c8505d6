"""What travels on an edge: messages, and the layouts of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.errors import ArgumentTypeError
from asyncpipe.ops.device.memory_layout import ALIGNMENT, fills_its_memory
from asyncpipe.ops.model.descriptions import decode, encode

__all__ = ["EdgeHeader", "EdgeMessage", "MessageLayout", "ReceivedMessage", "TensorLayout", "layout_of"]


class EdgeHeader(NamedTuple):
    """What a message is for. Tasks have their names (``core/graph/part.py``)."""

    epoch: int
    step: int
    task: int
    """The task that waits for the message."""
    source: int
    """The task that it comes from."""


@dataclass(frozen=True, slots=True)
class EdgeMessage:
    """One message to another worker.

    ``meta`` is the caller's own; each different one is sent once and kept by the receiver, so the same bytes cost
    nothing when they are sent again. Tensors are read until they are sent: nothing may write to them before what the
    message leads to has happened. ``ready`` is the event behind what makes the tensors, needed if one is on an
    accelerator.
    """

    header: EdgeHeader
    tensors: Sequence[Tensor | None] = ()
    meta: bytes = b""
    ready: torch.Event | None = None


@dataclass(frozen=True, slots=True)
class ReceivedMessage(EdgeMessage):
    """A message that has arrived.

    Its tensors are the receiver's own, to keep and to write to. ``ready`` is set if a stream must wait for the event
    before it reads them. ``release`` gives the message's credit back, at the first call; any thread may call it. ``at``
    is when it was here, in seconds of ``time.perf_counter``.
    """

    sender: int = -1
    release: Callable[[], None] = lambda: None
    at: float = 0.0


class TensorLayout(NamedTuple):
    """A tensor without its values. ``stride`` is ``None`` where memory is in the order of the dimensions."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


class MessageLayout:
    """The tensors of a message without their values, and its meta: what a header's number stands for."""

    def __init__(self, meta: bytes, tensors: tuple[TensorLayout | None, ...]) -> None:
        self.meta = meta
        self.tensors = tensors
        self.sizes = [0 if tensor is None else tensor.size for tensor in tensors]
        self.size = sum(self.sizes)
        """Bytes of all tensors."""

    @cached_property
    def offsets(self) -> list[int]:
        """Where each tensor begins in one piece of memory, as from torch's allocator, and at last how large that is."""
        offsets = [0]
        for size in self.sizes:
            offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return offsets

    def encode(self) -> bytes:
        return encode((self.meta, [each and tuple(each) for each in self.tensors]))

    @classmethod
    def decode(cls, data: bytes) -> MessageLayout:
        """The layout that ``encode`` wrote. Raises some error if that is none, or has a type that torch lacks."""
        meta, tensors = decode(data)
        return cls(meta, tuple([each and TensorLayout(*each) for each in tensors]))


def layout_of(tensor: Tensor) -> TensorLayout:
    """How ``tensor`` travels: with its strides if it fills its memory, in the order of its dimensions if not.

    Raises ``ArgumentTypeError`` for what is not plain memory: sparse, nested, quantized and meta tensors, and those of
    other classes than torch's own.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise ArgumentTypeError(
            "edges carry tensors that are plain memory, no sparse, nested, quantized or meta ones; got one of "
            f"{tensor.dtype}, {tensor.layout} on {tensor.device}"
        )
    if type(tensor) not in (Tensor, nn.Parameter):
        raise ArgumentTypeError(
            f"edges carry tensors that are plain memory, and got a {type(tensor).__name__}, which would arrive as a "
            "torch.Tensor; send tensor.as_subclass(torch.Tensor), or put both stages on one worker"
        )
    if tensor.is_contiguous() or not fills_its_memory(tensor):
        return TensorLayout(tensor.dtype, tensor.shape, None)
    return TensorLayout(tensor.dtype, tensor.shape, tensor.stride())
