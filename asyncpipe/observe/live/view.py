"""What a live page shows of a run: an observer that keeps one record, and a fold that makes plain data of it.

The loop that trains only leaves things lying; whoever serves the page picks them up from a thread of its own::

    loop        step_completed ──▶ the newest record           (a failed one leaves a sentence instead)
                training_step  ──▶ a point of the history
                                        │
    a thread    snapshot ───────────────┴──▶ {"step": …, "timeline": …, "training": …, "history": …}

There is no lock between the two sides: each value has one writer, which replaces it whole, so the loop never waits
for a fold. A history keeps the whole run, however long: when it is full, each two neighbours become their mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isfinite
from threading import Lock
from typing import Any, NamedTuple

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepRecord
from asyncpipe.core.graph.task import WHOLE_STEP
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import Report, TaskTime, report
from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics.fold import fold
from asyncpipe.observe.metrics.graph_arrays import GraphArraysCache
from asyncpipe.observe.metrics.idle_time import IdleReason
from asyncpipe.observe.metrics.step_arrays import StepArrays
from asyncpipe.observe.pictures.colours import shade

__all__ = ["MOST_TASKS", "LiveView", "Series"]

MOST_TASKS = 2_000
"""Tasks that a timeline on the page may have; more are a few pixels each, and the browser would be busy drawing."""
MOST_POINTS = 600
"""Points of a history; a line on a screen shows no more."""
RECENT = 20
"""Speeds are means over this many last steps."""


class _TrainingStep(NamedTuple):
    """The last training step."""

    steps: int
    """How many there were."""
    loss: float
    seconds: float


class LiveView:
    """An observer of one run whose ``snapshot()`` is what a live page shows.

    ``steps`` is how many training steps the run will have, where that is known. ``step_completed``, ``training_step``
    and ``end`` are quick and each is called by one thread at a time; ``snapshot`` may be called from any thread. At
    most one step's record is kept, and no tensor.
    """

    def __init__(self, job: str = "", *, steps: int | None = None) -> None:
        if steps is not None and steps < 0:
            raise OptionError(f"steps must not be negative, or None if it is not known, got {steps}")
        self.job = job
        self._steps = steps
        self._newest: tuple[int, StepRecord] | None = None
        """How many steps completed well, and the last of them."""
        self._spoiled: tuple[int, int, str] = (0, 0, "")
        """How many steps failed, how many were cancelled, and a sentence about the last of these."""
        self._training: _TrainingStep | None = None
        self._recent: tuple[tuple[float, int, int], ...] = ()
        """(seconds, samples, tokens) of the last steps."""
        self._history = Series(5)
        """(step, loss, seconds, samples, tokens)"""
        self._ended = False
        self._fold = _Fold()

    def step_completed(self, record: StepRecord) -> None:
        """Keep ``record`` until the next one; of one that failed or was cancelled only what to say about it."""
        if record.outcome is Outcome.OK:
            self._newest = ((self._newest[0] if self._newest else 0) + 1, record)
        else:
            # The error's traceback holds the frames, and so the tensors, of the failed step: it must not stay.
            failed, cancelled, _ = self._spoiled
            is_failure = record.outcome is Outcome.FAILED
            self._spoiled = (failed + is_failure, cancelled + (not is_failure), _story(record))

    def training_step(self, loss: float, samples: int, tokens: int, duration: float) -> None:
        """Add one training step: its loss, what it consumed, and its seconds, optimizer and data included."""
        done = (self._training.steps if self._training else 0) + 1
        loss = float(loss)
        self._history.add(done, loss, duration, samples, tokens)
        self._recent = (*self._recent[1 - RECENT :], (duration, samples, tokens))
        self._training = _TrainingStep(done, loss, duration)

    def end(self) -> None:
        """Say that the run is over: nothing new will come. May be called twice."""
        self._ended = True

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self._ended

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever there is something new to show; cheap."""
        failed, cancelled, _ = self._spoiled
        done = self._training.steps if self._training else 0
        return (self._newest[0] if self._newest else 0, failed, cancelled, done, int(self._ended))

    def snapshot(self) -> dict[str, Any]:
        """All that a page shows, as plain data for ``json.dumps``; numbers that are not finite are ``None``.

        ``step`` and ``timeline`` tell about the last step that completed well, ``training`` about the last
        ``training_step``; each is ``None`` where there was none yet. Shares are of the step's time, from 0 to 1.
        A step is folded once, at 4 to 12 µs a task (and 20 more for a graph that is new); the rest is cheap.
        """
        ended, training, newest = self._ended, self._training, self._newest
        step, timeline, bubbles = self._fold.of(newest, training.steps if training else None)
        failed, cancelled, story = self._spoiled
        return {
            "job": self.job,
            "ended": ended,
            "steps": self._steps,
            "spoiled": {"failed": failed, "cancelled": cancelled, "last": story},
            "training": None if training is None else self._training_now(training),
            "step": step,
            "timeline": timeline,
            "history": _history(self._history.points()),
            "bubbles": [[_short(x, 7), _short(bubble)] for x, bubble in bubbles],
        }

    def _training_now(self, training: _TrainingStep) -> dict[str, Any]:
        recent = self._recent
        seconds = sum(row[0] for row in recent)
        samples, tokens = sum(row[1] for row in recent), sum(row[2] for row in recent)
        return {
            "steps": training.steps,
            "loss": _short(training.loss, 6),
            "seconds": _short(training.seconds),
            "unit": "tokens" if tokens else "samples",
            "rate": _short((tokens or samples) / seconds) if seconds > 0 else None,
        }


class Series:
    """A line of bounded length through any number of points: each that it keeps is the mean of equally many.

    One thread adds, any may read. ``most`` is even.
    """

    def __init__(self, columns: int, most: int = MOST_POINTS) -> None:
        self._most = most
        self._each = 1
        """Of how many points one that is kept is the mean."""
        self._kept: list[tuple[float, ...]] = []
        self._rest: tuple[int, tuple[float, ...]] = (0, (0.0,) * columns)
        """How many points wait to become one, and their sums."""

    def add(self, *values: float) -> None:
        """Add a point, one value a column."""
        count, sums = self._rest[0] + 1, tuple(a + b for a, b in zip(self._rest[1], values, strict=True))
        if count < self._each:
            self._rest = (count, sums)
            return
        self._kept.append(tuple(value / count for value in sums))
        self._rest = (0, (0.0,) * len(sums))
        if len(self._kept) == self._most:
            pairs = zip(self._kept[::2], self._kept[1::2], strict=True)
            self._kept = [tuple((a + b) / 2 for a, b in zip(*pair, strict=True)) for pair in pairs]
            self._each *= 2

    def points(self) -> list[tuple[float, ...]]:
        """The points so far, oldest first; the last one may be the mean of fewer."""
        kept, (count, sums) = self._kept.copy(), self._rest
        return [*kept, tuple(value / count for value in sums)] if count else kept


class _Fold:
    """Makes data of the newest record, once each, and keeps the bubbles of those that it saw."""

    def __init__(self) -> None:
        self._lock = Lock()
        """Held by threads that fold, never by the loop."""
        self._number = 0
        self._made: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)
        self._bubbles = Series(2)
        self._arrays = GraphArraysCache()

    def of(
        self, newest: tuple[int, StepRecord] | None, done: int | None
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None, list[tuple[float, ...]]]:
        """The step, its timeline, and (training step, bubble) of the steps folded so far."""
        with self._lock:
            if newest is not None and newest[0] > self._number:
                number, record = newest
                result = report(record)
                self._made = _step(record, result, self._arrays), _timeline(record.graph, result)
                self._bubbles.add(number if done is None else done, result.bubble_ratio)
                self._number = number
            return *self._made, self._bubbles.points()


def _step(record: StepRecord, result: Report, arrays_cache: GraphArraysCache) -> dict[str, Any]:
    """The figures of a step; ``idle`` has the seconds by reason as shares of the step."""
    graph = record.graph
    counted = fold([StepArrays.of(record, 0.0)], arrays_cache.of(graph)).counters

    def share(name: str, *labels: str) -> float | None:
        seconds = counted.get(f"stage_{name}_seconds", {}).get(labels, 0.0)
        return _short(seconds / result.seconds) if result.seconds else 0.0

    places = [graph.devices[number] for number in graph.placement]
    stages = [
        {
            "device": device,
            "busy": share("busy", str(stage), device),
            "idle": {reason.value: share("idle", str(stage), device, reason.value) for reason in IdleReason},
            "in_flight": peak if graph.training else None,
        }
        for stage, (device, peak) in enumerate(zip(places, result.peak_in_flight, strict=True))
    ]
    return {
        "number": record.step,
        "schedule": graph.schedule,
        "phase": graph.phase.value,
        "microbatches": graph.shape.microbatches,
        "seconds": _short(result.seconds),
        "bubble": _short(result.bubble_ratio),
        "ideal": _short(arrays_cache.ideal_bubble(graph, make=True)),
        "stages": stages,
        "devices": [{"name": name, "busy": _short(busy)} for name, busy in result.device_utilization.items()],
    }


def _timeline(graph: TaskGraph, result: Report) -> dict[str, Any]:
    """What to draw of a step, in milliseconds: tasks are [row, start, end, kind, label, stage, micro-batch, source].

    ``colours`` has those of each kind, the first for the first stage of a device; ``tint`` says for each stage which
    of them is its own. Copies stand in the row of the device that they go to.
    """
    tint, most = _tints(graph.placement)
    rows = {device: row for row, device in enumerate(graph.devices)}
    kinds = {time.task.kind for time in result.tasks}
    few = len(result.tasks) <= MOST_TASKS
    return {
        "seconds": _short(result.seconds),
        "rows": list(graph.devices),
        "count": len(result.tasks),
        "tasks": [_drawn(time, rows[time.task.lane.device]) for time in result.tasks] if few else [],
        "tint": tint,
        "kinds": {kind.value: kind.word for kind in TaskKind if kind in kinds},
        "colours": {kind.value: [shade(kind, virtual, most) for virtual in range(most)] for kind in kinds},
    }


def _tints(placement: Sequence[int]) -> tuple[list[int], int]:
    """For each stage how many of its device come before it, and the most that a device has."""
    seen: Counter[int] = Counter()
    tint = []
    for device in placement:
        tint.append(seen[device])
        seen[device] += 1
    return tint, max(seen.values(), default=1)


def _drawn(time: TaskTime, row: int) -> list[Any]:
    task = time.task
    microbatch = None if task.microbatch == WHOLE_STEP else task.microbatch
    times = (round(time.start * 1e3, 4), round(time.end * 1e3, 4))
    return [row, *times, task.kind.value, task.label, task.stage, microbatch, task.source]


def _history(points: list[tuple[float, ...]]) -> list[list[float | None]]:
    """(step, loss, seconds, tokens a second, or samples where there are no tokens)."""
    return [
        [
            _short(step, 7),
            _short(loss, 6),
            _short(seconds),
            _short((tokens or samples) / seconds) if seconds > 0 else None,
        ]
        for step, loss, seconds, samples, tokens in points
    ]


def _story(record: StepRecord) -> str:
    """A sentence about a step that did not complete well; nothing of its error but the class is kept."""
    if record.outcome is Outcome.CANCELLED:
        return f"Step {record.step} was cancelled."
    for _, event in reversed(record.journal):
        if isinstance(event, StepCompleted) and event.failed_task is not None:
            task = record.graph.tasks[event.failed_task]
            return f"Step {record.step} failed in {task.id} on {task.lane.device}: {type(event.error).__name__}."
    return f"Step {record.step} failed."


def _short(value: float | None, digits: int = 4) -> float | None:
    """``value`` with as many digits as a page shows; ``None`` if it is not finite, which JSON cannot say."""
    return float(f"{value:.{digits}g}") if value is not None and isfinite(value) else None
