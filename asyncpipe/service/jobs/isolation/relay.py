"""What a run tells in a process of its own, told to the service: its collector, observer and progress sink."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import thread_time
from typing import Any

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import WorkerChange
from asyncpipe.errors import RemoteError
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.runtime.workers.remote_errors import portable_error
from asyncpipe.service.jobs.isolation.messages import StepsSeen
from asyncpipe.service.jobs.run_log import RunLog
from asyncpipe.train.progress import ProgressSink, RunStarted, StepProgress
from asyncpipe.train.trace_files import with_errors

__all__ = ["Relay", "RelayedProgress"]

REPORT_SECONDS = 1.0
"""The least time between two reports."""
REST = 50.0
"""A report that took a second is followed by this many seconds without one: records of huge graphs are slow to send."""
TOLD_STEPS, TOLD_TASKS, TOLD_SPOILED = 3, 20_000, 64
"""How many of the last steps a report has the records of, the most tasks of several, and how many that failed."""
KNOWN = ("builtins", "asyncpipe", "torch")
"""Modules whose errors travel as they are."""


class Relay(PipelineCollector):
    """Counts the steps, and tells the service now and then what that adds, with the records of the last ones."""

    def __init__(self, process: str, send: Callable[[object], None]) -> None:
        super().__init__()
        self.hung: Callable[[], int] = lambda: 0
        self._process = process
        self._send = send
        self._done: deque[StepRecord] = deque(maxlen=TOLD_STEPS)
        self._spoiled: deque[StepRecord] = deque(maxlen=TOLD_SPOILED)

    def step_completed(self, record: StepRecord) -> None:
        """Keep the step for the next report."""
        super().step_completed(record)
        if record.outcome is Outcome.OK:
            self._done.append(record)
        else:
            self._spoiled.append(with_errors(record, self._told_error))

    def worker_changed(self, change: WorkerChange) -> None:
        super().worker_changed(change)
        self._send(change)

    def report(self) -> float:
        """Tell what was seen since the last report; seconds until the next one. Blocks; for one thread at a time."""
        began = thread_time()
        done, spoiled = ([each.popleft() for _ in range(len(each))] for each in (self._done, self._spoiled))
        while len(done) > 1 and sum(len(each.graph.tasks) for each in done) > TOLD_TASKS:
            del done[0]
        records = sorted([*done, *spoiled], key=lambda record: record.step)
        self._send(StepsSeen(records, self.drain(), self.hung()))
        return max(REPORT_SECONDS, REST * (thread_time() - began))

    def _told_error(self, error: BaseException) -> BaseException:
        """``error``, if the other process surely knows its class; or one that is called so."""
        if type(error).__module__.partition(".")[0] in KNOWN:
            return portable_error(self._process, error)
        return _of_class(type(error).__name__, self._process, str(error))


def _of_class(name: str, process: str, text: str) -> RemoteError:
    """An error whose class is called ``name``: a job's own module need not be importable where it is read."""

    def reduce(_: RemoteError) -> tuple[Any, ...]:
        return _of_class, (name, process, text)

    made: RemoteError = type(name, (RemoteError,), {"__reduce__": reduce})(process, text)
    return made


class RelayedProgress(ProgressSink):
    """Tells the service."""

    log: RunLog
    """Where it keeps what the run says, once that is known."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send
        self._keeping: dict[int, asyncio.Future[None]] = {}
        self._keeps = 0

    def started(self, run: RunStarted) -> None:
        self._send(run)

    def stepped(self, progress: StepProgress) -> None:
        # Of its tasks the records tell. Without them it is small.
        bare = replace(progress.report, tasks=(), gates_opened={}, arrived={}, compilations=())
        self._send(replace(progress, report=bare))

    def entered(self, phase: str) -> None:
        self._send(("entered", phase))

    def noted(self, level: int, text: str) -> None:
        self._send(("noted", level, text))

    def said(self, stream: str, text: str) -> None:
        self.log.say(stream, text)

    def waiting(self, reason: str | None) -> None:
        self._send(("waiting", reason))

    def snapshot(self, step: int, path: Path) -> None:
        self._send(("snapshot", step, path))

    async def keep(self) -> None:
        # A snapshot must not be there before the losses that lead to it: both processes may be killed in between.
        self._keeps = number = self._keeps + 1
        kept = self._keeping[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(("keep", number))
            await kept
        finally:
            del self._keeping[number]

    def kept(self, number: int) -> None:
        """What ``keep`` of this number waits for is done."""
        if (kept := self._keeping.get(number)) is not None and not kept.done():
            kept.set_result(None)
