"""The way back of input gradients: from the stages that took a micro-batch's tensors to the caller's own tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from asyncpipe.ops.model.microbatch import Microbatches, NoChunk
from asyncpipe.ops.model.stage import CALLER

__all__ = ["CallerGradients"]


@dataclass(slots=True, eq=False)
class _CallerTensor:
    """A tensor of the caller's that requires a gradient, and what became of it."""

    tensor: Tensor
    whole: bool
    """Whether micro-batches got it whole: their gradients are added, else they are put side by side."""
    shapes: dict[int, torch.Size] = field(default_factory=dict)
    """That of what each micro-batch got."""


class CallerGradients:
    """Which tensors of the caller require gradients, and how theirs come from those of the micro-batches."""

    def __init__(self, batch: Any, pieces: Sequence[Any], takes: Sequence[Mapping[int, Any]], dim: int) -> None:
        """``batch`` as the caller gave it, the micro-batches cut from it, and what each stage takes of them."""
        self._dim = dim
        places = _ends(batch, pieces)
        self._found = list(dict.fromkeys(places.values()))
        # For each link from the caller, the ends of its tensors in their order.
        self._links: dict[tuple[int, int], list[_CallerTensor | None]] = {
            (i, stage): [places.get((i, id(leaf))) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            for i, takes_of in enumerate(takes)
            for stage, value in takes_of.items()
        }

    @property
    def ends(self) -> list[Tensor]:
        """The caller's tensors that require gradients."""
        return [end.tensor for end in self._found]

    def collect(self, gradients: dict[tuple[int, int, int], list[Tensor | None]]) -> list[Tensor | None]:
        """The gradients of ``ends``; takes those of the micro-batches, out of the table."""
        parts: dict[int, dict[int, Tensor]] = {id(end): {} for end in self._found}
        for (i, stage), ends in self._links.items():
            for end, gradient in zip(ends, gradients.pop((i, stage, CALLER), [None] * len(ends)), strict=True):
                if end is not None and gradient is not None:
                    moved = gradient.to(end.tensor.device)
                    mine = parts[id(end)]
                    mine[i] = mine[i] + moved if i in mine else moved
        return [self._whole(end, parts[id(end)]) for end in self._found]

    def _whole(self, end: _CallerTensor, parts: dict[int, Tensor]) -> Tensor | None:
        if not parts:
            return None
        if end.whole:
            return sum(gradient for _, gradient in sorted(parts.items()))  # type: ignore[return-value]
        pieces = [parts[i] if i in parts else end.tensor.new_zeros(shape) for i, shape in sorted(end.shapes.items())]
        return torch.cat(pieces, self._dim)


def _ends(batch: Any, pieces: Sequence[Any]) -> dict[tuple[int, int], _CallerTensor]:
    """The ends by micro-batch and id of what it got of them."""
    found: dict[tuple[int, int], _CallerTensor] = {}
    places: dict[tuple[int, int], _CallerTensor] = {}
    ready_made = isinstance(batch, Microbatches)
    batches = batch.pieces if isinstance(batch, Microbatches) else [batch] * len(pieces)
    for i, (given, piece) in enumerate(zip(batches, pieces, strict=True)):
        for k, (leaf, part) in enumerate(zip(tree_leaves(given), tree_leaves(piece), strict=True)):
            tensor = leaf.tensor if isinstance(leaf, NoChunk) else leaf
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                place = (i, k) if ready_made else (0, k)
                end = places[i, id(part)] = found.setdefault(
                    place, _CallerTensor(tensor, ready_made or tensor is not leaf)
                )
                end.shapes[i] = part.shape
    return places
