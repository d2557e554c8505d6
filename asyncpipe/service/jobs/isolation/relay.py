"""What a run tells in a process of its own, told to the service: its collector, observer and progress sink."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import WorkerChange
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.service.jobs.isolation.messages import Collected, Keep, Progressed, StepDone, StepTold, WorkerTold
from asyncpipe.service.jobs.isolation.told_record import RecordTeller
from asyncpipe.train.progress import ProgressSink, RunStarted, StepProgress

__all__ = ["Relay", "RelayedProgress"]

MOST_UNSEEN = 512
"""Records that are on their way. Where the service takes in none, more are dropped and counted: memory is bounded."""


class Relay(PipelineCollector):
    """Counts nothing here: ``send`` brings what it is told to the service's own collector and observers."""

    def __init__(self, process: str, send: Callable[[object], None]) -> None:
        super().__init__()
        self._send = send
        self._teller = RecordTeller(process)
        self._told = self._seen = 0

    def seen(self, records: int) -> None:
        """The service has taken in so many records."""
        self._seen = records

    def step_completed(self, record: StepRecord) -> None:
        """Tell the service, unless it is far behind."""
        if self._told - self._seen >= MOST_UNSEEN:
            self.observer_failed("dropped")
            return
        self._told += 1
        self._send(StepTold(self._teller.told(record)))

    def training_step(self, loss: float, samples: int, tokens: int, duration: float) -> None:
        self._send(StepDone(loss, samples, tokens, duration))

    def worker_changed(self, change: WorkerChange) -> None:
        self._send(WorkerTold(change))

    def snapshot_taken(self, seconds: float, at: float) -> None:
        self._send(Collected("snapshot_taken", (seconds, at)))

    def snapshot_failed(self) -> None:
        self._send(Collected("snapshot_failed", ()))

    def observer_failed(self, reason: str) -> None:
        self._send(Collected("observer_failed", (reason,)))


class RelayedProgress(ProgressSink):
    """Tells the service."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send
        self._keeping: dict[int, asyncio.Future[None]] = {}
        self._keeps = 0

    def started(self, run: RunStarted) -> None:
        self._tell("started", run)

    def stepped(self, progress: StepProgress) -> None:
        # Of its tasks the record tells. Without them it is small.
        bare = replace(progress.report, tasks=(), gates_opened={}, arrived={}, compilations=())
        self._tell("stepped", replace(progress, report=bare))

    def entered(self, phase: str) -> None:
        self._tell("entered", phase)

    def noted(self, level: int, text: str) -> None:
        self._tell("noted", level, text)

    def waiting(self, reason: str | None) -> None:
        self._tell("waiting", reason)

    def snapshot(self, step: int, path: Path) -> None:
        self._tell("snapshot", step, path)

    async def keep(self) -> None:
        # A snapshot must not be there before the losses that lead to it: both processes may be killed in between.
        self._keeps = number = self._keeps + 1
        kept = self._keeping[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Keep(number))
            await kept
        finally:
            del self._keeping[number]

    def kept(self, number: int) -> None:
        """What ``keep`` of this number waits for is done."""
        if (kept := self._keeping.get(number)) is not None and not kept.done():
            kept.set_result(None)

    def _tell(self, method: str, *arguments: object) -> None:
        self._send(Progressed(method, arguments))
