"""What a live page shows of a run: an observer that keeps the newest record, and a snapshot of it as plain data.

The training loop only stores values. The thread that serves the page reads them and does the work::

    loop        step_completed ──▶ the newest record           (of a failed step only a sentence)
                training_step  ──▶ a point of the history
                                        │
    a thread    snapshot ───────────────┴──▶ {"step": …, "timeline": …, "training": …, "history": …}

The two sides share no lock: each value has one writer, which replaces it as a whole, so the loop never waits for a
snapshot. The history covers the whole run in bounded memory: when it is full, pairs of neighbours are averaged.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepRecord
from asyncpipe.core.predict.report import report
from asyncpipe.errors import OptionError
from asyncpipe.observe.live.step_data import rounded, step_data, timeline_data
from asyncpipe.observe.metrics.graph_arrays import GraphArraysCache

__all__ = ["LiveView", "Series"]

MOST_POINTS = 600
"""Points of a history; a line on a screen shows no more."""
RECENT = 20
"""Speeds are means over this many last steps."""


class _TrainingStep(NamedTuple):
    """The last training step."""

    number: int
    """Counted from 1."""
    loss: float
    seconds: float


class LiveView:
    """An observer of one run whose ``snapshot()`` is what a live page shows.

    ``steps`` is the number of training steps of the run, if known. ``step_completed``, ``training_step`` and ``end``
    are quick, and each is called by one thread at a time; ``snapshot`` may be called from any thread. At most one
    step's record is kept, and no tensor.
    """

    def __init__(self, job: str = "", *, steps: int | None = None) -> None:
        if steps is not None and steps < 0:
            raise OptionError(f"steps must not be negative, or None if it is not known, got {steps}")
        self.job = job
        self._steps = steps
        self._newest: tuple[int, StepRecord] | None = None
        """How many steps succeeded, and the last of them."""
        self._spoiled: tuple[int, int, str] = (0, 0, "")
        """How many steps failed, how many were cancelled, and a sentence about the last of these."""
        self._training: _TrainingStep | None = None
        self._recent: tuple[tuple[float, int, int], ...] = ()
        """(seconds, samples, tokens) of the last training steps."""
        self._history = Series(5)
        """(step, loss, seconds, samples, tokens)"""
        self._ended = False
        self._data = _NewestStepData()

    def step_completed(self, record: StepRecord) -> None:
        """Keep ``record`` until the next one; of a step that failed or was cancelled, keep a sentence."""
        if record.outcome is Outcome.OK:
            self._newest = ((self._newest[0] if self._newest else 0) + 1, record)
        else:
            # The error's traceback would keep the frames of the failed step alive, and with them its tensors.
            failed, cancelled, _ = self._spoiled
            is_failure = record.outcome is Outcome.FAILED
            self._spoiled = (failed + is_failure, cancelled + (not is_failure), _sentence(record))

    def training_step(self, loss: float, samples: int, tokens: int, duration: float) -> None:
        """Add a training step: its loss, the data it consumed, and its seconds with optimizer and data loading."""
        number = (self._training.number if self._training else 0) + 1
        loss = float(loss)
        self._history.add(number, loss, duration, samples, tokens)
        self._recent = (*self._recent[1 - RECENT :], (duration, samples, tokens))
        self._training = _TrainingStep(number, loss, duration)

    def end(self) -> None:
        """Mark the run as ended: nothing new will come. May be called twice."""
        self._ended = True

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self._ended

    @property
    def version(self) -> tuple[int, ...]:
        """Changes whenever there is something new to show; cheap."""
        failed, cancelled, _ = self._spoiled
        done = self._training.number if self._training else 0
        return (self._newest[0] if self._newest else 0, failed, cancelled, done, int(self._ended))

    def snapshot(self) -> dict[str, Any]:
        """All that a page shows, as plain data for ``json.dumps``; numbers that are not finite are ``None``.

        ``step`` and ``timeline`` describe the last step that succeeded, ``training`` the last ``training_step``; each
        is ``None`` before the first one. Shares are of the step's time, from 0 to 1. The first snapshot after a step
        takes 4 to 12 µs a task (and 20 more if the graph is new); others are cheap.
        """
        ended, training, newest = self._ended, self._training, self._newest
        step, timeline, bubbles = self._data.of(newest, training.number if training else None)
        failed, cancelled, sentence = self._spoiled
        return {
            "job": self.job,
            "ended": ended,
            "steps": self._steps,
            "spoiled": {"failed": failed, "cancelled": cancelled, "last": sentence},
            "training": None if training is None else self._training_data(training),
            "step": step,
            "timeline": timeline,
            "history": [_history_row(*point) for point in self._history.points()],
            "bubbles": [[rounded(x, 7), rounded(bubble)] for x, bubble in bubbles],
        }

    def _training_data(self, training: _TrainingStep) -> dict[str, Any]:
        seconds, samples, tokens = (sum(column) for column in zip(*self._recent, strict=True))
        return {
            "steps": training.number,
            "loss": rounded(training.loss, 6),
            "seconds": rounded(training.seconds),
            "unit": "tokens" if tokens else "samples",
            "rate": _rate(seconds, samples, tokens),
        }


class Series:
    """A line of at most ``most`` points through any number of them: each that it keeps is the mean of equally many.

    One thread adds points, any thread may read them. ``most`` is even.
    """

    def __init__(self, columns: int, most: int = MOST_POINTS) -> None:
        self._most = most
        self._each = 1
        """How many added points one kept point is the mean of."""
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


class _NewestStepData:
    """The data of the newest record, computed once, and the bubbles of all records that it was computed for."""

    def __init__(self) -> None:
        self._lock = Lock()
        """Held by threads that take snapshots, never by the training loop."""
        self._number = 0
        self._data: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)
        self._bubbles = Series(2)
        self._arrays = GraphArraysCache()

    def of(
        self, newest: tuple[int, StepRecord] | None, done: int | None
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None, list[tuple[float, ...]]]:
        """The step, its timeline, and (training step, bubble) of the steps so far."""
        with self._lock:
            if newest is not None and newest[0] > self._number:
                self._number, record = newest
                result = report(record)
                self._data = step_data(record, result, self._arrays), timeline_data(record.graph, result)
                self._bubbles.add(self._number if done is None else done, result.bubble_ratio)
            return *self._data, self._bubbles.points()


def _history_row(step: float, loss: float, seconds: float, samples: float, tokens: float) -> list[float | None]:
    return [rounded(step, 7), rounded(loss, 6), rounded(seconds), _rate(seconds, samples, tokens)]


def _rate(seconds: float, samples: float, tokens: float) -> float | None:
    """Tokens a second; samples a second where there are no tokens."""
    return rounded((tokens or samples) / seconds) if seconds > 0 else None


def _sentence(record: StepRecord) -> str:
    """A sentence about a step that failed or was cancelled; of its error only the class is named."""
    if record.outcome is Outcome.CANCELLED:
        return f"Step {record.step} was cancelled."
    for _, event in reversed(record.journal):
        if isinstance(event, StepCompleted) and event.failed_task is not None:
            task = record.graph.tasks[event.failed_task]
            return f"Step {record.step} failed in {task.id} on {task.lane.device}: {type(event.error).__name__}."
    return f"Step {record.step} failed."
