"""Rows: the replicas of a pipeline in one task graph.

Each row is a whole pipeline: its stages, devices and micro-batches come behind those of the row before, so a stage, a
device and a micro-batch have one number in the whole graph. A mini-batch is spread over the rows in order, evenly::

                 devices      stages       micro-batches
    row 0        0 1          0 1          0 1 2
    row 1        2 3          2 3          3 4
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from asyncpipe.core.schedules.protocol import Action, Shape

__all__ = ["Rows"]


@dataclass(frozen=True, slots=True)
class Rows:
    """How the stages, devices and micro-batches of a step are spread over its rows."""

    stages: int
    """Of each row."""
    devices: int
    """Of each row."""
    microbatches: tuple[int, ...]
    """Of each row; a small mini-batch leaves some without any."""

    @classmethod
    def of(cls, shape: Shape, count: int) -> Rows:
        """``count`` rows, of all stages, devices and micro-batches in ``shape``."""
        even, more = divmod(shape.microbatches, count)
        return cls(shape.stages // count, shape.devices // count, tuple(even + (row < more) for row in range(count)))

    def __len__(self) -> int:
        return len(self.microbatches)

    def shapes(self) -> Iterator[tuple[int, Shape]]:
        """Each row that has a micro-batch, with its shape."""
        for row, microbatches in enumerate(self.microbatches):
            if microbatches:
                yield row, Shape(self.stages, microbatches, self.devices)

    def microbatches_of(self, row: int) -> range:
        """The micro-batches of a row."""
        ends = [0, *accumulate(self.microbatches)]
        return range(ends[row], ends[row + 1])

    def row_of(self, microbatch: int) -> int:
        """The row of a micro-batch."""
        return next(row for row, end in enumerate(accumulate(self.microbatches)) if microbatch < end)

    def stage_row(self, stage: int) -> int:
        """The row of a stage."""
        return stage // self.stages

    def replicas(self, stage: int) -> range:
        """The stages of all rows with the same layers as ``stage``."""
        return range(stage % self.stages, self.stages * len(self), self.stages)

    def place(self, microbatch: int) -> tuple[int, int]:
        """The number of a micro-batch in its row, and how many the row has."""
        own = self.microbatches_of(self.row_of(microbatch))
        return microbatch - own.start, len(own)

    def is_last(self, stage: int) -> bool:
        """Whether ``stage`` is the last one of its row."""
        return (stage + 1) % self.stages == 0

    def last_stage(self, microbatch: int) -> int:
        """The last stage that a micro-batch comes to."""
        return (self.row_of(microbatch) + 1) * self.stages - 1

    def in_graph(self, action: Action, row: int) -> Action:
        """An action of a row's own schedule, with its numbers in the whole graph."""
        kind, i, j = action
        return Action(kind, i + self.microbatches_of(row).start, j + row * self.stages)

    def in_row(self, action: Action) -> tuple[Action, Shape]:
        """The inverse of ``in_graph``, with the shape of the row."""
        kind, i, j = action
        row = self.stage_row(j)
        own = self.microbatches_of(row)
        return Action(kind, i - own.start, j % self.stages), Shape(self.stages, len(own), self.devices)
