"""What is measured during a step beside its journal: bytes, memory, wake-ups, messages, workers, compilations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from asyncpipe.core.engine.lane_use import Taken
from asyncpipe.core.graph.task import Lane
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.core.records.worker_notes import WorkerNotes

__all__ = ["DeviceMemory", "StepNotes"]


class DeviceMemory(NamedTuple):
    """Bytes of a physical device (of this process, for the CPU)."""

    allocated: int
    peak: int
    """The most that was ever allocated."""
    limit: int
    """What there is to allocate."""


@dataclass(slots=True, eq=False)
class StepNotes:
    """What was measured during a step beside its journal. Tasks add to it on their threads; it is read afterwards."""

    copied: dict[int, int] = field(default_factory=dict)
    """Bytes that each copy task brought, by the task's number."""
    memory: dict[str, DeviceMemory] = field(default_factory=dict)
    """Of each physical device that the step used, at its end."""
    streams: dict[str, int] = field(default_factory=dict)
    """How many streams of each of them this process uses; none of a CPU."""
    samples: list[tuple[float, str, int]] = field(default_factory=list)
    """(time, device, bytes allocated on it) after each task, where the pipeline was asked to sample memory."""
    wakeups: list[tuple[float, float]] = field(default_factory=list)
    """(seconds that the loop was late, seconds that the scheduler took), of every wake-up since the last record."""
    arrived: dict[int, float] = field(default_factory=dict)
    """By task that waits for other workers: when the last message that it needs of them came."""
    left: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (task that waits for another machine, task that it waits for): when the message left."""
    workers: dict[str, WorkerNotes] = field(default_factory=dict)
    """Those that ran a part of the step, by name."""
    drew: set[int] = field(default_factory=set)
    """The stages that drew random numbers; of an accelerator's own numbers, those of the first micro-batch count."""
    compilations: list[Compilation] = field(default_factory=list)
    """What was compiled meanwhile. It is no part of what tasks take: such a task begins when it has been compiled."""
    taken: dict[Lane, Taken] = field(default_factory=dict)
    """By lane that other jobs used meanwhile: how long they had it, since some time before the step or in it."""
