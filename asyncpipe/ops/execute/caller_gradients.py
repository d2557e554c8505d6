"""Gradients of the caller's own input tensors, from those that stages made of the micro-batches' tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from asyncpipe.ops.model.microbatch import Microbatches, NoChunk
from asyncpipe.ops.model.nested import leaves_of, tensors_of
from asyncpipe.ops.model.stage import CALLER

__all__ = ["CallerGradients"]


@dataclass(slots=True, eq=False)
class _CallerTensor:
    """A tensor of the caller's that requires a gradient, and how micro-batches got it."""

    tensor: Tensor
    whole: bool
    """Whether each micro-batch got all of it. Their gradients are then added, and otherwise concatenated."""
    shapes: dict[int, torch.Size] = field(default_factory=dict)
    """The shape of what each micro-batch got."""


class CallerGradients:
    """Knows which tensors of the caller require gradients, and makes these from the gradients of micro-batches."""

    def __init__(self, batch: Any, pieces: Sequence[Any], caller_values: Sequence[Mapping[int, Any]], dim: int) -> None:
        """``batch`` as the caller gave it, the micro-batches cut from it, and what each stage takes of each."""
        self._dim = dim
        places = _ends(batch, pieces)
        self._found = list(dict.fromkeys(places.values()))
        self.ends = [end.tensor for end in self._found]
        """The caller's tensors that require gradients."""
        # For each tensor on a link from the caller, the caller's tensor that it comes from.
        self._links: dict[tuple[int, int], list[_CallerTensor | None]] = {
            (i, stage): [places.get((i, id(tensor))) for tensor in tensors_of(value)]
            for i, values in enumerate(caller_values)
            for stage, value in values.items()
        }

    def collect(self, gradients: dict[tuple[int, int, int], list[Tensor | None]]) -> list[Tensor | None]:
        """The gradients of ``ends``. Removes those of the micro-batches from the table ``gradients``."""
        parts: dict[_CallerTensor, dict[int, Tensor]] = {end: {} for end in self._found}
        for (i, stage), ends in self._links.items():
            for end, gradient in zip(ends, gradients.pop((i, stage, CALLER), [None] * len(ends)), strict=True):
                if end is not None and gradient is not None:
                    moved = gradient.to(end.tensor.device)
                    mine = parts[end]
                    mine[i] = mine[i] + moved if i in mine else moved
        return [self._whole(end, mine) for end, mine in parts.items()]

    def _whole(self, end: _CallerTensor, parts: dict[int, Tensor]) -> Tensor | None:
        if not parts:
            return None
        if end.whole:
            return sum(gradient for _, gradient in sorted(parts.items()))  # type: ignore[return-value]
        pieces = [parts[i] if i in parts else end.tensor.new_zeros(shape) for i, shape in sorted(end.shapes.items())]
        return torch.cat(pieces, self._dim)


def _ends(batch: Any, pieces: Sequence[Any]) -> dict[tuple[int, int], _CallerTensor]:
    """The caller's tensors by (micro-batch, id of the tensor that it got)."""
    found: dict[tuple[int, int], _CallerTensor] = {}
    places: dict[tuple[int, int], _CallerTensor] = {}
    ready_made = isinstance(batch, Microbatches)
    batches = batch.pieces if isinstance(batch, Microbatches) else [batch] * len(pieces)
    for i, (given, piece) in enumerate(zip(batches, pieces, strict=True)):
        for k, (leaf, part) in enumerate(zip(leaves_of(given, wraps=(NoChunk,)), leaves_of(piece), strict=True)):
            tensor = leaf.tensor if isinstance(leaf, NoChunk) else leaf
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                place = (i, k) if ready_made else (0, k)
                end = places[i, id(part)] = found.setdefault(
                    place, _CallerTensor(tensor, ready_made or tensor is not leaf)
                )
                end.shapes[i] = part.shape
    return places
