"""A model's buffers as they were before a step that failed: running statistics and the like.

Gradients are put back by the pipeline, weights are not touched before a step is through; but a batch norm counts the
micro-batches that it saw, whatever became of the others. Copies of all buffers at every step would be dear where a
model keeps tables in some, so after the first step only those are copied that have changed: in their values, once, as
a batch norm's change behind torch's back, and by torch's own count of changes from then on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["BufferRollback"]


class _Kept(NamedTuple):
    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None

    @property
    def key(self) -> tuple[int, str]:
        return id(self.module), self.name

    @property
    def counted(self) -> bool:
        """Whether torch knows of a change."""
        return _version(self.buffer) != self.version

    @property
    def changed(self) -> bool:
        return self.counted or (self.copy is not None and not torch.equal(self.copy, self.buffer))


class BufferRollback:
    """Keeps the buffers of ``module``, and puts them back. Not while a step runs; any thread."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: list[_Kept] = []
        self._changing: set[tuple[int, str]] = set()
        self._first = True

    def keep(self) -> None:
        """What they are now is what ``undo`` will make of them."""
        self._changing |= {kept.key for kept in self._kept if kept.key not in self._changing and kept.changed}
        first, self._first = self._first, False
        self._kept = [
            _keep(module, name, buffer, copied=first or (id(module), name) in self._changing)
            for module in self._module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def undo(self) -> bool:
        """Put them back; false, and nothing is changed, where one that never changed before has no copy."""
        if any(kept.counted and kept.copy is None for kept in self._kept):
            return False
        self._kept = [_put_back(kept) for kept in self._kept]
        return True


def _keep(module: nn.Module, name: str, buffer: Tensor, *, copied: bool) -> _Kept:
    return _Kept(module, name, buffer, _version(buffer), buffer.detach().clone() if copied else None)


def _put_back(kept: _Kept) -> _Kept:
    kept.module._buffers[kept.name] = kept.buffer  # A module may have put another one in its place.
    if kept.copy is None or not kept.changed:
        return kept
    with torch.no_grad():
        kept.buffer.copy_(kept.copy)
    return kept._replace(version=_version(kept.buffer))


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
