"""A run of a job whose training is in a process of its own: what it tells there reaches the same objects here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from asyncpipe.core.policies.share import Share
from asyncpipe.core.records.step_record import Observer, StepRecord
from asyncpipe.core.records.worker_notes import WorkerChange, WorkerWatcher
from asyncpipe.errors import WorkerLostError
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.service.jobs.hosts import Hosts
from asyncpipe.service.jobs.isolation.job_processes import JobProcess, JobProcesses, confines_of, pickled
from asyncpipe.service.jobs.isolation.messages import (
    Collected,
    FollowSchedule,
    Hung,
    Keep,
    Kept,
    LeaveHosts,
    Progressed,
    RecordsSeen,
    RunJob,
    StepDone,
    StepTold,
    StopRun,
    WorkerTold,
)
from asyncpipe.service.jobs.isolation.told_record import RecordReader
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import ProgressSink, StepListener, TrainingSummary
from asyncpipe.train.schedule_changes import NoMoreStepsError
from asyncpipe.train.workload import Workload

__all__ = ["ProcessTrainer"]

_logger = logging.getLogger(__name__)

SEEN_EVERY = 32
"""Records between two that tell the process how far this side is."""


class ProcessTrainer:
    """A ``JobTrainer``, with the arguments of ``LastingRun`` behind the first two."""

    def __init__(
        self,
        processes: JobProcesses,
        hung: Callable[[int], object],
        job: Job,
        make_workload: Callable[[], Workload],
        *,
        progress: ProgressSink,
        collector: PipelineCollector,
        observers: Sequence[Observer],
        share: Share,
        leave: Hosts,
        **_: Any,
    ) -> None:
        """``hung`` is called with the number of hangs that the watchdog has found in the process."""
        self._processes = processes
        self._hung = hung
        self._hangs = 0
        self._job = job
        self._make_workload = pickled(make_workload)
        self._progress = progress
        self._collector = collector
        self._observers: list[Observer] = [collector, *observers]
        self._share = share
        self._leave = leave
        self._reader = RecordReader()
        self._records = 0
        self._process: JobProcess | None = None
        self._up = asyncio.Event()
        """Set when the process has been told what to run, or the run has ended."""
        self._stopping = False
        self._keeping: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """End after the current step; a run whose process is not up yet ends before the first one."""
        self._stopping = True
        if self._process is not None:
            self._process.send(StopRun())

    async def change_schedule(self, name: str) -> None:
        """As ``LastingRun.change_schedule``."""
        await self._up.wait()
        try:
            if self._process is None:
                raise NoMoreStepsError("the run has ended")
            await self._process.ask(FollowSchedule(name))
        except WorkerLostError as error:
            raise NoMoreStepsError("the run has ended") from error

    def change_share(self, share: Share) -> None:
        """Note that another class counts from the next run on; weights do not count between processes."""
        if share.background != self._share.background:
            self._progress.noted(logging.INFO, "its priority class counts from its next run on, in a new process")
        self._share = share

    async def run(self) -> TrainingSummary:
        """As ``LastingRun.run``, but every error is an ``EndedElsewhereError``."""
        settings = self._processes.settings
        confines = confines_of(settings, self._job, is_background=self._share.background)
        watchdog = (settings.watchdog_factor, settings.watchdog_floor)
        path, others = self._processes.worker_path, tuple(self._leave.others)
        unwatch = self._leave.watch(self._tell_hosts)
        try:
            async with self._processes.process(f"job {self._share.job}", self._take, self._progress.noted) as process:
                self._progress.noted(logging.INFO, f"runs in a process of its own, {process.pid}")
                self._process = process
                if self._stopping:
                    process.send(StopRun())
                self._up.set()
                left = self._leave.left
                message = RunJob(self._job, self._make_workload, confines, watchdog, path, others, left)
                summary: TrainingSummary = await process.have_done(message)
                return summary
        finally:
            self._process = None
            self._up.set()
            await asyncio.gather(*self._keeping, return_exceptions=True)
            self._leave.forget(self._share.job)
            unwatch()

    def _tell_hosts(self) -> None:
        if self._process is not None:
            self._process.send(LeaveHosts(self._leave.left))

    # What the process says

    def _take(self, message: Any) -> None:
        match message:
            case StepTold(record=told):
                self._take_record(self._reader.read(told))
            case StepDone():
                self._tell_figures(message)
            case Progressed(method=method, arguments=arguments):
                getattr(self._progress, method)(*arguments)
            case Collected(method=method, arguments=arguments):
                getattr(self._collector, method)(*arguments)
            case WorkerTold(change=change):
                self._leave.tell(self._share.job, change)
                self._tell_change(change)
            case Keep(number=number):
                keeping = asyncio.create_task(self._keep(number), name=f"asyncpipe losses of {self._share.job}")
                self._keeping.add(keeping)
                keeping.add_done_callback(self._keeping.discard)
            case Hung(hung=hung):
                self._hung(hung - self._hangs)
                self._hangs = hung

    async def _keep(self, number: int) -> None:
        """Tell the process that all losses that it has told are in the store: its snapshot may be there now."""
        await self._progress.keep()
        if self._process is not None:
            self._process.send(Kept(number))

    def _take_record(self, record: StepRecord) -> None:
        self._tell(lambda each: each.step_completed(record))
        self._records += 1
        if self._records % SEEN_EVERY == 0 and self._process is not None:
            self._process.send(RecordsSeen(self._records))

    def _tell_figures(self, step: StepDone) -> None:
        def tell(observer: Observer) -> None:
            if isinstance(observer, StepListener):
                observer.training_step(step.loss, step.samples, step.tokens, step.duration)

        self._tell(tell)

    def _tell_change(self, change: WorkerChange) -> None:
        def tell(observer: Observer) -> None:
            if isinstance(observer, WorkerWatcher):
                observer.worker_changed(change)

        self._tell(tell)

    def _tell(self, tell: Callable[[Observer], object]) -> None:
        """Tell all observers; one that raises is removed, as by a pipeline."""
        for observer in tuple(self._observers):
            try:
                tell(observer)
            except Exception:
                _logger.exception("observer %r failed and is removed", observer)
                self._observers.remove(observer)
                self._collector.observer_failed("raised")
