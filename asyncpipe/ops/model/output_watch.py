"""A stage whose recomputation computes other values than its forward is refused: its gradients would be wrong.

The forward has no graph, so a layer that asks whether a tensor requires a gradient gets another answer there. A layer
may also keep state outside its buffers, or draw by something else than torch.

Compared are elements of the first micro-batch's outputs: in every step on a CPU, where that takes some 10 µs; on an
accelerator, where the host waits for them, until a recomputation was right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncpipe.errors import RecomputeError

__all__ = ["OutputWatch"]

_ELEMENTS = 1024
"""How many of an output are compared, about; all of them if there are less."""

_TOLERANCE, _TOLERANCE_OF_HALVES = 0.01, 0.1
"""How far the elements may be off, relative to their norm. Two runs may use other kernels, or add in another order."""

_NOISE = 1e-4
"""Added to the norm, for a loss whose terms cancel."""


class OutputWatch:
    """Compares what one stage sends in a first run and in the recomputation of the same micro-batch."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._has_waited = False
        """Whether the host has waited for an accelerator to compare."""

    def sample(self, microbatch: int, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """What to keep of a first run; empty if it is not to be compared."""
        if microbatch or self._has_waited:
            return []
        return [_sample(tensor) for tensor in outputs]

    def compare(self, first: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> None:
        """Raise ``RecomputeError`` if a recomputation's outputs that gradients come from are not those of the first."""
        if not first:
            return
        pairs = [(a, b) for a, b in zip(first, outputs, strict=False) if a is not None and b.requires_grad]
        if len(first) != len(outputs) or not all(_is_close(a, _sample(b)) for a, b in pairs):
            raise RecomputeError(
                f"stage {self._stage} computed other values when it was recomputed than in its forward, so its "
                "gradients would be wrong; does it ask whether a tensor requires a gradient (the forward has no "
                "graph), keep state outside its buffers, or draw by Python or numpy? Change that, or give the "
                "pipeline checkpoint='never'"
            )
        if any(not tensor.is_cpu for tensor, _ in pairs):
            self._has_waited = True


def _sample(tensor: Tensor) -> Tensor | None:
    """Copies of some elements from everywhere in ``tensor``; ``None`` if it cannot carry a gradient."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
        return None
    # An odd distance meets every column of a matrix.
    distance = tensor.numel() // _ELEMENTS | 1
    chosen = torch.arange(0, tensor.numel(), distance, device=tensor.device)
    # torch has few kernels for its smallest types, so their bits are taken.
    bits = torch.int32 if tensor.dtype is torch.complex32 else torch.uint8 if tensor.itemsize == 1 else tensor.dtype
    return tensor.detach().view(bits).take(chosen).view(tensor.dtype)


def _is_close(one: Tensor, other: Tensor | None) -> bool:
    """Whether two samples are equal but for rounding; what is not finite is not compared."""
    if other is None or one.shape != other.shape:
        return False
    is_half = min(torch.finfo(each.dtype).bits for each in (one, other)) < 32
    tolerance = _TOLERANCE_OF_HALVES if is_half else _TOLERANCE
    one, other = (sample.to(torch.complex64 if sample.is_complex() else torch.float32) for sample in (one, other))
    return torch.equal(one, other) or not (one - other).norm() > tolerance * (one.norm() + _NOISE)
