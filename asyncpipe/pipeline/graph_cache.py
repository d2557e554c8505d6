"""The task graphs of a pipeline: lowered when first needed.

Schedules have numbers, since another one may be followed while a step by the one before is being prepared: a step says
by which it runs, here and in every worker.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Phase, TaskGraph, Wiring
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.errors import ScheduleError

__all__ = ["GraphCache"]

_Key = tuple[int, Phase, CheckpointMode, bool]


_KEPT = 8
"""Schedules that steps may still run by."""


class _Lowered(NamedTuple):
    """A schedule and its lowered graphs."""

    schedule: Schedule
    graphs: dict[_Key, TaskGraph]


class GraphCache:
    """Task graphs by number of micro-batches, phase, recomputation and updates."""

    def __init__(
        self,
        schedule: Schedule,
        devices: Sequence[str],
        wiring: Wiring,
        stages: int,
        offload: Sequence[float] = (),
        around: Collection[str] = (),
    ) -> None:
        """``offload`` and ``around`` as for ``lower``."""
        self.devices = tuple(devices)
        """The names of the logical devices."""
        self._wiring = wiring
        self._stages = stages
        self._offload = tuple(offload)
        self._around = frozenset(around)
        self.number = 0
        """Of the schedule that new steps follow."""
        self._lowered = {0: _Lowered(schedule, {})}
        self._last = 0

    @property
    def schedule(self) -> Schedule:
        """The schedule that new steps follow."""
        return self._lowered[self.number].schedule

    def new_number(self) -> int:
        """The number of a schedule that comes to be known."""
        self._last += 1
        return self._last

    def renumber(self, number: int) -> None:
        """Give the only schedule this number."""
        self._lowered = {number: self._lowered[self.number]}
        self.number = number

    def rewire(self, wiring: Wiring) -> None:
        """Lower graphs with ``wiring`` from now on."""
        if wiring != self._wiring:
            self._wiring = wiring
            self._lowered = {self.number: _Lowered(self.schedule, {})}

    def add(self, number: int, schedule: Schedule, microbatches: int, checkpoint: CheckpointMode) -> None:
        """Know ``schedule`` by its number. Who follows it sets ``number``; steps under way keep their graphs.

        Raises ``ScheduleError`` and changes nothing if it cannot serve ``microbatches``, or would move stages.
        """
        key: _Key = microbatches, Phase.STEP, checkpoint, True
        now, then = self(*key), self._lower(schedule, *key)
        for stage, (here, there) in enumerate(zip(now.placement, then.placement, strict=True)):
            if here != there:
                raise ScheduleError(
                    f"schedule {schedule.name!r} places stage {stage} on {self.devices[there]}, but it is on "
                    f"{self.devices[here]}, where {self.schedule.name!r} placed it, and stages stay where they are; "
                    "make a new pipeline, or choose a schedule with the same placement"
                )
        recent = dict(list(self._lowered.items())[1 - _KEPT :])
        self._lowered = recent | {
            self.number: self._lowered[self.number],
            number: _Lowered(schedule, {key: then}),
        }

    def __call__(
        self, microbatches: int, phase: Phase, checkpoint: CheckpointMode, update: bool, number: int | None = None
    ) -> TaskGraph:
        """The task graph, by the schedule of this ``number``; without ``update`` it has no optimizer updates.

        Raises as ``lower``.
        """
        schedule, graphs = self._lowered[self.number if number is None else number]
        key = microbatches, phase, checkpoint, update
        if key not in graphs:
            graphs[key] = self._lower(schedule, *key)
        return graphs[key]

    def _lower(
        self, schedule: Schedule, microbatches: int, phase: Phase, checkpoint: CheckpointMode, update: bool
    ) -> TaskGraph:
        wiring = self._wiring
        return lower(
            schedule,
            Shape(self._stages, microbatches, len(self.devices)),
            devices=self.devices,
            checkpoint=checkpoint,
            phase=phase,
            wiring=wiring if update else replace(wiring, updates=()),
            offload=self._offload,
            around=self._around,
        )
