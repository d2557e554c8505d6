"""Images of modules: modules of the same class and attributes, with some other children and tensors.

What several stages have parts of is not changed for them: each stage has an image, which shares everything else with
the original. Ties make images with replicas of tensors (``ties.py``), models of transformers images without the layers
of other stages (``transformers/image.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from asyncpipe.ops.torch_internals import refresh_flat_weights

__all__ = ["ModuleImage"]


class ModuleImage:
    """An image of one module, which is its ``copy``."""

    def __init__(
        self, original: nn.Module, children: Mapping[str, nn.Module | None], tensors: Mapping[str, Tensor]
    ) -> None:
        """``children`` and ``tensors``: what the image has in place of the original's, by name."""
        self.copy: nn.Module = type(original).__new__(type(original))
        self.original = original
        self._children = children
        self._tensors = tensors
        self.refresh()

    def refresh(self) -> None:
        """Copy to the image what was changed on its original: training mode, hooks, other attributes."""
        tables: dict[str, Any] = {
            table: {name: self._tensors.get(name, value) for name, value in getattr(self.original, table).items()}
            for table in ("_parameters", "_buffers")
            # A table without a replaced tensor is the original's own, in which a forward may replace a buffer.
            if not self._tensors.keys().isdisjoint(getattr(self.original, table))
        }
        tables["_modules"] = {**self.original._modules, **self._children}
        self.copy.__dict__.update(self.original.__dict__, **tables)
        refresh_flat_weights(self.copy)
