"""Cuts a mini-batch into micro-batches, and gathers their outputs."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncpipe.errors import ArgumentTypeError, BatchError, StageError
from asyncpipe.ops.model.descriptions import decode, encode
from asyncpipe.ops.model.nested import Structure, flatten, lost_attribute, places, rebuild

__all__ = [
    "Arguments",
    "CutBatch",
    "Microbatches",
    "NoChunk",
    "Packet",
    "cut",
    "cut_alike",
    "gather",
    "has_loss",
    "keywords",
    "without_no_chunk",
]


class Arguments(NamedTuple):
    """Positional and keyword arguments of a model or a loss, as one value: ``Arguments.of(ids, mask=mask)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Arguments:
        """The arguments of this call."""
        return cls(args, kwargs)

    @classmethod
    def wrap(cls, value: Any) -> Arguments:
        """``value`` if it is ``Arguments``, else the arguments of a call with ``value`` alone."""
        return value if isinstance(value, Arguments) else cls((value,), {})


def keywords(batch: Any) -> Any:
    """``batch``, or the keyword arguments that it stands for if it is a ``UserDict``, as a tokenizer's batches are."""
    if isinstance(batch, Microbatches):
        return Microbatches(map(keywords, batch.pieces))
    return Arguments((), dict(batch)) if isinstance(batch, UserDict) else batch


class NoChunk:
    """A tensor that is not cut: every micro-batch gets all of it. ``NoChunk(mask)``."""

    def __init__(self, tensor: Tensor) -> None:
        """Raises ``ArgumentTypeError`` for anything but a tensor: other values are never cut."""
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(
                f"NoChunk takes a tensor, got {type(tensor).__name__}; other values are not cut anyway"
            )
        self.tensor = tensor


class Microbatches:
    """Micro-batches that the caller has cut. Their tensors may differ in every dimension.

    Each is a nested value or ``Arguments``, as a mini-batch is, and has as many samples as its first tensor. The step's
    outputs are then a list.
    """

    def __init__(self, pieces: Iterable[Any]) -> None:
        """Raises ``BatchError`` if ``pieces`` is empty."""
        self.pieces = list(pieces)
        if not self.pieces:
            raise BatchError("Microbatches needs at least one micro-batch, got none")

    def __len__(self) -> int:
        return len(self.pieces)


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A mini-batch, cut into micro-batches."""

    pieces: list[Any]
    sizes: list[int]
    """Samples of each."""
    ready_made: bool
    """Whether the caller has cut them (``Microbatches``)."""

    def with_samples(self, name: str = "the input") -> CutBatch:
        """This, if every micro-batch has a sample; raises ``BatchError`` otherwise: there is no mean loss of none."""
        if 0 in self.sizes:
            place = f"micro-batch {self.sizes.index(0)} of {name}" if self.ready_made else name
            raise BatchError(f"{place} is empty; give at least one sample")
        return self


_LONE: Sequence[tuple[Any] | None] = (None,)
"""The rest of a packet that is a tensor."""


class Packet:
    """A nested value whose tensors are in one list. This is what stages send to each other.

    ``tensors`` may be replaced by a list of the same length.
    """

    __slots__ = ("_rest", "_structure", "count", "tensors", "wants_gradient")

    def __init__(self, value: Any) -> None:
        self._structure: Structure | None = None
        self._rest: Sequence[tuple[Any] | None] = _LONE
        """For each leaf that is no tensor, the leaf."""
        self.count = 1
        if isinstance(value, Tensor):
            # Nearly always, and that costs nothing.
            self.tensors: list[Tensor] = [value]
            self.wants_gradient = [value.requires_grad]
            """For each tensor, whether its sender uses a gradient of it."""
            return
        leaves, self._structure = flatten(value)
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.count = len(self.tensors)
        self.wants_gradient = [tensor.requires_grad for tensor in self.tensors]
        self._rest = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def rebuild(self, tensors: Iterable[Tensor]) -> Any:
        """The nested value, with ``tensors`` in place of its own. Takes ``count`` of an iterator."""
        if self._rest is _LONE:
            return next(iter(tensors))
        remaining = iter(tensors)
        return rebuild(self._structure, [next(remaining) if rest is None else rest[0] for rest in self._rest])

    def shell(self) -> bytes:
        """All but the tensors, for another process. Raises ``StageError`` if a value cannot be sent."""
        if self._structure is None and self.count:
            return _ONE_TENSOR[self.wants_gradient[0]]
        return encode((self._structure, self._rest, self.wants_gradient))

    @classmethod
    def from_shell(cls, shell: bytes, tensors: list[Tensor]) -> Packet:
        """The packet whose ``shell`` this is, with these tensors. Raises some error if it is none."""
        packet = cls.__new__(cls)
        packet.restore(shell, tensors)
        return packet

    def restore(self, shell: bytes, tensors: list[Tensor]) -> None:
        """Become the packet whose ``shell`` this is, as ``from_shell``."""
        if shell in _ONE_TENSOR:
            self._structure, self._rest, self.wants_gradient = None, _LONE, [shell == _ONE_TENSOR[True]]
        else:
            self._structure, self._rest, self.wants_gradient = decode(shell)
        self.tensors = tensors
        self.count = len(tensors)


_ONE_TENSOR = (b"0", b"1")
"""The shells of a single tensor, without and with a gradient."""


def cut(batch: Any, microbatches: int, *, dim: int = 0, name: str = "the input") -> CutBatch:
    """``batch`` cut into ``microbatches`` micro-batches, whose sizes differ by at most one, larger ones first.

    A batch with fewer samples gives one micro-batch a sample, and one with none a single empty one. Samples are along
    dimension ``dim``, whose size is the same in all tensors but those in ``NoChunk``. Micro-batches get views of the
    tensors, and other values unchanged. ``Microbatches`` are not cut again. Raises ``BatchError`` if there is no tensor
    to cut, if a tensor lacks that dimension, or if tensors differ in their number of samples.
    """
    if isinstance(batch, Microbatches):
        places = [f"micro-batch {i} of {name}" for i in range(len(batch))]
        sizes = [_sizes(piece, dim, place)[0][1] for piece, place in zip(batch.pieces, places, strict=True)]
        return CutBatch([without_no_chunk(piece) for piece in batch.pieces], sizes, ready_made=True)
    size = _batch_size(batch, dim, name)
    count = max(1, min(microbatches, size))
    sizes = [size // count + (i < size % count) for i in range(count)]
    return CutBatch(_split(batch, sizes, dim), sizes, ready_made=False)


def cut_alike(batch: Any, like: CutBatch, *, dim: int = 0) -> list[Any]:
    """``batch`` cut into micro-batches of the same sizes as those of ``like``.

    A value without tensors goes to every micro-batch. Raises ``BatchError`` if its tensors have another number of
    samples, or if it is another number of ``Microbatches``.
    """
    if isinstance(batch, Microbatches):
        if len(batch) != len(like.pieces):
            raise BatchError(f"the target has {len(batch)} micro-batches, but the input has {len(like.pieces)}")
        return [without_no_chunk(piece) for piece in batch.pieces]
    if any(isinstance(leaf, Tensor) for leaf in _flatten(batch)[0]):
        size = _batch_size(batch, dim, "the target")
        if size != sum(like.sizes):
            raise BatchError(f"the target has {size} samples, but the input has {sum(like.sizes)}; they must be equal")
    return _split(batch, like.sizes, dim)


def _split(batch: Any, sizes: list[int], dim: int) -> list[Any]:
    leaves, structure = _flatten(batch)
    columns = [_pieces(leaf, sizes, dim) if isinstance(leaf, Tensor) else [_bare(leaf)] * len(sizes) for leaf in leaves]
    return [rebuild(structure, [column[i] for column in columns]) for i in range(len(sizes))]


def _pieces(tensor: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    if not tensor.is_nested:
        return torch.split(tensor, sizes, dim)
    parts = iter(tensor.unbind())  # Nested tensors are split by their samples only, and not by views.
    return [torch.nested.as_nested_tensor(list(islice(parts, size)), layout=tensor.layout) for size in sizes]


def without_no_chunk(value: Any) -> Any:
    """``value`` with each ``NoChunk`` replaced by its tensor."""
    leaves, structure = _flatten(value)
    return rebuild(structure, map(_bare, leaves))


def _flatten(batch: Any) -> tuple[list[Any], Structure | None]:
    return flatten(batch, wraps=(NoChunk,), error=BatchError)


def _bare(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


def _batch_size(batch: Any, dim: int, name: str) -> int:
    sizes = _sizes(batch, dim, name)
    if len({size for _, size in sizes}) > 1:
        listed = ", ".join(f"{place} has {size}" for place, size in sizes)
        raise BatchError(
            f"the tensors of {name} disagree in their batch size: {listed}; NoChunk(tensor) gives one to every "
            "micro-batch whole"
        )
    return sizes[0][1]


def _sizes(batch: Any, dim: int, name: str) -> list[tuple[str, int]]:
    """For each tensor in ``batch``: where it is, and its number of samples."""
    leaves, structure = _flatten(batch)
    found = zip(places(structure), leaves, strict=True)
    tensors = [(name + place, leaf) for place, leaf in found if isinstance(leaf, Tensor)]
    if not tensors:
        raise BatchError(f"{name} holds no tensor, got {type(batch).__name__}; micro-batches are cut from tensors")
    for place, tensor in tensors:
        if (attribute := lost_attribute(tensor)) is not None:
            raise BatchError(
                f"{place} is a tensor with the attribute {attribute!r}, which its micro-batches would lack; give that "
                "as an argument of its own"
            )
        if tensor.dim() <= dim:
            what = "without dimensions" if tensor.dim() == 0 else f"of shape {tuple(tensor.shape)}"
            raise BatchError(
                f"{place} is a tensor {what}; dimension {dim} must be the batch (NoChunk(tensor) gives "
                "it to every micro-batch whole)"
            )
    return [(place, tensor.size(dim)) for place, tensor in tensors]


def gather(outputs: Sequence[Any], dim: int = 0, weights: Sequence[float] = ()) -> Any:
    """One nested value from the outputs of the micro-batches.

    Tensors are concatenated along dimension ``dim`` (tensors without dimensions are stacked), ``None`` stays ``None``,
    and other values become a list with one entry per micro-batch. With ``weights``, an output without dimensions that
    is called ``loss`` becomes one number, the sum of what it is for each micro-batch times its weight. Raises
    ``StageError`` if the outputs differ in structure, or in their shapes besides that dimension.
    """
    flat = [flatten(output) for output in outputs]
    leaves, structure = flat[0]
    if any(other != structure for _, other in flat):
        raise StageError("the micro-batches' outputs differ in structure; they cannot be gathered")
    columns = [[row[k] for row, _ in flat] for k in range(len(leaves))]
    gathered = [_gathered(column, dim) for column in columns]
    if weights and (k := _loss_place(leaves, structure)) is not None:
        device = columns[k][0].device
        gathered[k] = sum(loss.to(device) * weight for loss, weight in zip(columns[k], weights, strict=True))
    return rebuild(structure, gathered)


def has_loss(output: Any) -> bool:
    """Whether the model has computed its loss: ``output.loss`` or ``output["loss"]``, without dimensions."""
    return _loss_place(*flatten(output)) is not None


def _loss_place(leaves: Sequence[Any], structure: Structure | None) -> int | None:
    for k, (place, leaf) in enumerate(zip(places(structure), leaves, strict=True)):
        if place in (".loss", "['loss']") and isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.dim():
            return k
    return None


def _gathered(column: list[Any], dim: int) -> Any:
    tensors = [isinstance(leaf, Tensor) for leaf in column]
    if not any(tensors):
        return None if all(leaf is None for leaf in column) else column
    if not all(tensors):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in column}))
        raise StageError(f"an output is a tensor for some micro-batches and not for others ({kinds})")
    shapes = {tuple(leaf.shape[:dim] + leaf.shape[dim + 1 :]) for leaf in column}
    column = [leaf.to(column[0].device) for leaf in column]  # Replicas have theirs.
    if column[0].dim() == 0 and len(shapes) == 1:
        return torch.stack(column)
    if len(shapes) > 1 or column[0].dim() <= dim:
        listed = ", ".join(str(tuple(leaf.shape)) for leaf in column)
        raise StageError(f"outputs of shapes {listed} cannot be concatenated along the batch dimension {dim}")
    return torch.cat(column, dim)
