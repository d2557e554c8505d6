"""A run of a job in a process of its own: what it tells there reaches the same objects here.

::

    cancelled ─▶ asked to end between two tasks
                   │ ``cancel_seconds`` later
                   ▼
                 it writes down what its threads do, and is killed with its children
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any

from asyncpipe.core.records.step_record import Observer
from asyncpipe.core.records.worker_notes import WorkerChange, WorkerWatcher
from asyncpipe.errors import WorkerLostError
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.runtime.portal import wait_uncancelled
from asyncpipe.runtime.workers.connection import WorkerConnection
from asyncpipe.runtime.workers.local_process import LocalProcess
from asyncpipe.service.jobs.hosts import Hosts
from asyncpipe.service.jobs.isolation.job_output import WholeLines
from asyncpipe.service.jobs.isolation.job_processes import JobProcesses, confines_of, crash, pickled
from asyncpipe.service.jobs.isolation.messages import RunJob, StepsSeen
from asyncpipe.service.jobs.job_run import JobRun
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import RunStarted, StepListener, StepProgress, TrainingSummary
from asyncpipe.train.run_orders import NoMoreStepsError, RunOrders
from asyncpipe.train.workload import Workload

__all__ = ["ProcessRun"]

_logger = logging.getLogger(__name__)


class ProcessRun:
    """A ``Run``, with the arguments of ``LastingRun`` behind the first two."""

    def __init__(
        self,
        processes: JobProcesses,
        hung: Callable[[int], object],
        job: Job,
        make_workload: Callable[[], Workload],
        *,
        progress: JobRun,
        collector: PipelineCollector,
        observers: Sequence[Observer],
        orders: RunOrders,
        drained: Hosts,
        **_: Any,
    ) -> None:
        """``hung`` is called with the number of hangs that the watchdog has found in the process."""
        self._processes = processes
        self._hung = hung
        self._hangs = 0
        self._job = job
        self._make_workload = pickled(make_workload)
        self._progress = progress
        self._log = progress.run_log
        self._stderr = WholeLines()
        self._collector = collector
        self._observers = list(observers)
        assert orders.share is not None
        self._orders, self._share = orders, orders.share
        self._drained = drained
        self._process: WorkerConnection | None = None
        """While it is up."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> TrainingSummary:
        """As ``LastingRun.run``, but every error is an ``EndedElsewhereError``."""
        name, settings = self._share.job, self._processes.settings
        unwatch = [self._drained.watch(self._tell_hosts), self._orders.watch(self._tell_orders)]
        try:
            async with self._processes.process(f"job {name}", self._take) as process:
                self._progress.noted(logging.INFO, f"runs in a process of its own, {process.pid}")
                self._process = process
                if isinstance(watched := process.supervisor.watched, LocalProcess):
                    watched.take_stderr = self._take_stderr
                self._tell_orders()
                message = RunJob(
                    self._job,
                    self._make_workload,
                    confines_of(settings, self._job),
                    settings.hangs,
                    self._log,
                    self._share,
                    self._processes.worker_path,
                    tuple(self._drained.others),
                    self._drained.units,
                )
                asked = asyncio.ensure_future(process.ask(message))
                if self._job.pool_workers() == "threads":
                    self._processes.share(process, self._job.pipeline.devices)
                return await self._answer(asked)
        finally:
            self._process = None
            self._orders.close()
            for each in unwatch:
                each()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._drained.forget(name)

    async def _answer(self, asked: asyncio.Future[TrainingSummary]) -> TrainingSummary:
        try:
            await asyncio.wait([asked])
        except asyncio.CancelledError:
            await wait_uncancelled(asyncio.ensure_future(self._end_early(asked)))
            if asked.exception() is not None:
                raise
        try:
            return asked.result()
        except WorkerLostError as error:
            raise crash(error, self._processes.settings.job_memory) from error

    async def _end_early(self, asked: asyncio.Future[TrainingSummary]) -> None:
        """Return when ``asked`` is done."""
        self._send("cancel")
        seconds = self._processes.settings.cancel_seconds
        await asyncio.wait([asked], timeout=seconds)
        if not asked.done() and self._process is not None:
            text = f"it has not ended within {seconds:g} s of being asked, so its process is killed"
            self._progress.noted(logging.WARNING, text)
            self._process.kill("it did not end when it was told to", stacks=True)
            await asyncio.wait([asked])

    # What the process is told

    def _send(self, *message: object) -> None:
        if self._process is not None:
            with suppress(WorkerLostError):
                self._process.send(message)

    def _tell_hosts(self) -> None:
        self._send("hosts", self._drained.units)

    def _tell_orders(self) -> None:
        if self._orders.stopping:
            self._send("stop")
        if self._orders.wants_schedule and self._process is not None:
            self._begin(self._orders.follow(partial(self._follow, self._process)))
        if (share := self._orders.share) is not None and share != self._share:
            self._share = share
            self._send("share", share)

    async def _follow(self, process: WorkerConnection, schedule: str) -> None:
        try:
            await process.ask(("schedule", schedule))
        except WorkerLostError as error:
            raise NoMoreStepsError("the run has ended") from error

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What the process says

    def _take(self, message: Any) -> None:
        match message:
            case StepProgress():
                figures = (message.loss, message.samples, message.tokens, message.seconds)
                self._tell(StepListener, lambda each: each.training_step(*figures))
                self._progress.stepped(message)
            case StepsSeen():
                self._collector.merge(message.totals)
                for record in message.records:
                    self._tell(object, methodcaller("step_completed", record))
                self._hung(message.hung - self._hangs)
                self._hangs = message.hung
            case WorkerChange():
                self._drained.tell(self._share.job, message)
                self._tell(WorkerWatcher, lambda each: each.worker_changed(message))
            case RunStarted():
                self._progress.started(message)
            case ("entered" | "noted" | "waiting" | "snapshot" as what, *told):
                getattr(self._progress, what)(*told)
            case ("keep", number):
                self._begin(self._keep(number))

    def _take_stderr(self, text: str) -> None:
        if (lines := self._stderr.of(text)) is not None:
            self._log.say("stderr", lines)

    async def _keep(self, number: int) -> None:
        """Tell the process that all losses that it has told are in the store: its snapshot may be there now."""
        await self._progress.keep()
        self._send("kept", number)

    def _tell(self, kind: type[Any], tell: Callable[[Any], object]) -> None:
        """Tell all observers of this ``kind``; one that raises is removed, as by a pipeline."""
        for observer in [each for each in self._observers if isinstance(each, kind)]:
            try:
                tell(observer)
            except Exception:
                _logger.exception("observer %r failed and is removed", observer)
                self._observers.remove(observer)
                self._collector.observer_failed("raised")
