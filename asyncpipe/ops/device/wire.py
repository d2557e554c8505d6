"""Values as bytes for another process of the same job, tensors included.

Tensors go as their own elements: of a view no more than what it shows, in the order of its shape. Everything else is
pickled by ``cloudpickle``, which also takes lambdas, and what a script or a notebook has defined.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from asyncpipe.errors import OptionError

__all__ = ["TensorPickler", "from_wire", "not_sendable", "to_wire"]


def to_wire(value: object, what: str) -> bytes:
    """``value`` as bytes. Raises ``OptionError``, which calls it ``what``, if it cannot be sent.

    Tensors of accelerators are waited for and arrive on the CPU.
    """
    file = io.BytesIO()
    try:
        TensorPickler(file).dump(value)
    except Exception as error:
        raise not_sendable(what, error) from error
    return file.getvalue()


def not_sendable(what: str, error: Exception) -> OptionError:
    """The error for ``what``, which pickling has refused with ``error``."""
    return OptionError(
        f"{what} cannot be sent to a worker process ({type(error).__name__}: {error}); define it in a module, without "
        "open files, locks or TorchScript inside, or use workers='threads'"
    )


def from_wire(data: bytes) -> Any:
    """What ``to_wire`` has made bytes of. Unpickles, so ``data`` must come from an authenticated peer."""
    return pickle.loads(data)  # noqa: S301


class TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles plain tensors without their storage, which may be much larger and shared with others."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.layout is torch.strided and not value.is_quantized and not value.is_meta:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            elements: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
            return _tensor, (
                pickle.PickleBuffer(elements),
                value.dtype,
                tuple(value.shape),
                value.requires_grad and value.is_leaf,
            )
        return super().reducer_override(value)


def _tensor(elements: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    # A bytearray, since the tensor may be written to.
    own = bytearray(elements)
    flat = torch.frombuffer(own, dtype=torch.uint8).view(dtype) if own else torch.empty(0, dtype=dtype)
    return flat.view(shape).requires_grad_(requires_grad)
