"""Values as bytes for another process of the same job, tensors included.

Tensors go as their own elements: of a view no more than what it shows. They arrive as they lay in memory
(``memory_layout.py``). Everything else is pickled by ``cloudpickle``, which also takes lambdas, and what a script or a
notebook has defined. ``to_buffers`` leaves the memory of large tensors where it is, for whoever sends it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from asyncpipe.errors import OptionError
from asyncpipe.ops.device.memory_layout import ALIGNMENT, MemoryLayout, layout_in_memory

__all__ = ["TensorPickler", "from_buffers", "from_wire", "not_sendable", "to_buffers", "to_wire"]

SMALLEST_BUFFER = 1 << 12
"""Bytes. Copying less costs no more than a buffer of its own."""


def to_wire(value: object, what: str) -> bytes:
    """``value`` as bytes. Raises ``OptionError``, which calls it ``what``, if it cannot be sent.

    Tensors of accelerators are waited for and arrive on the CPU.
    """
    return _pickled(value, what, None).getvalue()


def to_buffers(value: object, what: str) -> list[pickle.PickleBuffer]:
    """As ``to_wire``, in several buffers, which ``runtime/workers`` sends as they are.

    They are the memory of large tensors, to which nobody may write until it is sent.
    """
    buffers: list[pickle.PickleBuffer] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < SMALLEST_BUFFER:
            return True
        buffers.append(buffer)
        return False

    pickled = _pickled(value, what, keep_inside)
    # Not ``getbuffer``: before 3.11.9 and 3.12.3, Python crashes as it collects a cycle that holds a memoryview in use.
    # An error that a step raises is such a cycle, by the frames of its traceback.
    return [pickle.PickleBuffer(pickled.getvalue()), *buffers]


def _pickled(value: object, what: str, keep_inside: Callable[[pickle.PickleBuffer], bool] | None) -> io.BytesIO:
    file = io.BytesIO()
    try:
        TensorPickler(file, keep_inside).dump(value)
    except Exception as error:
        raise not_sendable(what, error) from error
    return file


def not_sendable(what: str, error: Exception) -> OptionError:
    """The error for ``what``, which pickling has refused with ``error``."""
    return OptionError(
        f"{what} cannot be sent to a worker process ({type(error).__name__}: {error}); define it in a module, without "
        "open files, locks or TorchScript inside, or use workers='threads'"
    )


def from_wire(data: bytes) -> Any:
    """What ``to_wire`` has made bytes of. Unpickles, so ``data`` must come from an authenticated peer."""
    return pickle.loads(data)  # noqa: S301


def from_buffers(received: Sequence[Any]) -> Any:
    """What ``to_buffers`` has made buffers of; its tensors use the memory of those received. As ``from_wire``."""
    pickled, *buffers = received
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301


class TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles plain tensors without their storage, which may be much larger and shared with others."""

    def __init__(self, file: io.BytesIO, keep_inside: Callable[[pickle.PickleBuffer], bool] | None = None) -> None:
        """``keep_inside`` says whether the memory of a tensor is copied into the pickle."""
        super().__init__(file, protocol=5, buffer_callback=keep_inside)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.layout is torch.strided and not value.is_quantized and not value.is_meta:
            plain, layout = value.detach().cpu().resolve_conj().resolve_neg(), layout_in_memory(value)
            if layout is not None and layout.overlaps and plain.stride() != layout.stride:
                layout = None
            packed = plain.contiguous() if layout is None else layout.packed(plain)
            # Not ``reshape``: a tensor with one element may have any strides, and counts as contiguous.
            flat = packed.as_strided((packed.numel(),), (1,))
            elements: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
            return _tensor, (
                pickle.PickleBuffer(elements),
                value.dtype,
                tuple(packed.shape),
                layout,
                value.requires_grad and value.is_leaf,
            )
        return super().reducer_override(value)


def _tensor(
    elements: Any, dtype: torch.dtype, shape: tuple[int, ...], layout: MemoryLayout | None, requires_grad: bool
) -> Tensor:
    # The tensor may be written to.
    own = bytearray(elements) if memoryview(elements).readonly else elements
    memory = torch.frombuffer(own, dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8)
    if layout is None and memory.data_ptr() % ALIGNMENT:
        memory = memory.clone()
    # No view of it, for autograd, and not copied as ``dtype``, which few kernels may know.
    packed = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), 0, shape)  # type: ignore[call-overload]
    return (packed if layout is None else layout.laid_out(packed)).requires_grad_(requires_grad)
