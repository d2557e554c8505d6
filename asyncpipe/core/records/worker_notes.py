"""What is told of workers: beside the record of a step, and when one comes up or is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["EdgeTraffic", "WorkerChange", "WorkerNotes", "WorkerState", "WorkerUse", "WorkerWatcher"]


class WorkerState(StrEnum):
    """Whether a worker can be used."""

    UP = "up"
    LOST = "lost"


class EdgeTraffic(NamedTuple):
    """What one worker has sent to another, for one pipeline, since it last told."""

    messages: int
    bytes: int
    waited_seconds: float
    """How long there was a message to send, and the receiver held as many as it may: no credit was left."""

    def plus(self, more: EdgeTraffic) -> EdgeTraffic:
        """Both together."""
        return EdgeTraffic(
            self.messages + more.messages, self.bytes + more.bytes, self.waited_seconds + more.waited_seconds
        )


class WorkerUse(NamedTuple):
    """What a worker tells of itself at the end of its part of a step."""

    resident_bytes: int
    """Of its process."""
    sent: Mapping[str, EdgeTraffic]
    """By the worker that receives."""


@dataclass(frozen=True, slots=True)
class WorkerNotes:
    """A worker that ran a part of a step, at the step's end."""

    state: WorkerState
    pid: int
    devices: tuple[str, ...]
    """Those of the step that are its."""
    round_trip: float
    """Seconds of the shortest of the last messages to it and back."""
    clock_offset: float
    """Seconds that were taken off its times to have the controller's."""
    use: WorkerUse | None = None
    """Where somebody is to see it, and the worker has told."""
    clock_error: float = 0.0
    """How far its times may still be off, in seconds. 0 if it shares the controller's clock."""


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """A worker in which a pipeline has stages has come up for it, or was lost."""

    worker: str
    state: WorkerState
    pid: int
    devices: tuple[str, ...] = field(default=())
    """Those of the pipeline that are the worker's."""
    is_restart: bool = False
    """Whether it was started for this pipeline in the place of one that was lost."""
    how: str = ""
    """How it was lost."""


@runtime_checkable
class WorkerWatcher(Protocol):
    """An observer that also wants to know what becomes of its pipeline's workers, at once and not at a step's end."""

    def worker_changed(self, change: WorkerChange) -> None:
        """Called on the scheduler's loop; must not block."""
