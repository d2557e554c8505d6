"""Counted bytes: what tensors occupy, told by what they are and not by an allocator, so the same on every machine.

Two counters. ``ByteMeter`` sees every storage that torch makes while it counts, temporaries included, and sees it
die. ``SavedBytes`` sees what waits for a backward: what autograd has saved, and stage inputs that a recomputation
starts from. Neither sees the scratch memory inside a kernel, nor what an allocator keeps in reserve.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncpipe.runtime.executor import Assignment
from asyncpipe.testing import InlineExecutor

__all__ = ["ByteMeter", "CountedExecutor", "SavedBytes"]


class ByteMeter:
    """Live bytes of the storages made while it counts, and their peak. May count on several threads at once.

    A storage counts once, however many tensors share it, from the operation that makes it until it is freed; one
    that is resized keeps its first size.

    Without ``values``, tensors made while it counts have shapes and storages of a size, but no memory and nothing
    in them: a model of any size is counted at once, by the same operations. Then one thread at a time may count.
    """

    def __init__(self, *, values: bool = True) -> None:
        self.values = values
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        # Reentrant: the garbage collector may free a storage in the middle of an addition.
        self._lock = threading.RLock()
        self._fake = None if values else FakeTensorMode()

    @contextmanager
    def counting(self) -> Iterator[ByteMeter]:
        """Counts what this thread does inside, and what a CPU backward that it starts does."""
        if self._fake is None:
            with _Counting(self):
                yield self
        else:
            with self._fake, _Counting(self):
                yield self

    def restart(self) -> None:
        """The peak is what lives now."""
        self.peak = self.live

    def add(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor``, unless it is counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._sizes:
                return
            self._sizes[key] = size = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
        # torch keeps the Python object of a storage for as long as the storage lives.
        weakref.finalize(storage, self._remove, key).atexit = False

    def _remove(self, key: int) -> None:
        with self._lock:
            self.live -= self._sizes.pop(key)

    @staticmethod
    def keep_in_place(model: nn.Module) -> None:
        """``model.to(device)`` does nothing from now on: parameters without values cannot be moved."""
        for module in model.modules():
            module._apply = _stay(module)  # type: ignore[method-assign]


def _stay(module: nn.Module) -> Callable[..., nn.Module]:
    return lambda function, recurse=True: module


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the outputs of every operation on one thread. One for each time that it is entered."""

    def __init__(self, meter: ByteMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not self._meter.values:
            return 0  # A number is taken of a tensor without values, to seed a step: any will do.
        outputs = func(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                self._meter.add(output)
        return outputs


class CountedExecutor(InlineExecutor):
    """A CPU device whose tasks ``meter`` counts: one at a time, on the thread of the pipeline's loop."""

    def __init__(self, device: str, meter: ByteMeter) -> None:
        super().__init__(device)
        self._meter = meter

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Run the tasks, now; dispatch modes belong to a thread, so this one enters its own."""
        with self._meter.counting():
            super().submit(assignments)


class SavedBytes:
    """Bytes that wait for a backward, on whatever threads: now, and at their peaks.

    ``saved``: storages that autograd keeps for a backward; ``borders``: those given to ``note_input`` that live;
    ``total``: those that are either. ``uncounted``: tensors whose storages count as neither, such as parameters.
    """

    def __init__(self, uncounted: Iterable[Tensor] = ()) -> None:
        self.live = dict.fromkeys(("saved", "borders", "total"), 0)
        self.peak = dict(self.live)
        self._uncounted = {tensor.untyped_storage()._cdata for tensor in uncounted}
        self._users: dict[int, dict[str, int]] = {}
        self._lock = threading.RLock()

    def watching(self) -> AbstractContextManager[Any]:
        """Counts what autograd saves in this thread inside."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def note_input(self, tensor: Tensor) -> None:
        """``tensor`` is a stage's input: its storage counts until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._uncounted or self._users.get(key, {}).get("borders"):
                return
            self._begin(key, "borders", storage.nbytes())
        weakref.finalize(storage, self._end, key, "borders", storage.nbytes()).atexit = False

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata in self._uncounted:
            return tensor.detach()
        with self._lock:
            self._begin(storage._cdata, "saved", storage.nbytes())
        # Detached: an operation's own output, kept as it is, would keep the operation alive.
        return _Saved(tensor.detach(), self._end)

    def _begin(self, key: int, reason: str, size: int) -> None:
        users = self._users.setdefault(key, {})
        users[reason] = users.get(reason, 0) + 1
        self._change(reason, users[reason] == 1, size)
        self._change("total", sum(users.values()) == 1, size)

    def _end(self, key: int, reason: str, size: int) -> None:
        with self._lock:
            users = self._users[key]
            users[reason] -= 1
            self._change(reason, not users[reason], -size)
            if not any(users.values()):
                del self._users[key]
                self._change("total", True, -size)

    def _change(self, name: str, applies: bool, size: int) -> None:
        if applies:
            self.live[name] += size
            self.peak[name] = max(self.peak[name], self.live[name])


class _Saved:
    """What autograd keeps in place of a tensor that it saves; takes the tensor's bytes back when it is dropped."""

    __slots__ = ("_end", "tensor")

    def __init__(self, tensor: Tensor, end: Callable[[int, str, int], None]) -> None:
        self.tensor = tensor
        self._end = end

    def __del__(self) -> None:
        storage = self.tensor.untyped_storage()
        self._end(storage._cdata, "saved", storage.nbytes())


def _unpack(packed: Tensor | _Saved) -> Tensor:
    return packed.tensor if isinstance(packed, _Saved) else packed
