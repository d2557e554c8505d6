"""Figures of steps for programs that draw them over time: what the observers for TensorBoard and MLflow share.

::

    add ──▶ a queue (bounded: when it is full, new rows are dropped) ──▶ a thread: writes rows to the store

The thread is a daemon, so a store that does not answer delays neither a step nor the end of the process. The queues of
the stores' own libraries do not do: MLflow's has no bound, loses rows silently and keeps the process from ending, and
TensorBoard's blocks when it is closed while its disk hangs.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from typing import Literal, NamedTuple, TypeAlias

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.records.step_record import StepRecord

__all__ = ["Row", "RunEnd", "ScalarObserver", "report_scalars"]

RunEnd: TypeAlias = Literal["finished", "failed", "killed"]
"""How what was observed has ended."""

CLOSE_SECONDS = 10.0
"""How long ``close`` waits for a store that does not answer."""
BATCH = 100
"""Most rows that are written at once."""
MOST_ROWS = 10_000
"""Rows that wait for a store that does not answer."""

_logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """Figures of one step."""

    step: int
    at: float
    """Unix time in seconds."""
    values: Mapping[str, float]


class ScalarObserver(ABC):
    """An observer that writes figures of each step to a store, on a thread of its own.

    As an observer of a pipeline it writes seconds, bubble and utilization of every step that succeeds, under the
    pipeline's number of the step. ``add`` writes any figures. Call ``close`` at the end, or use the observer as a
    context manager. ``failed`` is called with a reason, from any thread, when rows are lost for the first time.
    """

    store: str
    """Its name in the log."""

    def __init__(self, failed: Callable[[str], object]) -> None:
        self._failed = failed
        self._rows: SimpleQueue[Row | None] = SimpleQueue()
        """``None`` is the end."""
        self._lost = 0
        self._end: RunEnd = "finished"
        self._ending = Event()
        self._thread = Thread(target=self._serve, name=f"asyncpipe {self.store}", daemon=True)
        self._thread.start()

    def __enter__(self) -> ScalarObserver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("finished" if kind is None else "failed" if issubclass(kind, Exception) else "killed")

    def step_completed(self, record: StepRecord) -> None:
        """Write the figures of a step that succeeded. Takes about 5 µs for each task of the step."""
        if record.outcome is Outcome.OK:
            norm = record.notes.gradient_norm
            values = {} if norm is None else {"gradient_norm": float(norm)}
            self.add(record.step, values | report_scalars(report(record)))

    def add(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Write ``values`` by name, of ``step``, at a Unix time (default: now). Quick; from any thread."""
        if self._ending.is_set():
            return
        if self._rows.qsize() < MOST_ROWS:
            self._rows.put(Row(step, time.time() if at is None else at, dict(values)))
        else:
            self._lose(1, "dropped", "does not keep up")

    def close(self, end: RunEnd = "finished") -> None:
        """Write what is left and note how the run ended. Blocks, for ``CLOSE_SECONDS`` at most; may be called again."""
        if not self._ending.is_set():
            self._end = end
            self._ending.set()
            self._rows.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _logger.warning("%s does not answer; its thread is left behind", self.store)

    # On the thread

    @abstractmethod
    def _write(self, rows: Sequence[Row]) -> None:
        """Write ``rows``; an error loses them."""

    @abstractmethod
    def _finish(self, end: RunEnd) -> None:
        """Close the store, if it was ever opened."""

    def _serve(self) -> None:
        while rows := self._taken():
            try:
                self._write(rows)
            except Exception as error:  # noqa: BLE001 - whatever a store raises
                self._lose(len(rows), "raised", f"cannot be written: {error}")
        if self._lost:
            _logger.error("%s lacks %d steps", self.store, self._lost)
        try:
            self._finish(self._end)
        except Exception as error:  # noqa: BLE001 - whatever a store raises
            _logger.error("%s cannot be closed: %s", self.store, error)

    def _taken(self) -> list[Row]:
        """The rows that wait, at least one; none when the end has come."""
        rows: list[Row] = []
        while (row := self._rows.get()) is not None:
            rows.append(row)
            if len(rows) == BATCH or self._rows.empty():
                return rows
        self._rows.put(None)  # After these rows, the end is read once more.
        return rows

    def _lose(self, steps: int, reason: str, why: str) -> None:
        if not self._lost:
            _logger.warning("%s does not get every step: it %s", self.store, why)
            self._failed(reason)
        self._lost += steps


def report_scalars(of: Report) -> dict[str, float]:
    """The figures of a step's report, by name."""
    found = {
        "seconds": of.seconds,
        "bubble_ratio": of.bubble_ratio,
        **{f"utilization/{device}": busy for device, busy in of.device_utilization.items()},
        **{f"memory/stage {stage}": float(peak) for stage, peak in enumerate(of.stage_memory)},
    }
    if of.size.tokens:
        found["tokens_per_second"] = of.tokens_per_second
    if of.mfu is not None:
        found["mfu"] = of.mfu
    return found
