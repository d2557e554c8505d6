"""The manager starts queued jobs, records how each run ends, and stops all runs when the service ends.

::

    ActiveJobs.changed ─▶ job_queue.decide ─▶ queued → running ─▶ JobRun ─▶ RunOutcome ─▶ next_state ─▶ transition
                             ▲     │                                                                        │
                             │     └─▶ memory not known yet ─▶ footprint, in a thread                       │
                             └──────────────────────────────────────────────────────────────────────────────┘

All jobs train on one ``DevicePool``, on the event loop that opened the manager. If the store cannot record a transition
(its disk is full), the manager tries again until it can or the service ends. The store then still says that the job
runs, and the next start resumes it from its last snapshot, as after a kill.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from asyncpipe.errors import AsyncpipeError
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.runtime.watchdog import Watchdog
from asyncpipe.runtime.workers.ray_workers import RayWorkers
from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobState
from asyncpipe.service.jobs.active_jobs import ActiveJobs
from asyncpipe.service.jobs.deadlines import Deadlines
from asyncpipe.service.jobs.hosts import Hosts
from asyncpipe.service.jobs.isolation.job_processes import JobProcesses
from asyncpipe.service.jobs.isolation.process_trainer import ProcessTrainer
from asyncpipe.service.jobs.job_folder import set_aside_after
from asyncpipe.service.jobs.job_log import JobLog, JobLogs
from asyncpipe.service.jobs.job_queue import Candidate, QueueAction, QueueDecision, decide, why_behind
from asyncpipe.service.jobs.job_run import JobRun, MakeTrainer
from asyncpipe.service.jobs.lost_state import what_is_lost, what_is_older
from asyncpipe.service.jobs.memory_footprint import footprint
from asyncpipe.service.jobs.run_outcome import RunEnding, RunOutcome, Tries, is_permanent, next_state
from asyncpipe.service.jobs.service_metrics import ServiceMetrics
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import JobStore, StoreError
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import job_of
from asyncpipe.train.blocking_calls import DedicatedThread, in_thread
from asyncpipe.train.job_file import Job
from asyncpipe.train.lasting_run import LastingRun
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.workload import Workload

__all__ = ["Manager"]

_logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""How long to wait before a failed store is tried again, and at most before a job is tried again."""

Measure = Callable[..., Mapping[str, int]]


class Manager:
    """Runs the jobs of ``store``; an async context manager, of the loop that opens it, that drains at its end."""

    def __init__(
        self,
        settings: ServiceSettings,
        entries: Entries,
        store: JobStore,
        *,
        metrics: ServiceMetrics | None = None,
        make_trainer: MakeTrainer | None = None,
        measure: Measure | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """``store`` is open, and its owner closes it. ``make_trainer`` and ``measure`` are for tests."""
        self.settings = settings
        self.metrics = metrics or ServiceMetrics()
        self.logs = JobLogs(settings.folder / "jobs", self._log_failed)
        self.jobs = ActiveJobs(store, self.logs, self.metrics, settings.max_queued, self._forget)
        folders = [] if settings.entry_path is None else [str(settings.entry_path.resolve())]
        launcher = RayWorkers(**settings.ray.model_dump()) if settings.workers == "ray" else settings.workers
        self.pool = DevicePool(workers=launcher, worker_path=folders)
        self.watchdog = Watchdog(self.pool.driver, factor=settings.watchdog_factor, floor=settings.watchdog_floor)
        self.hosts = Hosts(self.pool, settings.devices, self._workers_in_use)
        self._entries = entries
        self._processes = JobProcesses(settings) if settings.is_isolated and make_trainer is None else None
        self._hung = 0
        """Hangs that were found in processes of jobs."""
        self._make_trainer = make_trainer or (LastingRun if self._processes is None else self._process_trainer)
        self._measure = measure
        self._retry_seconds = retry_seconds
        self._stack = AsyncExitStack()
        self._runs: set[asyncio.Task[None]] = set()
        self._peaks: dict[str, Mapping[str, int]] = {}
        """The measured memory by device, of jobs that have not ended."""
        self._failures: dict[str, int] = {}
        """How often each job failed since its last snapshot."""
        self._measuring: asyncio.Task[None] | None = None
        self._scheduler: asyncio.Task[None] | None = None
        self._expiry: asyncio.Task[None] | None = None
        self._drained: asyncio.Task[None] | None = None
        self.shutdown: str | None = None
        """Why no more jobs start; ``None`` while they do. Set by ``take_no_more``, from any thread."""
        self._ending = asyncio.Event()
        """Set when ``drain`` begins."""
        self._giving_up = asyncio.Event()
        """Set when the grace period is over."""

    # Opening and closing

    async def __aenter__(self) -> Manager:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.pool)
            await stack.enter_async_context(self.watchdog)
            if self._processes is not None:
                await stack.enter_async_context(self._processes)
            attempts, resume = self.settings.max_attempts, self.settings.resume
            for record in await self.jobs.load(most_crashes=attempts, resume=resume):
                _logger.info(
                    "job %s (%s) was running when the last process ended, and is %s now",
                    record.id,
                    record.spec.name,
                    record.state,
                )
            self._scheduler = asyncio.create_task(self._schedule(), name="asyncpipe job scheduler")
            deadlines = Deadlines(self.jobs, self.settings.grace_seconds, self._retry_seconds)
            self._expiry = asyncio.create_task(deadlines.watch(), name="asyncpipe deadlines")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.drain("the service was closed")
        finally:
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
        assert self._scheduler is not None
        assert self._expiry is not None
        self._ending.set()
        self._expiry.cancel()
        self.jobs.changed.set()
        loop = asyncio.get_running_loop()
        over = loop.call_later(self.settings.grace_seconds, self._give_up)
        try:
            with suppress(Exception):  # Logged where it was raised.
                await self._scheduler
            await asyncio.wait([self._expiry])
            for run in list(self.jobs.running.values()):
                run.stop()
            if self._measuring is not None:
                await asyncio.wait([self._measuring])
            if self._runs:
                await asyncio.wait(self._runs)
        finally:
            over.cancel()

    def _give_up(self) -> None:
        self._giving_up.set()
        for run in list(self.jobs.running.values()):
            _logger.warning("job %s did not stop within the grace period and is cancelled", run.record.id)
            run.cancel()

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
        return None if self.jobs.store.thread.is_alive else "the job store's thread has ended"

    def waits_for(self, job: str) -> str | None:
        """Why a queued job has not started, or a running one does not train; ``None`` for any other. On the loop."""
        if (run := self.jobs.running.get(job)) is not None:
            return run.waits_for
        if job not in self.jobs.queued:
            return None
        if self.shutdown is not None:
            return self.shutdown
        if (after := self.jobs.why_not_yet(job)) is not None:
            return after
        first = self.jobs.first()
        assert first is not None
        decision = self._decide(first)
        before = self.jobs.queue.before(job)
        return why_behind(decision, before) if before else decision.reason

    @property
    def hung(self) -> int:
        """How many hangs watchdogs have found, and ended."""
        return self.watchdog.hung + self._hung

    # Starting jobs

    async def _schedule(self) -> None:
        try:
            while self.shutdown is None:
                self.jobs.changed.clear()
                try:
                    while await self._act():
                        pass
                except StoreError as error:
                    _logger.error("no job can start, will try again: %s", error)
                    await _set_within(self.jobs.changed, self._retry_seconds)
                else:
                    await self.jobs.changed.wait()
        except Exception:
            _logger.exception("the job scheduler failed; no more jobs start")
            raise

    async def _act(self) -> bool:
        """Start, fail or measure the first queued job; false if there is nothing to do now."""
        await self.jobs.settle_awaited()
        record = self.jobs.first()
        if self.shutdown is not None or record is None:
            return False
        decision = self._decide(record)
        if decision.action is QueueAction.BEGIN:
            await self._begin(record, decision)
        elif decision.action is QueueAction.REFUSE:
            await self._refuse(record, decision.reason)
        elif decision.action is QueueAction.MEASURE and self._measuring is None:
            name = f"asyncpipe footprint of {record.id}"
            self._measuring = asyncio.create_task(self._measure_memory(record), name=name)
        return decision.action in (QueueAction.BEGIN, QueueAction.REFUSE)

    def _decide(self, first: JobRecord) -> QueueDecision:
        limits = self.settings.memory_limit
        peaks = self._peaks.get(first.id, None if _is_limited(first, limits) else {})
        running = [run.peaks for run in self.jobs.running.values()]
        return decide(Candidate(first.id, peaks), running, self.settings.max_running, limits)

    async def _begin(self, record: JobRecord, decision: QueueDecision) -> None:
        async with self.jobs.turn(record.id):
            current = self.jobs.queued.get(record.id)
            if current is None or self.shutdown is not None:
                return
            try:
                job, make_workload = self._built(current)
            except AsyncpipeError as error:
                await self.jobs.become(current, JobState.FAILED, f"cannot be built: {error}")
                return
            reason = decision.reason
            if current.snapshot is not None or current.from_step is not None:
                try:
                    lost, older = await in_thread(lambda: self._make_ready(current))
                except OSError as error:
                    await self.jobs.become(current, JobState.FAILED, f"its folder cannot be used: {error.strerror}")
                    return
                if lost is not None:
                    await self.jobs.become(current, JobState.QUARANTINED, lost)
                    return
                reason += older
            running = await self.jobs.become(current, JobState.RUNNING, reason)
            collector = self.metrics.collector_of(running)
            peaks = self._peaks.get(record.id, {})
            run = JobRun(running, job, collector, self.jobs.store, peaks, lambda: self.metrics.retried("step"))
            self.jobs.running[record.id] = run
            task = asyncio.create_task(self._live(run, make_workload), name=f"asyncpipe run of {record.id}")
            self._runs.add(task)
            task.add_done_callback(self._runs.discard)

    def _built(self, record: JobRecord) -> tuple[Job, Callable[[], Workload]]:
        job = job_of(record.spec, record, self.settings)
        return job, self._entries.make(record.spec.entry, record.spec.table("parameters"))

    def _make_ready(self, record: JobRecord) -> tuple[str | None, str]:
        """Why the job cannot go on, and what it has lost that it can do without. Blocks."""
        folder = self.logs.folder / record.id
        if record.from_step is not None:
            set_aside_after(folder, record.from_step)
        if (lost := what_is_lost(folder, record)) is not None:
            return lost, ""
        older = what_is_older(folder, record)
        return None, older and f"; {older}"

    async def _refuse(self, record: JobRecord, cause: str) -> None:
        async with self.jobs.turn(record.id):
            if (current := self.jobs.queued.get(record.id)) is not None:
                await self.jobs.become(current, JobState.FAILED, cause)

    # Measuring memory

    async def _measure_memory(self, record: JobRecord) -> None:
        """Find the job's peak memory, or let the job fail."""
        try:
            job, make_workload = self._built(record)
            peaks = await self._measured(job, make_workload, record.id)
            if record.id in self.jobs.queued:
                self._peaks[record.id] = peaks
        except _Obsolete:
            pass
        except Exception as error:  # noqa: BLE001 - logged, and the cause of the transition
            failures = self._failures.get(record.id, 0) + 1
            if record.id in self.jobs.queued:
                self._failures[record.id] = failures
            cause = f"its memory could not be measured: {error}"
            _logger.warning("job %s: %s", record.id, cause)
            if is_permanent(error) or failures > _retries(record):
                with suppress(StoreError):  # The job stays queued and is measured again.
                    await self._refuse(record, cause)
            else:
                await self._back_off(failures)
        finally:
            self._measuring = None
            self.jobs.changed.set()

    async def _measured(self, job: Job, make_workload: Callable[[], Workload], record: str) -> Mapping[str, int]:
        if self._processes is None or self._measure is not None:
            async with DedicatedThread("asyncpipe-footprint") as thread:
                return await thread.run(lambda: self._footprint(job, make_workload, record))
        measuring = asyncio.create_task(self._processes.measure(record, job, make_workload))
        over = [asyncio.create_task(each) for each in (self.jobs.until_not_queued(record), self._ending.wait())]
        try:
            await asyncio.wait([measuring, *over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_measured = measuring.done()
            for each in (measuring, *over):
                each.cancel()
            await asyncio.wait([measuring, *over])
        if not is_measured:
            raise _Obsolete
        return measuring.result()

    def _is_wanted(self, queued: str) -> bool:
        return self.shutdown is None and queued in self.jobs.queued

    def _footprint(self, job: Job, make_workload: Callable[[], Workload], record: str) -> Mapping[str, int]:
        """The job's peak memory. Blocks, in a thread."""

        def check_wanted(_: str = "") -> None:
            if not self._is_wanted(record):
                raise _Obsolete

        workload = RunRandom(shared=True).build(job.training.seed, make_workload)
        check_wanted()
        return (self._measure or footprint)(job, workload, progress=check_wanted)

    # Running jobs

    def _process_trainer(self, *arguments: Any, **options: Any) -> ProcessTrainer:
        assert self._processes is not None
        return ProcessTrainer(self._processes, self._count_hung, *arguments, **options)

    def _count_hung(self, hung: int) -> None:
        self._hung += hung

    async def _live(self, run: JobRun, make_workload: Callable[[], Workload]) -> None:
        """One run, from its start to the transition that ends it."""
        job = run.record.id

        try:
            async with self.logs.use(job, lambda: self.jobs.store.history(job)) as log:
                await self._end(run, await self._run(run, make_workload, log))
        except StoreError as error:  # The log could not be opened: the run has not started.
            await self._end(run, RunOutcome(RunEnding.FAILED, str(error)))
        except Exception:
            _logger.exception("the end of a run of job %s could not be recorded; this is a bug in asyncpipe", job)
        finally:
            self.metrics.ended(job)
            if self.jobs.running.get(job) is run:  # The store does not know it; the next start recovers the job.
                del self.jobs.running[job]
            self.jobs.changed.set()

    async def _run(self, run: JobRun, make_workload: Callable[[], Workload], log: JobLog) -> RunOutcome:
        if self.shutdown is not None:
            run.stop()
        try:
            return await run.run(self._make_trainer, make_workload, log, pool=self.pool, leave=self.hosts)
        except Exception as error:
            _logger.exception("the run of job %s failed in asyncpipe's own code; this is a bug", run.record.id)
            return RunOutcome(RunEnding.FAILED_PERMANENTLY, f"{type(error).__name__}: {error}")

    async def _end(self, run: JobRun, outcome: RunOutcome) -> None:
        """Record the job's next state in the store, trying until it succeeds or the grace period is over."""
        job = run.record.id
        failed = outcome.ending is RunEnding.FAILED
        crashed = outcome.ending is RunEnding.CRASHED
        failures = (0 if run.has_snapshot else self._failures.get(job, 0)) + failed
        if failed and failures <= _retries(run.record):
            await self._back_off(failures)
        while True:
            try:
                async with self.jobs.turn(job):
                    asked, why = run.record.asked, run.record.asked_cause or "requested"
                    tries = Tries(
                        failures,
                        _retries(run.record),
                        (0 if run.has_snapshot else run.record.crashes) + crashed,
                        self.settings.max_attempts,
                    )
                    to, cause = next_state(outcome, asked, why, tries, self.shutdown)
                    after = await self.jobs.become(run.record, to, cause, crashed=crashed)
                break
            except StoreError as error:
                _logger.error("a run of job %s has ended, and the store cannot record it: %s", job, error)
                if self._giving_up.is_set() or await _set_within(self._giving_up, self._retry_seconds):
                    return
        if after.state not in FINAL_STATES:
            self._failures[job] = failures
        if (failed or crashed) and after.state is JobState.QUEUED:
            self.metrics.retried("snapshot")

    async def _back_off(self, failures: int) -> None:
        """Wait before the next try, twice as long after each failure; not after the first."""
        if failures > 1:
            await _set_within(self._ending, min(2.0 ** (failures - 2), self._retry_seconds))

    def _forget(self, job: str) -> None:
        self._failures.pop(job, None)
        self._peaks.pop(job, None)

    def _workers_in_use(self) -> Mapping[str, Sequence[str]]:
        return {job: run.workers for job, run in self.jobs.running.items()}

    def _log_failed(self, job: str, text: str) -> None:
        _logger.error("job %s: %s", job, text)
        self.metrics.log_failed()


class _Obsolete(Exception):
    """Ends a measurement whose job is no longer queued."""


def _is_limited(record: JobRecord, limits: Mapping[str, int]) -> bool:
    """Whether the job names a device that has a limit."""
    devices = record.spec.table("pipeline").get("devices")
    return isinstance(devices, list) and any(device in limits for device in devices)


def _retries(record: JobRecord) -> int:
    """How many failures in a row, without a new snapshot, the job may have."""
    retries = record.spec.table("faults").get("snapshot_retries")
    return retries if isinstance(retries, int) else 0


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` was set within ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
