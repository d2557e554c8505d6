"""The task graphs of a pipeline: lowered when first needed, dropped when the schedule changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.graph.task_graph import Phase, TaskGraph, Wiring
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.errors import ScheduleError

__all__ = ["GraphCache"]

_Key = tuple[int, Phase, CheckpointMode, bool]


class _Lowered(NamedTuple):
    """A schedule and its lowered graphs. Replaced as one, so that other threads never see a mixture of two."""

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
    ) -> None:
        """``devices``: the names of the logical devices; ``offload`` as for ``lower``."""
        self._devices = tuple(devices)
        self._wiring = wiring
        self._stages = stages
        self._offload = tuple(offload)
        self._lowered = _Lowered(schedule, {})

    @property
    def schedule(self) -> Schedule:
        """The schedule that new graphs follow."""
        return self._lowered.schedule

    def rewire(self, wiring: Wiring) -> None:
        """Lower graphs with ``wiring`` from now on."""
        if wiring != self._wiring:
            self._wiring = wiring
            self._lowered = _Lowered(self.schedule, {})

    def change(self, schedule: Schedule, microbatches: int, checkpoint: CheckpointMode) -> None:
        """Let new graphs follow ``schedule``. Steps under way keep their graphs.

        Raises ``ScheduleError`` and changes nothing if it cannot serve ``microbatches``, or would move stages.
        """
        key: _Key = microbatches, Phase.STEP, checkpoint, True
        now, then = self(*key), self._lower(schedule, *key)
        for stage, (here, there) in enumerate(zip(now.placement, then.placement, strict=True)):
            if here != there:
                raise ScheduleError(
                    f"schedule {schedule.name!r} places stage {stage} on {self._devices[there]}, but it is on "
                    f"{self._devices[here]}, where {self.schedule.name!r} placed it, and stages stay where they are; "
                    "make a new pipeline, or choose a schedule with the same placement"
                )
        self._lowered = _Lowered(schedule, {key: then})

    def __call__(self, microbatches: int, phase: Phase, checkpoint: CheckpointMode, update: bool) -> TaskGraph:
        """The task graph; without ``update`` it has no optimizer updates. Raises as ``lower``."""
        schedule, graphs = self._lowered
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
            Shape(self._stages, microbatches, len(self._devices)),
            devices=self._devices,
            checkpoint=checkpoint,
            phase=phase,
            wiring=wiring if update else Wiring(wiring.links, wiring.ties),
            offload=self._offload,
        )
