"""Restores a model's buffers (running statistics and the like) to their values before a failed step.

The pipeline restores gradients, and weights change only after the step, but a batch norm counts each micro-batch that
it has seen. A copy of all buffers at each step would be expensive for a model that keeps large tables in them. After
the first step, only buffers that have ever changed are copied. A change is detected by torch's version counter, and
after the first step by value as well, because a batch norm changes its buffers without counting.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.ops.torch_internals import version_of

__all__ = ["BufferRollback"]


class _SavedBuffer(NamedTuple):
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
        """Whether torch's version counter has recorded a change."""
        return _version(self.buffer) != self.version

    @property
    def changed(self) -> bool:
        return self.counted or (self.copy is not None and not torch.equal(self.copy, self.buffer))


class BufferRollback:
    """Saves and restores the buffers of ``module``; on any thread, but not while a step runs."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._saved: list[_SavedBuffer] = []
        self._changing: set[tuple[int, str]] = set()
        self._first = True

    @property
    def copied(self) -> list[str]:
        """The names of the buffers that the last ``save`` has copied."""
        return [saved.name for saved in self._saved if saved.copy is not None]

    def save(self) -> None:
        """Save the current values for ``restore``."""
        self._changing |= {saved.key for saved in self._saved if saved.key not in self._changing and saved.changed}
        first, self._first = self._first, False
        self._saved = [
            _save(module, name, buffer, copied=first or (id(module), name) in self._changing)
            for module in self._module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> bool:
        """Restore the saved values; false, without any change, if a changed buffer has no copy."""
        if any(saved.counted and saved.copy is None for saved in self._saved):
            return False
        self._saved = [_restore(saved) for saved in self._saved]
        return True


def _save(module: nn.Module, name: str, buffer: Tensor, *, copied: bool) -> _SavedBuffer:
    return _SavedBuffer(module, name, buffer, _version(buffer), buffer.detach().clone() if copied else None)


def _restore(saved: _SavedBuffer) -> _SavedBuffer:
    saved.module._buffers[saved.name] = saved.buffer  # The module may have replaced the tensor.
    if saved.copy is None or not saved.changed:
        return saved
    with torch.no_grad():
        saved.buffer.copy_(saved.copy)
    return saved._replace(version=_version(saved.buffer))


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else version_of(buffer)
