"""The parameters of a stage as vectors of some size, which replicas add up in parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["Bucket", "Section", "SectionRun", "buckets"]

ALIGNED = 64
"""Elements. A tensor that begins at a multiple of them arrives at another worker without being copied again."""
LARGE = 1 << 17
"""Elements. Smaller tensors are copied behind each other, to be handled as one."""


class Section(NamedTuple):
    """What a part of a bucket has of one parameter."""

    number: int
    """That of the parameter in the bucket."""
    elements: slice
    """Of the parameter."""
    place: slice
    """Of the part."""


class SectionRun(NamedTuple):
    """What is handled as one tensor: a large overlap, or some small ones in a row."""

    overlaps: list[Section]
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
        return range(self._cut(replica, replicas), self._cut(replica + 1, replicas))

    def _cut(self, replica: int, replicas: int) -> int:
        """Where the part of ``replica`` begins."""
        cut = min(self.size, replica * -(-self.size // replicas))
        number = bisect_right(self.ends, cut)
        start = self.ends[number - 1] if number else 0
        is_large = cut < self.size and self.ends[number] - start >= LARGE
        return cut - (cut - start) % ALIGNED if is_large else cut

    def overlaps(self, part: range) -> Iterator[Section]:
        """What ``part`` has of each parameter of which it has something."""
        start = 0
        for number, end in enumerate(self.ends):
            low, high = max(start, part.start), min(end, part.stop)
            if low < high:
                yield Section(number, slice(low - start, high - start), slice(low - part.start, high - part.start))
            start = end

    def runs(self, part: range) -> Iterator[SectionRun]:
        """What ``part`` has, in tensors that are large or few."""
        run: list[Section] = []
        for overlap in self.overlaps(part):
            if run and overlap.place.stop - run[0].place.start > LARGE:
                yield SectionRun(run, slice(run[0].place.start, run[-1].place.stop))
                run = []
            run.append(overlap)
        if run:
            yield SectionRun(run, slice(run[0].place.start, run[-1].place.stop))


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
