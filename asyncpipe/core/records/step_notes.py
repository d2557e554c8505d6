"""What is measured during a step beside its journal: bytes, memory, wake-ups, messages, workers, compilations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, SupportsFloat

from asyncpipe.core.engine.lane_use import Taken
from asyncpipe.core.graph.task import Lane
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.core.records.worker_notes import WorkerNotes

__all__ = ["DeviceMemory", "UNKNOWN_SIZE", "StepNotes", "StepSize"]


class DeviceMemory(NamedTuple):
    """Bytes of a physical device (of this process, for the CPU)."""

    allocated: int
    peak: int
    """The most that was ever allocated."""
    limit: int
    """What there is to allocate."""

    def plus(self, other: DeviceMemory) -> DeviceMemory:
        """What two processes hold of the device together."""
        return DeviceMemory(self.allocated + other.allocated, self.peak + other.peak, max(self.limit, other.limit))


class StepSize(NamedTuple):
    """What a step works on; 0 where that is not known."""

    samples: int = 0
    tokens: int = 0
    """Padding included."""
    flops: float = 0.0
    """Floating-point operations that the model needs for it, forward and backward, without recomputation."""
    peak_flops: float = 0.0
    """The most operations a second of all devices together."""


UNKNOWN_SIZE = StepSize()


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
    """The stages that drew random numbers."""
    compilations: list[Compilation] = field(default_factory=list)
    """What was compiled meanwhile. It is no part of what tasks take: such a task begins when it has been compiled."""
    size: StepSize = UNKNOWN_SIZE
    gradient_norm: SupportsFloat | None = None
    """Of all gradients together, before clipping, where a step or its caller has computed it."""
    why_workers: str = ""
    """Why the devices are in threads or in processes, where ``workers="auto"`` chose."""
    taken: dict[Lane, Taken] = field(default_factory=dict)
    """By lane that other jobs used meanwhile: how long they had it, since some time before the step or in it."""

    def renumbered(self, whole: Sequence[int]) -> StepNotes:
        """The notes of a worker's part with the numbers that tasks have in the whole graph, ``whole`` of each.

        But for ``left``, which has names of tasks.
        """
        return replace(
            self,
            copied={whole[task]: size for task, size in self.copied.items()},
            arrived={whole[task]: at for task, at in self.arrived.items()},
        )

    def shifted(self, seconds: float) -> StepNotes:
        """The notes with all times so many seconds later. ``wakeups`` are durations."""
        return replace(
            self,
            samples=[(at + seconds, device, held) for at, device, held in self.samples],
            arrived={task: at + seconds for task, at in self.arrived.items()},
            left={key: at + seconds for key, at in self.left.items()},
            taken={lane: tuple((at + seconds, had) for at, had in account) for lane, account in self.taken.items()},
        )

    @staticmethod
    def merged(
        parts: Mapping[str, StepNotes],
        workers: Mapping[str, WorkerNotes],
        size: StepSize = UNKNOWN_SIZE,
        why_workers: str = "",
    ) -> StepNotes:
        """What all workers have noted, by their names. Devices of the same name in several workers are added up.

        ``workers``, ``size``, ``why_workers`` and ``gradient_norm`` are known to the controller alone.
        """
        samples = list(_samples_of_all(parts))
        merged = StepNotes(samples=samples, workers=dict(workers), size=size, why_workers=why_workers)
        for notes in parts.values():
            for device, memory in notes.memory.items():
                before = merged.memory.get(device)
                merged.memory[device] = memory if before is None else before.plus(memory)
            for device, count in notes.streams.items():
                merged.streams[device] = merged.streams.get(device, 0) + count
            merged.copied.update(notes.copied)
            merged.wakeups += notes.wakeups
            merged.arrived.update(notes.arrived)
            merged.left.update(notes.left)
            merged.drew |= notes.drew
            merged.compilations += notes.compilations
            merged.taken.update(notes.taken)
        return merged


def _samples_of_all(parts: Mapping[str, StepNotes]) -> Iterator[tuple[float, str, int]]:
    """Samples of all workers: each is what all of them together hold of a device then, as far as they have told."""
    held: dict[str, dict[str, int]] = {}
    for at, device, worker, size in sorted(
        (at, device, worker, size) for worker, notes in parts.items() for at, device, size in notes.samples
    ):
        of_workers = held.setdefault(device, {})
        of_workers[worker] = size
        yield at, device, sum(of_workers.values())
