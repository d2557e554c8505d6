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

from collections.abc import Sequence
from threading import Lock
from typing import Any

from asyncpipe.core.engine.events import Outcome, StepCompleted
from asyncpipe.core.predict.ideal_bubble import IdealBubbles
from asyncpipe.core.predict.report import report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import WorkerChange
from asyncpipe.errors import HangError, HungTaskError, OptionError, WorkerLostError
from asyncpipe.observe.live.step_data import rounded, step_data, timeline_data
from asyncpipe.observe.live.workers_data import ShownWorker

__all__ = ["LiveView", "Series"]

MOST_POINTS = 600
"""Points of a history; a line on a screen shows no more."""
RECENT = 20
"""Speeds are means over this many last steps."""


class LiveView:
    """An observer of one run whose ``snapshot()`` is what a live page shows.

    ``steps`` is the number of training steps of the run, if known. ``step_completed``, ``training_step``,
    ``worker_changed`` and ``end`` are quick; ``snapshot`` may be called from any thread. The first and the third come
    from one thread, the driver's loop. At most one step's record is kept, and no tensor.
    """

    def __init__(self, job: str = "", *, steps: int | None = None) -> None:
        if steps is not None and steps < 0:
            raise OptionError(f"steps must not be negative, or None if it is not known, got {steps}")
        self.job = job
        self._steps = steps
        self._newest: tuple[int, StepRecord] | None = None
        """How many steps succeeded, and the last of them."""
        self._workers: dict[str, ShownWorker] = {}
        """By name; replaced as a whole."""
        self._changes = 0
        """How often a worker came up or was lost."""
        self._spoiled: tuple[int, int, str] = (0, 0, "")
        """How many steps failed, how many were cancelled, and a sentence about the last of these."""
        self._before = 0
        """The training steps of runs before this one."""
        self._recent: tuple[tuple[int, float, float, int, int], ...] = ()
        """(step, counted from 1; loss, seconds, samples, tokens) of the last training steps."""
        self._history = Series(5)
        """The same of all training steps."""
        self._ended = False
        self._lock = Lock()
        """Guards what follows. Held by threads that take snapshots, never by the training loop."""
        self._shown: tuple[int, dict[str, Any] | None, dict[str, Any] | None] = (0, None, None)
        """The number, the data and the timeline of the newest step that a snapshot was taken of."""
        self._bubbles = Series(2)
        """(training step, bubble) of the steps that snapshots were taken of."""
        self._ideals = IdealBubbles()

    def go_on(self, step: int, earlier: Sequence[tuple[int, float, float, int, int]] = ()) -> None:
        """Begin behind ``step`` training steps of runs before this one.

        ``earlier`` are some or all of these steps, evenly spread: (step, counted from 1; loss, seconds, samples,
        tokens). Without them, those that the view has seen itself are kept, up to ``step``.
        """
        kept = [point for point in earlier or self._history.points() if point[0] <= step]
        self._history = Series(5, begun=kept, each=max(1, round(step / len(kept))) if kept else 1)
        self._before, self._recent = step, ()

    def step_completed(self, record: StepRecord) -> None:
        """Keep ``record`` until the next one; of a step that failed or was cancelled, keep a sentence."""
        for name, notes in record.notes.workers.items():
            seen = self._workers.get(name) or ShownWorker(notes.state, notes.pid, notes.devices)
            self._workers = {**self._workers, name: seen.noted(notes)}
        if record.outcome is Outcome.OK:
            self._newest = ((self._newest[0] if self._newest else 0) + 1, record)
        else:
            # The error's traceback would keep the frames of the failed step alive, and with them its tensors.
            failed, cancelled, _ = self._spoiled
            is_failure = record.outcome is Outcome.FAILED
            # The number of the job's step, where it has one: the pool counts the steps of all jobs.
            number = self._done + 1 if self._done or self._steps is not None else record.step
            self._spoiled = (failed + is_failure, cancelled + (not is_failure), _sentence(record, number))

    def training_step(self, loss: float, samples: int, tokens: int, duration: float) -> None:
        """Add a training step: its loss, the data it consumed, and its seconds with optimizer and data loading."""
        point = (self._done + 1, float(loss), duration, samples, tokens)
        self._history.add(*point)
        self._recent = (*self._recent[1 - RECENT :], point)

    def worker_changed(self, change: WorkerChange) -> None:
        """Show that a worker has come up for this run, or was lost."""
        seen = self._workers.get(change.worker) or ShownWorker(change.state, change.pid, change.devices)
        self._workers = {**self._workers, change.worker: seen.changed(change)}
        self._changes += 1

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
        steps = self._newest[0] if self._newest else 0
        return (steps, failed, cancelled, self._done, self._changes, int(self._ended))

    @property
    def _done(self) -> int:
        """The number of training steps so far."""
        return self._recent[-1][0] if self._recent else self._before

    def snapshot(self) -> dict[str, Any]:
        """All that a page shows, as plain data for ``json.dumps``; numbers that are not finite are ``None``.

        ``step`` and ``timeline`` describe the last step that succeeded, ``training`` the last ``training_step``; each
        is ``None`` before the first one. Shares are of the step's time, from 0 to 1. The first snapshot after a step
        takes 4 to 12 µs a task (and 20 more if the graph is new); others are cheap. ``workers`` is ``None`` where the
        devices are threads.
        """
        ended, recent, newest, workers = self._ended, self._recent, self._newest, self._workers
        failed, cancelled, sentence = self._spoiled
        with self._lock:
            number, step, timeline = self._shown
            if newest is not None and newest[0] > number:
                number, record = newest
                result = report(record)
                step, timeline = (
                    step_data(record, result, self._ideals.of(record.graph)),
                    timeline_data(record.graph, result),
                )
                self._shown = (number, step, timeline)
                self._bubbles.add(recent[-1][0] if recent else number, result.bubble_ratio)
            bubbles = self._bubbles.points()
        return {
            "job": self.job,
            "ended": ended,
            "steps": self._steps,
            "spoiled": {"failed": failed, "cancelled": cancelled, "last": sentence},
            "training": _training_data(recent) if recent else None,
            "step": step,
            "timeline": timeline,
            "workers": [seen.data(name) for name, seen in workers.items()] or None,
            "history": [_history_row(*point) for point in self._history.points()],
            "bubbles": [[rounded(x, 7), rounded(bubble)] for x, bubble in bubbles],
        }


class Series:
    """A line of at most ``most`` points through any number of them: each that it keeps is the mean of equally many.

    One thread adds points, any thread may read them. ``most`` is even.
    """

    def __init__(
        self, columns: int, most: int = MOST_POINTS, begun: Sequence[tuple[float, ...]] = (), each: int = 1
    ) -> None:
        """Begins with the points ``begun``, each of them the mean of ``each``; the last are kept if they are many."""
        self._most = most
        self._each = each
        """How many added points one kept point is the mean of."""
        self._kept = list(begun[1 - most :])
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


def _training_data(recent: Sequence[tuple[int, float, float, int, int]]) -> dict[str, Any]:
    """The key figures of the last training step, and the speed of the ``recent`` ones."""
    number, loss, seconds, _, _ = recent[-1]
    _, _, *sums = (sum(column) for column in zip(*recent, strict=True))
    return {
        "steps": number,
        "loss": rounded(loss, 6),
        "seconds": rounded(seconds),
        "unit": "tokens" if sums[-1] else "samples",
        "rate": _rate(*sums),
    }


def _history_row(step: float, loss: float, seconds: float, samples: float, tokens: float) -> list[float | None]:
    return [rounded(step, 7), rounded(loss, 6), rounded(seconds), _rate(seconds, samples, tokens)]


def _rate(seconds: float, samples: float, tokens: float) -> float | None:
    """Tokens a second; samples a second where there are no tokens."""
    return rounded((tokens or samples) / seconds) if seconds > 0 else None


def _sentence(record: StepRecord, number: int) -> str:
    """A sentence about step ``number``, which failed or was cancelled; of its error only the class, or what hung."""
    if record.outcome is Outcome.CANCELLED:
        return f"Step {number} was cancelled."
    for _, event in reversed(record.journal):
        if isinstance(event, StepCompleted) and event.error is not None:
            where = ""
            if event.failed_task is not None:
                task = record.graph.tasks[event.failed_task]
                where = f" in {task.id} on {task.lane.device}"
            error = event.error
            hang = error.hang if isinstance(error, WorkerLostError) else error if isinstance(error, HangError) else None
            return f"Step {number} failed{where}: {type(error).__name__}{_told(hang)}."
    return f"Step {number} failed."


def _told(hang: HangError | None) -> str:
    """Why a step hung, and what waited for it: tasks, devices and workers, no text of the caller's."""
    if hang is None:
        return ""
    why = f"it has been computing for {hang.seconds:.3g} s" if isinstance(hang, HungTaskError) else str(hang)
    return f"; {'; '.join([why, *reversed(hang.waits)])}"
