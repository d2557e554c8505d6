"""Counters of the bytes in tensor storages: independent of allocators, and therefore the same on every machine.

``ByteMeter`` counts every storage that torch makes, temporaries included, until it is freed. It counts neither scratch
memory inside kernels nor memory that an allocator keeps in reserve.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncpipe.runtime.executor import Assignment
from asyncpipe.testing import InlineExecutor

__all__ = ["ByteMeter", "CountedExecutor"]


class ByteMeter:
    """Live bytes of the storages made while counting, and their peak. Several threads may count at once.

    A storage counts once, however many tensors share it, from the operation that makes it until it is freed; a resized
    storage keeps its first size.

    Without ``values``, tensors made while counting are fake: they have shapes but no memory, so that a model of any
    size is counted quickly, by the same operations. Only one thread at a time may count then.
    """

    def __init__(self, *, values: bool = True, limit: int | None = None) -> None:
        """``limit``: an operation that needs more raises ``torch.OutOfMemoryError``, when it has run."""
        self.values = values
        self.limit = limit
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        # Reentrant: the garbage collector may free a storage while this thread is inside `add`.
        self._lock = threading.RLock()
        self._fake: AbstractContextManager[Any] = nullcontext() if values else FakeTensorMode()

    @contextmanager
    def counting(self) -> Iterator[ByteMeter]:
        """Count the operations of this thread during the block, and of the CPU backwards that it starts."""
        with self._fake, _CountingMode(self):
            yield self

    def restart(self) -> None:
        """Reset the peak to the bytes that are live now."""
        self.peak = self.live

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never count the storages of ``tensors``, which were there before."""
        for tensor in tensors:
            self._sizes[tensor.untyped_storage()._cdata] = 0

    def add(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor``, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._sizes:
                return
            size = storage.nbytes()
            if self.limit is not None and self.live + size > self.limit:
                raise torch.OutOfMemoryError(f"{self.live} of {self.limit} bytes are in use; {size} were wanted")
            self._sizes[key] = size
            self.live += size
            self.peak = max(self.peak, self.live)
        # torch keeps the Python object of a storage alive as long as the storage.
        weakref.finalize(storage, self._remove, key).atexit = False

    def _remove(self, key: int) -> None:
        with self._lock:
            self.live -= self._sizes.pop(key)

    @staticmethod
    def keep_in_place(model: nn.Module) -> None:
        """Make ``model.to(device)`` do nothing from now on: fake parameters cannot be moved."""
        for module in model.modules():
            module._apply = _stay(module)  # type: ignore[method-assign]


def _stay(module: nn.Module) -> Callable[..., nn.Module]:
    return lambda function, recurse=True: module


class _CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the outputs of every operation on one thread. It is entered only once."""

    def __init__(self, meter: ByteMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self._meter.values:
            if func is torch.ops.aten._local_scalar_dense.default:
                return 0  # `item()` of a fake tensor, which seeds a step: any number will do.
            if func is torch.ops.aten.equal.default:
                return True  # A recomputation is compared with its forward.
        outputs = func(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                self._meter.add(output)
        return outputs


class CountedExecutor(InlineExecutor):
    """A CPU device whose tasks run, counted by ``meter``, on the thread of the pipeline's loop."""

    def __init__(self, device: str, meter: ByteMeter) -> None:
        super().__init__(device)
        self._meter = meter

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Run the tasks now. A dispatch mode applies to one thread, so every call enters its own."""
        with self._meter.counting():
            super().submit(assignments)
