"""The parameters of a stage as vectors of some size, which replicas add up in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["Bucket", "Overlap", "buckets"]


class Overlap(NamedTuple):
    """What a part of a bucket has of one parameter."""

    number: int
    """That of the parameter in the bucket."""
    elements: slice
    """Of the parameter."""
    place: slice
    """Of the part."""


class Bucket(NamedTuple):
    """Some parameters of one type, behind each other as one vector."""

    first: int
    """The number of the first parameter of the stage."""
    ends: tuple[int, ...]
    """Where each of them ends in the vector, in elements."""

    @property
    def size(self) -> int:
        """Elements of the vector."""
        return self.ends[-1]

    def part(self, replica: int, replicas: int) -> range:
        """The elements that one of so many replicas adds up."""
        length = -(-self.size // replicas)
        return range(min(self.size, replica * length), min(self.size, (replica + 1) * length))

    def overlaps(self, part: range) -> Iterator[Overlap]:
        """What ``part`` has of each parameter of which it has something."""
        start = 0
        for number, end in enumerate(self.ends):
            low, high = max(start, part.start), min(end, part.stop)
            if low < high:
                yield Overlap(number, slice(low - start, high - start), slice(low - part.start, high - part.start))
            start = end


def buckets(parameters: Sequence[Tensor], most_bytes: int) -> list[Bucket]:
    """Spread ``parameters`` over buckets of at most so many bytes, or of one larger parameter."""
    found: list[list[Tensor]] = []
    for parameter in parameters:
        if found:
            last = found[-1]
            fits = sum(each.nbytes for each in last) + parameter.nbytes <= most_bytes
            if fits and last[0].dtype is parameter.dtype:
                last.append(parameter)
                continue
        found.append([parameter])
    made, first = [], 0
    for group in found:
        ends, end = [], 0
        for parameter in group:
            end += parameter.numel()
            ends.append(end)
        made.append(Bucket(first, tuple(ends)))
        first += len(group)
    return made
