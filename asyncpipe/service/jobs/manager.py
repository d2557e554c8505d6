"""The manager starts queued jobs, records how each run ends, and stops all runs when the service ends.

::

    ActiveJobs.changed ─▶ job_queue.decisions ─▶ queued → running ─▶ JobRun ─▶ RunOutcome ─▶ next_state ─▶ transition
                             ▲                                                                                 │
                             └─────────────────────────────────────────────────────────────────────────────────┘

Jobs on threads train on one ``DevicePool``; with ``isolation = "process"`` each job has its own process. The manager
stays on the event loop that opened it. If the store cannot record a transition (its disk is full), the manager tries
again until it can or the service ends. The store then still says that the job runs, and the next start resumes it from
its last snapshot, as after a kill.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

from asyncpipe.errors import AsyncpipeError
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.runtime.thread_calls import set_within
from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.jobs.active_jobs import ActiveJobs
from asyncpipe.service.jobs.deadlines import end_overdue
from asyncpipe.service.jobs.ended_jobs import EndedJobs
from asyncpipe.service.jobs.failure_texts import root_line
from asyncpipe.service.jobs.hosts import Hosts
from asyncpipe.service.jobs.isolation.job_processes import JobProcesses
from asyncpipe.service.jobs.isolation.process_run import ProcessRun
from asyncpipe.service.jobs.job_folder import JOB_ID
from asyncpipe.service.jobs.job_log import JobLog, JobLogs
from asyncpipe.service.jobs.job_queue import (
    BACKGROUND_LOAD,
    Candidate,
    Capacity,
    QueueAction,
    QueueDecision,
    decisions,
    why_behind,
)
from asyncpipe.service.jobs.job_run import JobRun, MakeTrainer
from asyncpipe.service.jobs.lost_state import make_ready
from asyncpipe.service.jobs.outlook import Outlook
from asyncpipe.service.jobs.quotas import Quotas
from asyncpipe.service.jobs.run_outcome import RunEnding, RunOutcome, next_state
from asyncpipe.service.jobs.service_metrics import ServiceMetrics
from asyncpipe.service.jobs.usage import Usage
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import JobStore, StoreError
from asyncpipe.service.submission.entries import Entries, EntryError
from asyncpipe.service.submission.submission import job_of
from asyncpipe.train.blocking_calls import in_thread
from asyncpipe.train.lasting_run import LastingRun
from asyncpipe.train.workload import Workload

__all__ = ["Manager"]

_logger = logging.getLogger(__name__)

_ANY_JOB = re.compile(rf"job {JOB_ID.pattern}")
RETRY_SECONDS = 5.0
"""Seconds before a failed store is tried again; also the longest wait before a failed job is tried again."""

REMEMBERED = 8
"""Half-lives after which what a user has used is not loaded again: 0.4 % of it would count."""


class Manager:
    """Runs the jobs of ``store``. An async context manager, used on one loop. On exit it drains."""

    def __init__(
        self,
        settings: ServiceSettings,
        entries: Entries,
        store: JobStore,
        *,
        metrics: ServiceMetrics | None = None,
        make_trainer: MakeTrainer | None = None,
        retry_seconds: float = RETRY_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``store`` is open, and its owner closes it. ``make_trainer`` and ``clock`` are for tests."""
        self.settings = settings
        self.metrics = metrics or ServiceMetrics()
        self.logs = JobLogs(store, settings.folder / "jobs", self._log_failed)
        usage = Usage(settings.half_life, settings.shares)
        self.jobs = ActiveJobs(store, self.logs, self.metrics, self._is_suspect, usage)
        folders = [] if settings.entry_path is None else [str(settings.entry_path.resolve())]
        launcher = settings.ray.launcher("service") if settings.workers == "ray" else settings.workers
        self.pool = DevicePool(workers=launcher, worker_path=folders, **settings.hangs)
        self.hosts = Hosts(self.pool, settings.devices, self._workers_in_use)
        self.hosts.watch(self.jobs.changed.set)
        self.ended = EndedJobs(self.jobs, self.logs.folder)
        self.quotas = Quotas(settings, store, self.logs.folder)
        store.admit = self.quotas.admit
        self.entries = entries
        self.processes = JobProcesses(settings) if settings.is_isolated and make_trainer is None else None
        self._hung = 0
        """Hangs that the watchdogs of jobs' processes have found."""
        self._make_trainer = make_trainer or (LastingRun if self.processes is None else self._process_run)
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._stack = AsyncExitStack()
        self._runs: set[asyncio.Task[None]] = set()
        self._scheduler: asyncio.Task[None] | None = None
        """From then on that the store has said what the last process has left."""
        self._watch: asyncio.Task[None]
        self._drained: asyncio.Task[None] | None = None
        self.shutdown: str | None = None
        """Why no more jobs start; ``None`` while they do. Set by ``take_no_more``, from any thread."""
        self.ending = asyncio.Event()
        """Set when ``drain`` begins."""
        self._giving_up = asyncio.Event()
        """Set when the grace period is over."""

    # Opening and closing

    async def __aenter__(self) -> Manager:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.pool)
            if self.processes is not None:
                await stack.enter_async_context(self.processes)
            try:
                await self._load()
            except StoreError as error:
                if self.jobs.store.trouble is None:
                    raise
                _logger.error("no job goes on until the store can be written: %s", error)
            self._watch = asyncio.create_task(self._watch_store(), name="asyncpipe store watch")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.drain("the service was closed")
        finally:
            self._watch.cancel()
            await asyncio.wait([self._watch])
            self.logs.close()
            await self._stack.aclose()

    async def drain(self, cause: str) -> None:
        """Start no more jobs, and stop each running one after its step, with a snapshot; those are queued again.

        Runs that have not ended after ``settings.grace_seconds`` are cancelled. A second call waits for the first.
        """
        self.take_no_more(cause)
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain(), name="asyncpipe drain")
        await asyncio.shield(self._drained)

    async def _drain(self) -> None:
        self.ending.set()
        self.jobs.changed.set()
        loop = asyncio.get_running_loop()
        over = loop.call_later(self.settings.grace_seconds, self._give_up)
        try:
            if self._scheduler is not None:
                with suppress(Exception):  # Logged where it was raised.
                    await self._scheduler
            for run in list(self.jobs.running.values()):
                run.orders.stop()
            if self._runs:
                await asyncio.wait(self._runs)
        finally:
            over.cancel()

    def _give_up(self) -> None:
        self._giving_up.set()
        for run in list(self.jobs.running.values()):
            _logger.warning("job %s did not stop within the grace period and is cancelled", run.record.id)
            run.cancel()

    async def look_again(self) -> None:
        """Act on settings that have changed."""
        self.jobs.changed.set()

    # From any thread

    def take_no_more(self, cause: str) -> None:
        """Accept and start no more jobs. The first ``cause`` is kept."""
        self.shutdown = self.shutdown or cause

    def broken(self) -> str | None:
        """The failure that only a restart of the process can repair, if there is one."""
        if self._scheduler is not None and self._scheduler.done() and self.shutdown is None:
            return "the job scheduler has failed"
        if self.pool.is_broken:
            return "the task scheduler has failed"
        return None if self.jobs.store.is_alive else "the job store's thread has ended"

    @property
    def hung(self) -> int:
        """How many hangs watchdogs have found, and ended."""
        assert self.pool.watchdog is not None
        return self.pool.watchdog.hung + self._hung

    def outlook(self, job: str) -> Outlook:
        """What ``outlooks`` says of one job."""
        return self.outlooks([job])[job]

    def outlooks(self, jobs: Sequence[str]) -> Mapping[str, Outlook]:
        """What is known of each job now and is not in its record. The time that it has trained is not part of it.

        On the loop.
        """
        queue, now, held_back = self.jobs.queue, self._clock(), self._held_back()
        found = list(self._decisions()) if any(job in queue for job in jobs) else []
        reasons = {each.job: each.reason for each in found}

        def outlook(job: str) -> Outlook:
            if (run := self.jobs.running.get(job)) is not None:
                return run.pace.outlook(run.waits_for)
            if (record := queue.get(job)) is None:
                return Outlook()
            before = queue.before(job, now)
            reason = self.shutdown or held_back(record) or reasons.get(job)
            reason = reason or why_behind(found[0], found[-1], before)
            if self.settings.others == "none":
                reason = _ANY_JOB.sub("another job", reason)
            return Outlook(waits_for=reason, place=before + 1)

        return {job: outlook(job) for job in jobs}

    # Starting jobs

    async def _schedule(self) -> None:
        try:
            while self.shutdown is None:
                self.jobs.changed.clear()
                try:
                    pause = await end_overdue(self.jobs, self._clock(), self.settings.grace_seconds)
                    while await self._act():
                        pass
                except StoreError as error:
                    _logger.error("no job can start or end at its deadline, will try again: %s", error)
                    pause = self._retry_seconds
                await set_within(self.jobs.changed, pause)
        except Exception:
            _logger.exception("the job scheduler failed; no more jobs start")
            raise

    async def _load(self) -> None:
        """Load what the last process has left, and start the scheduler."""
        most, since = self.settings.max_attempts, self._clock() - REMEMBERED * self.settings.half_life
        await self.jobs.load(most_crashes=most, resume=self.settings.resume, since=since)
        self._scheduler = asyncio.create_task(self._schedule(), name="asyncpipe job scheduler")

    async def _watch_store(self) -> None:
        """Try a store again and again that could not be written; when it can be, catch up on what had to wait."""
        while True:
            await asyncio.sleep(self._retry_seconds)
            if self.jobs.store.trouble is None and self._scheduler is not None:
                continue
            with suppress(StoreError, OSError):
                await self.jobs.store.probe()
                if self._scheduler is None:
                    await self._load()
                await self.jobs.save()
                self.jobs.changed.set()

    async def _act(self) -> bool:
        """Start the queued job that may begin now; false if there is none."""
        if self.shutdown is not None:
            return False
        for decision in self._decisions():
            self.jobs.queue.follow(decision)
            if decision.action is QueueAction.BEGIN:
                await self._begin(decision)
                return True
        return False

    def _decisions(self) -> Iterator[QueueDecision]:
        settings, running, held_back = self.settings, self.jobs.running.values(), self._held_back()
        has = Capacity(
            settings.devices, settings.max_running, settings.share_devices, settings.memory_limit, self.hosts.leaving
        )
        waiting = (job for job in self.jobs.queue.ordered(self._clock()) if held_back(job) is None)
        running_now = [self._candidate(run.record, run.has_snapshot) for run in running]
        return decisions(map(self._candidate, waiting), running_now, has)

    def _held_back(self) -> Callable[[JobRecord], str | None]:
        return self.quotas.may_begin(run.record for run in self.jobs.running.values())

    def _candidate(self, record: JobRecord, has_snapshot: bool = False) -> Candidate:
        suspect = not has_snapshot and self._is_suspect(record)
        load = BACKGROUND_LOAD if record.is_background else record.weight
        passed = self.jobs.queue.passed(record.id)
        return Candidate(record.id, record.request, record.memory or 0, suspect, record.devices, load, *passed)

    def _is_suspect(self, record: JobRecord) -> bool:
        """Whether one more crash of the service during this job would put it into quarantine.

        Never true if jobs have their own processes: one that crashes harms no other job.
        """
        return self.processes is None and 0 < self.settings.max_attempts - 1 <= record.crashes

    async def _begin(self, decision: QueueDecision) -> None:
        job_id, reason = decision.job, decision.reason
        async with self.jobs.turn(job_id):
            current = self.jobs.queue.get(job_id)
            if current is None or self.shutdown is not None:
                return
            try:
                job = job_of(replace(current, placed=decision.devices), self.settings)
                make_workload = self.entries.make(current.entry, current.table("parameters"))
                if changed := await in_thread(lambda: self.entries.changed(current.entry, current.code)):
                    if self.settings.changed_code == "refuse" or current.document.get("code"):
                        raise EntryError(f"{changed}; fork it, or bring its code back")
                    reason += f"; {changed}"
            except AsyncpipeError as error:
                cause = f"cannot be built: {error}"
                await self.jobs.become(current, JobState.FAILED, cause, root=root_line("", cause))
                return
            if current.snapshot is not None or current.from_step is not None:
                try:
                    lost, older = await in_thread(lambda: make_ready(self.logs.folder / current.id, current))
                except OSError as error:
                    await self.jobs.become(current, JobState.FAILED, f"its folder cannot be used: {error.strerror}")
                    return
                if lost is not None:
                    await self.jobs.become(current, JobState.QUARANTINED, lost)
                    return
                reason += older
            running = await self.jobs.become(current, JobState.RUNNING, reason, placed=decision.devices)
            run = JobRun(running, job, self.metrics.collector_of(running), lambda: self.metrics.retried("step"))
            if self._is_suspect(running):
                run.on_snapshot = self.jobs.changed.set  # Others may run beside it from then on.
            self.jobs.running[job_id] = run
            task = asyncio.create_task(self._live(run, make_workload), name=f"asyncpipe run of {job_id}")
            self._runs.add(task)
            task.add_done_callback(self._runs.discard)

    # Running jobs

    def _process_run(self, *arguments: Any, **options: Any) -> ProcessRun:
        assert self.processes is not None
        return ProcessRun(self.processes, self._count_hung, *arguments, **options)

    def _count_hung(self, hung: int) -> None:
        self._hung += hung

    async def _live(self, run: JobRun, make_workload: Callable[[], Workload]) -> None:
        """One run, from its start to the transition that ends it."""
        job = run.record.id
        try:
            async with self.logs.use(job) as log:
                await self._end(run, await self._run(run, make_workload, log))
        except StoreError as error:  # The log could not be opened: the run has not started.
            await self._end(run, RunOutcome(RunEnding.FAILED, str(error)))
        except Exception:
            _logger.exception("the end of a run of job %s could not be recorded; this is a bug in asyncpipe", job)
        finally:
            self.metrics.ended(job)
            if self.jobs.running.get(job) is run:  # The store still says "running": recovered at the next start.
                del self.jobs.running[job]
            self.jobs.changed.set()

    async def _run(self, run: JobRun, make_workload: Callable[[], Workload], log: JobLog) -> RunOutcome:
        if self.shutdown is not None:
            run.orders.stop()
        try:
            return await run.run(self._make_trainer, make_workload, log, pool=self.pool, drained=self.hosts)
        except Exception as error:
            _logger.exception("the run of job %s failed in asyncpipe's own code; this is a bug", run.record.id)
            return RunOutcome(RunEnding.FAILED_PERMANENTLY, f"{type(error).__name__}: {error}")

    async def _end(self, run: JobRun, outcome: RunOutcome) -> None:
        """Record the job's next state in the store, trying until it succeeds or the grace period is over."""
        job, most_crashes = run.record.id, self.settings.max_attempts
        failed, crashed = outcome.ending is RunEnding.FAILED, outcome.ending is RunEnding.CRASHED
        failures = (0 if run.has_snapshot else run.record.failures) + failed
        crashes = (0 if run.has_snapshot else run.record.crashes) + crashed
        if failed and failures <= run.record.retries:
            await self._back_off(failures)
        while True:
            try:
                async with self.jobs.turn(job):
                    await self.logs.flush(job)  # A store that has failed may have its last steps now.
                    root = outcome.root or run.record.root
                    counted: dict[str, Any] = {"failures": failures, "crashes": crashes, "root": root}
                    to, cause = next_state(outcome, replace(run.record, **counted), most_crashes, self.shutdown)
                    is_retry = (crashed or failed) and to is JobState.QUEUED
                    await self.jobs.become(run.record, to, cause, is_retry=is_retry, **counted)
                return
            except StoreError as error:
                _logger.error("a run of job %s has ended, and the store cannot record it: %s", job, error)
                if self._giving_up.is_set() or await set_within(self._giving_up, self._retry_seconds):
                    return

    async def _back_off(self, failures: int) -> None:
        """Wait before the next try, twice as long after each failure; not after the first."""
        if failures > 1:
            await set_within(self.ending, min(2.0 ** (failures - 2), self._retry_seconds))

    def _workers_in_use(self) -> Mapping[str, Sequence[str]]:
        return {job: run.workers for job, run in self.jobs.running.items()}

    def _log_failed(self, job: str, text: str) -> None:
        _logger.error("job %s: %s", job, text)
        self.metrics.log_failed()
