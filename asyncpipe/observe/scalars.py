"""Figures of steps for programs that draw them over time: what TensorBoard and MLflow have in common.

::

    loop        add, step_completed ──▶ rows that wait (bounded: the oldest are dropped, and counted)
                                           │
    a thread    folds records, writes ◀────┘   a store that cannot be reached is tried again, for as long as it takes

The loop only keeps a row. What is slow, and what may fail (a disk, a server), is the thread's.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Condition, Thread
from typing import Literal, NamedTuple, TypeAlias

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.records.step_record import StepRecord

__all__ = ["RunEnd", "ScalarObserver", "ScalarRow", "report_scalars"]

RunEnd: TypeAlias = Literal["finished", "failed", "killed"]
"""How what was observed has ended."""

MOST_ROWS = 10_000
"""Rows that wait for a store that cannot be reached."""
MOST_RECORDS = 32
"""Of these, rows whose records have not been folded; each holds its whole journal."""
BATCH = 100
"""Rows that are written at once."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a store that failed is tried again."""
CLOSE_SECONDS = 10.0
"""How long ``close`` waits for the last rows."""

_logger = logging.getLogger(__name__)


class ScalarRow(NamedTuple):
    """Figures of one step."""

    step: int
    at: float
    """Unix time in seconds."""
    values: Mapping[str, float]


class ScalarObserver(ABC):
    """An observer that writes figures of each step to a store, on a thread of its own.

    As an observer of a pipeline it writes seconds, bubble and utilization of every step that succeeds, under the
    pipeline's number of the step. ``add`` writes any figures. ``close`` when all is done, or use it as a context
    manager: what has not been written by then is said in the log. ``failed`` is called with a reason when rows are
    dropped or the store fails, from any thread.
    """

    def __init__(self, store: str, failed: Callable[[str], object] = lambda reason: None) -> None:
        """``store`` names it in messages."""
        self._store = store
        self._failed = failed
        self._rows: deque[ScalarRow | tuple[float, StepRecord]] = deque()
        self._records = 0
        """How many of the rows are records."""
        self._dropped = 0
        self._changed = Condition()
        self._end: RunEnd | None = None
        self._thread: Thread | None = None

    def __enter__(self) -> ScalarObserver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("finished" if kind is None else "failed" if issubclass(kind, Exception) else "killed")

    def step_completed(self, record: StepRecord) -> None:
        """Write the figures of a step that succeeded. Quick; from the driver's loop."""
        if record.outcome is Outcome.OK:
            self._put((time.time(), record))

    def add(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Write ``values`` by name, of ``step``, at a Unix time (default: now). Quick; from any thread."""
        self._put(ScalarRow(step, time.time() if at is None else at, dict(values)))

    def close(self, end: RunEnd = "finished") -> None:
        """Write what is left, and say how it ended. Blocks, for some seconds at most; may be called again."""
        with self._changed:
            self._end = self._end or end
            if self._thread is None:
                self._start()
            self._changed.notify_all()
        assert self._thread is not None
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _logger.warning("%s does not answer; its thread is left behind", self._store)

    @abstractmethod
    def _write(self, rows: Sequence[ScalarRow]) -> None:
        """Write rows. On the thread; what it raises is logged, and the rows are written again later."""

    @abstractmethod
    def _finish(self, end: RunEnd) -> None:
        """Close the store. On the thread, once."""

    def _put(self, row: ScalarRow | tuple[float, StepRecord]) -> None:
        with self._changed:
            if self._end is not None:
                return
            is_record = not isinstance(row, ScalarRow)
            if len(self._rows) >= MOST_ROWS or (is_record and self._records >= MOST_RECORDS):
                self._drop(is_record)
            self._records += is_record
            self._rows.append(row)
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def _drop(self, a_record: bool) -> None:
        """Drop the oldest row, or the oldest record."""
        index = next((n for n, row in enumerate(self._rows) if not a_record or not isinstance(row, ScalarRow)), 0)
        self._records -= not isinstance(self._rows[index], ScalarRow)
        del self._rows[index]
        self._dropped += 1
        if self._dropped == 1:
            _logger.warning("%s is too slow; it does not get every step", self._store)
            self._failed("dropped")

    def _start(self) -> None:
        self._thread = Thread(target=self._serve, name=f"asyncpipe {self._store}", daemon=True)
        self._thread.start()

    # On the thread

    def _serve(self) -> None:
        failures = 0
        rows: list[ScalarRow] = []
        while rows or self._wait():
            rows = rows or self._taken()
            is_last = self._end is not None  # The end may come while this try fails; then there is another one.
            try:
                self._write(rows)
                rows, failures = [], 0
            except Exception as error:  # noqa: BLE001 - whatever a store raises
                failures += 1
                if failures == 1:
                    _logger.warning("%s cannot be written, will try again: %s", self._store, error)
                    self._failed("raised")
                if is_last:
                    break
                self._pause(min(FIRST_PAUSE * 2.0 ** (failures - 1), LONGEST_PAUSE))
        if lost := len(rows) + len(self._rows) + self._dropped:
            _logger.error("%s lacks %d steps", self._store, lost)
        try:
            self._finish(self._end or "finished")
        except Exception as error:  # noqa: BLE001 - whatever a store raises
            _logger.error("%s cannot be closed: %s", self._store, error)

    def _wait(self) -> bool:
        """Wait until there are rows; false at the end of all."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._end is not None)
            return bool(self._rows)

    def _pause(self, seconds: float) -> None:
        """Wait before the next try, until the end has come at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None, seconds)

    def _taken(self) -> list[ScalarRow]:
        with self._changed:
            taken = [self._rows.popleft() for _ in range(min(BATCH, len(self._rows)))]
            self._records -= sum(not isinstance(row, ScalarRow) for row in taken)
        return [row if isinstance(row, ScalarRow) else _folded(*row) for row in taken]


def report_scalars(of: Report) -> dict[str, float]:
    """The figures of a step's report, by name."""
    return {
        "seconds": of.seconds,
        "bubble_ratio": of.bubble_ratio,
        **{f"utilization/{device}": busy for device, busy in of.device_utilization.items()},
    }


def _folded(at: float, record: StepRecord) -> ScalarRow:
    return ScalarRow(record.step, at, report_scalars(report(record)))
