"""Scatter a mini-batch into micro-batches, and gather their outputs again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from asyncpipe.errors import BatchError, MicrobatchError, StageError

__all__ = ["Packet", "check_microbatches", "gather", "microbatch_sizes", "scatter"]


class Packet:
    """A nested value taken apart: its tensors in one list, the rest as it was.

    This is what crosses stage borders. ``tensors`` may be replaced by others of the same number.
    """

    __slots__ = ("_rest", "_spec", "tensors")

    def __init__(self, value: Any) -> None:
        leaves, self._spec = tree_flatten(value)
        self.tensors: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._rest = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The nested value with ``tensors`` in place of its own."""
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if rest is None else rest[0] for rest in self._rest], self._spec)


def check_microbatches(microbatches: int) -> int:
    """``microbatches`` if it is a positive integer; raises ``MicrobatchError`` otherwise, without any cast."""
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise MicrobatchError(f"microbatches must be a positive integer, got {microbatches!r}")
    return microbatches


def microbatch_sizes(batch: Any, microbatches: int, name: str = "the input") -> list[int]:
    """Samples per micro-batch: as even as can be, larger ones first, fewer micro-batches for a small batch.

    The batch size is that of dimension 0, which all tensors in ``batch`` must share. Raises ``BatchError``
    where there is no tensor, a tensor without dimensions, an empty batch or a disagreement.
    """
    size = _batch_size(batch, name)
    count = min(microbatches, size)
    return [size // count + (i < size % count) for i in range(count)]


def scatter(batch: Any, sizes: Sequence[int], name: str = "the input") -> list[Any]:
    """One nested value per micro-batch: views of the tensors in ``batch`` along dimension 0, the rest repeated.

    Raises ``BatchError`` if the tensors do not have ``sum(sizes)`` samples.
    """
    leaves, spec = tree_flatten(batch)
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        size = _batch_size(batch, name)
        if size != sum(sizes):
            raise BatchError(f"{name} has {size} samples, but the input has {sum(sizes)}; they must be equal")
    columns = [torch.split(leaf, list(sizes)) if isinstance(leaf, Tensor) else [leaf] * len(sizes) for leaf in leaves]
    return [tree_unflatten([column[i] for column in columns], spec) for i in range(len(sizes))]


def _batch_size(batch: Any, name: str) -> int:
    tensors = [(path, leaf) for path, leaf in tree_flatten_with_path(batch)[0] if isinstance(leaf, Tensor)]
    if not tensors:
        raise BatchError(f"{name} holds no tensor, got {type(batch).__name__}; micro-batches are cut from tensors")
    for path, tensor in tensors:
        if tensor.dim() == 0:
            raise BatchError(f"{name}{keystr(path)} is a tensor without dimensions; dimension 0 must be the batch")
    sizes = {f"{name}{keystr(path)}": tensor.size(0) for path, tensor in tensors}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{place} has {size}" for place, size in sizes.items())
        raise BatchError(f"the tensors of {name} disagree in their batch size: {listed}")
    size = next(iter(sizes.values()))
    if size == 0:
        raise BatchError(f"{name} is empty; give at least one sample")
    return size


def gather(outputs: Sequence[Any]) -> Any:
    """One nested value from those of the micro-batches.

    Tensors are concatenated along dimension 0 (those without dimensions are stacked), everything else becomes
    a list with one entry per micro-batch. Raises ``StageError`` if the micro-batches differ in structure.
    """
    flat: list[tuple[list[Any], TreeSpec]] = [tree_flatten(output) for output in outputs]
    leaves, spec = flat[0]
    if any(other != spec for _, other in flat):
        raise StageError("the micro-batches' outputs differ in structure; they cannot be gathered")
    columns = [[row[k] for row, _ in flat] for k in range(len(leaves))]
    return tree_unflatten([_gathered(column) for column in columns], spec)


def _gathered(column: list[Any]) -> Any:
    if not all(isinstance(leaf, Tensor) for leaf in column):
        return column
    return torch.stack(column) if column[0].dim() == 0 else torch.cat(column)
