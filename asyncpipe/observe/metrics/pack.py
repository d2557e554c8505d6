"""A step without its journal: the times of its tasks as arrays, which take a tenth of the memory.

Made at once, on the scheduler's loop, although that costs it 0.2 µs per task: journals that wait for a scrape would
cost 2 µs per task and more, since Python's garbage collector goes through their objects over and over. And a failed
step's journal keeps its error, and with that the tensors of the frames that raised it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from math import inf, nan

import numpy as np

from asyncpipe.core.engine.events import (
    DeviceMemory,
    Dispatch,
    GateOpened,
    Outcome,
    StepRecord,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
    TaskIssued,
)
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.observe.metrics.plan import Floats, Numbers

__all__ = ["PackedStep", "pack"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """What a fold needs of one step. Times of tasks are by number and those of the journal's clock."""

    graph: TaskGraph
    at: float
    """Unix time of its end."""
    outcome: Outcome
    submitted: float
    started: Floats
    """∞ where a task did not complete."""
    ended: Floats
    """-∞ where a task did not complete."""
    issued: Floats | None
    """Seconds that the host took to queue each task, NaN where it ran it; ``None`` where it ran all."""
    opened: tuple[tuple[int, float], ...]
    """(task, when the caller's gradient was there)"""
    lost: tuple[tuple[int, str], ...]
    """(task, ``failed`` or ``dropped``)"""
    copied: Numbers
    """Copies whose bytes are known,"""
    copied_bytes: Floats
    """and how many they were."""
    wakeups: Floats
    """(seconds that the loop was late, seconds that the scheduler took) for each wake-up."""
    memory: dict[str, DeviceMemory]


def pack(record: StepRecord, at: float) -> PackedStep:
    """``record``, which ended at the Unix time ``at``, in a compact form that keeps nothing of its journal alive."""
    tasks, notes = len(record.graph.tasks), record.notes
    started, ended = [inf] * tasks, [-inf] * tasks
    others = []
    for entry in record.journal:
        event = entry[1]
        # Nearly all are one of these two, and the identity of a type is the quickest question to ask.
        if type(event) is TaskCompleted:
            number = event.task
            started[number], ended[number] = event.started, event.ended
        elif type(event) is not Dispatch:
            others.append(entry)
    gates = record.graph.gates
    return PackedStep(
        graph=record.graph,
        at=at,
        outcome=record.outcome,
        submitted=next((when for when, event in others if isinstance(event, StepSubmitted)), 0.0),
        started=_floats(started),
        ended=_floats(ended),
        issued=_issued(tasks, (event for _, event in others if isinstance(event, TaskIssued))),
        opened=tuple((gates[event.microbatch], when) for when, event in others if isinstance(event, GateOpened)),
        lost=tuple(
            (event.task, _LOST[type(event)]) for _, event in others if isinstance(event, TaskFailed | TaskDropped)
        ),
        copied=np.fromiter(notes.copied.keys(), np.intp, len(notes.copied)),
        copied_bytes=np.fromiter(notes.copied.values(), np.float64, len(notes.copied)),
        wakeups=np.fromiter(chain.from_iterable(notes.wakeups), np.float64).reshape(-1, 2),
        memory=notes.memory,
    )


_LOST = {TaskFailed: "failed", TaskDropped: "dropped"}


def _floats(values: list[float]) -> Floats:
    return np.fromiter(values, np.float64, len(values))


def _issued(tasks: int, events: Iterable[TaskIssued]) -> Floats | None:
    """Host seconds by task."""
    seconds = {event.task: event.seconds for event in events}
    return _floats([seconds.get(task, nan) for task in range(tasks)]) if seconds else None
