"""The manager of a service's jobs: lets them begin, watches them end, and leaves nothing behind when the service ends.

::

    JobTable.changed ─▶ queue.decide ─▶ queued → running ─▶ JobRun ─▶ RunOutcome ─▶ next_state ─▶ the transition
                          ▲     │                                                                    │
                          │     └─▶ to be measured first ─▶ footprint, in a thread                   │
                          └──────────────────────────────────────────────────────────────────────────┘

All jobs train on one ``DevicePool``, on the loop that the manager was opened on. A transition that the store does not
take (its disk is full) is tried again until it does or the service ends; in the store the job then still runs, and the
next start lets it go on from its last snapshot, as after a kill.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress

from asyncpipe.errors import AsyncpipeError
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.runtime.watchdog import Watchdog
from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobState, PriorityClass, Transition
from asyncpipe.service.jobs.admission import Admission, Candidate, Decision, decide, place_of
from asyncpipe.service.jobs.job_log import JobLog, JobLogs
from asyncpipe.service.jobs.job_run import JobRun, MakeTrainer, RunEnding, RunOutcome, is_permanent, next_state
from asyncpipe.service.jobs.job_table import JobTable
from asyncpipe.service.jobs.memory_footprint import footprint
from asyncpipe.service.jobs.service_metrics import ServiceMetrics
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import JobStore, StoreError
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import job_of
from asyncpipe.train.blocking_calls import DedicatedThread
from asyncpipe.train.job_file import Job
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Workload

__all__ = ["Manager"]

_logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""After which a store that failed is asked again; and the longest rest of a job that failed again and again."""

Measure = Callable[..., Mapping[str, int]]


class Manager:
    """Runs the jobs of ``store``, as an async context manager whose end drains it. Of the loop that opens it."""

    def __init__(
        self,
        settings: ServiceSettings,
        entries: Entries,
        store: JobStore,
        *,
        metrics: ServiceMetrics | None = None,
        make_trainer: MakeTrainer = TrainingRun,
        measure: Measure = footprint,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """``store`` is open, and is closed by its owner. ``make_trainer`` and ``measure`` are for tests."""
        self.settings = settings
        self.metrics = metrics or ServiceMetrics()
        self.logs = JobLogs(settings.folder / "jobs", self._log_failed)
        self.jobs = JobTable(store, self.logs, self.metrics, self._forget)
        self.pool = DevicePool()
        self.watchdog = Watchdog(self.pool.driver, factor=settings.watchdog_factor, floor=settings.watchdog_floor)
        self._entries = entries
        self._store = store
        self._make_trainer = make_trainer
        self._measure = measure
        self._retry_seconds = retry_seconds
        self._stack = AsyncExitStack()
        self._runs: set[asyncio.Task[None]] = set()
        self._peaks: dict[str, Mapping[str, int]] = {}
        """Of jobs that were measured and are not at their end."""
        self._failures: dict[str, int] = {}
        """How often a job failed since its last snapshot."""
        self._reasons: dict[str, str] = {}
        """Why jobs wait, as it was ``_told`` last."""
        self._told: tuple[int, int] | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._scheduler: asyncio.Task[None] | None = None
        self._drained: asyncio.Task[None] | None = None
        self._shutdown: str | None = None
        """Why no job begins any more."""
        self._ending = asyncio.Event()
        """Set when no job begins any more."""
        self._giving_up = asyncio.Event()
        """Set when the grace period is over."""

    # Life

    async def __aenter__(self) -> Manager:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.pool)
            await stack.enter_async_context(self.watchdog)
            for record in await self.jobs.load():
                _logger.info("job %s (%s) was running when the last process ended", record.id, record.spec.name)
            self._scheduler = asyncio.create_task(self._schedule(), name="asyncpipe job scheduler")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.drain("the service was closed")
        finally:
            self.logs.close()
            await self._stack.aclose()

    async def drain(self, cause: str) -> None:
        """Let no job begin, and every running one end after its step with a snapshot; those are queued then.

        What has not ended after ``settings.grace_seconds`` is cancelled. May be called again, and waits the same.
        """
        self.take_no_more(cause)
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain(), name="asyncpipe drain")
        await asyncio.shield(self._drained)

    async def _drain(self) -> None:
        assert self._scheduler is not None
        self._ending.set()
        self.jobs.changed.set()
        loop = asyncio.get_running_loop()
        over = loop.call_later(self.settings.grace_seconds, self._give_up)
        try:
            with suppress(Exception):  # It was logged when it broke.
                await self._scheduler
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
            _logger.warning("job %s did not end in time and is cancelled", run.record.id)
            run.cancel()

    # From any thread

    def take_no_more(self, cause: str) -> None:
        """Let no more jobs in, and none begin. The first ``cause`` is kept."""
        self._shutdown = self._shutdown or cause

    @property
    def shutdown(self) -> str | None:
        """Why no job begins any more; ``None`` while jobs do."""
        return self._shutdown

    def broken(self) -> str | None:
        """What only a restart helps against, if something like that happened."""
        if self._scheduler is not None and self._scheduler.done() and self._shutdown is None:
            return "the scheduler of jobs broke"
        if self.pool.is_broken:
            return "the scheduler of tasks broke"
        return None if self._store.is_alive else "the job store's thread ended"

    @property
    def hung_tasks(self) -> int:
        """How many tasks the watchdog has given up."""
        return self.watchdog.hung

    def waits_for(self, job: str) -> str | None:
        """Why a queued job does not begin yet; ``None`` for any other one. On the loop."""
        if self._shutdown is not None and job in self.jobs.queued:
            return self._shutdown
        if job not in self.jobs.queued:
            return None
        now = self.jobs.version, len(self._peaks)
        if now != self._told:  # A list of jobs asks for each of them.
            self._told = now
            self._reasons = {each.job: each.reason for each in self._decide(self.jobs.queued.values())}
        return self._reasons.get(job)

    # Who begins

    async def _schedule(self) -> None:
        try:
            while self._shutdown is None:
                self.jobs.changed.clear()
                try:
                    while await self._act():
                        pass
                except StoreError as error:
                    _logger.error("no job can begin, which is tried again soon: %s", error)
                    await _set_within(self.jobs.changed, self._retry_seconds)
                else:
                    await self.jobs.changed.wait()
        except Exception:
            _logger.exception("the scheduler of jobs broke; no job begins any more")
            raise

    async def _act(self) -> bool:
        """Do the first thing that there is to do; false if there is none."""
        if self._shutdown is not None:
            return False
        if len(self.jobs.running) >= self.settings.max_running or not self.jobs.queued:
            return False
        # Nobody overtakes, so the others need not be looked at: there may be a thousand of them.
        record = min(self.jobs.queued.values(), key=lambda each: place_of(_candidate(each, {})))
        (decision,) = self._decide([record])
        if decision.admission is Admission.BEGIN:
            await self._begin(record, decision)
        elif decision.admission is Admission.REFUSE:
            await self._refuse(record, decision.reason)
        elif decision.admission is Admission.MEASURE and self._measuring is None:
            task = asyncio.create_task(self._measured(record), name=f"asyncpipe footprint of {record.id}")
            self._measuring = task
        return decision.admission in (Admission.BEGIN, Admission.REFUSE)

    def _decide(self, queued: Iterable[JobRecord]) -> list[Decision]:
        limits = self.settings.memory_limit
        candidates = [
            _candidate(record, self._peaks.get(record.id, None if _is_limited(record, limits) else {}))
            for record in queued
        ]
        running = [run.peaks for run in self.jobs.running.values()]
        return decide(candidates, running, self.settings.max_running, limits)

    async def _begin(self, record: JobRecord, decision: Decision) -> None:
        async with self.jobs.turn(record.id):
            current = self.jobs.queued.get(record.id)
            if current is None or self._shutdown is not None:
                return
            try:
                job, make_workload = self._built(current)
            except AsyncpipeError as error:
                await self.jobs.become(current, JobState.FAILED, f"cannot be built: {error}")
                return
            running = await self.jobs.become(current, JobState.RUNNING, decision.reason)
            collector = self.metrics.collector_of(running)
            peaks = self._peaks.get(record.id, {})
            run = JobRun(running, job, collector, self._store, peaks, lambda: self.metrics.retried("step"))
            self.jobs.running[record.id] = run
            task = asyncio.create_task(self._live(run, make_workload), name=f"asyncpipe run of {record.id}")
            self._runs.add(task)
            task.add_done_callback(self._runs.discard)

    def _built(self, record: JobRecord) -> tuple[Job, Callable[[], Workload]]:
        parameters = record.spec.document.get("parameters") or {}
        assert isinstance(parameters, dict)
        return job_of(record.spec, record, self.settings), self._entries.make(record.spec.entry, parameters)

    async def _refuse(self, record: JobRecord, cause: str) -> None:
        async with self.jobs.turn(record.id):
            if (current := self.jobs.queued.get(record.id)) is not None:
                await self.jobs.become(current, JobState.FAILED, cause)

    # How much it needs

    async def _measured(self, record: JobRecord) -> None:
        """Find the job's peaks, or fail it."""
        try:
            job, make_workload = self._built(record)
            async with DedicatedThread("asyncpipe-footprint") as thread:
                peaks = await thread.run(lambda: self._footprint(job, make_workload, record.id))
            if record.id in self.jobs.queued:
                self._peaks[record.id] = peaks
        except _Obsolete:
            pass
        except Exception as error:  # noqa: BLE001 - told
            failures = self._failures.get(record.id, 0) + 1
            if record.id in self.jobs.queued:
                self._failures[record.id] = failures
            words = f"its memory could not be measured: {error}"
            _logger.warning("job %s: %s", record.id, words)
            if is_permanent(error) or failures > _retries(record):
                with suppress(StoreError):  # It is measured again, then.
                    await self._refuse(record, words)
            else:
                await self._rest(failures)
        finally:
            self._measuring = None
            self.jobs.changed.set()

    def _footprint(self, job: Job, make_workload: Callable[[], Workload], record: str) -> Mapping[str, int]:
        # In a thread.
        def heed(_: str = "") -> None:
            if self._shutdown is not None or record not in self.jobs.queued:
                raise _Obsolete

        workload = RunRandom(shared=True).build(job.training.seed, make_workload)
        heed()
        return self._measure(job, workload, progress=heed)

    # Running

    async def _live(self, run: JobRun, make_workload: Callable[[], Workload]) -> None:
        """One run from its begin to the transition that ends it."""
        job = run.record.id

        async def history() -> Sequence[Transition]:
            return await self._store.history(job)

        try:
            async with self.logs.use(job, history) as log:
                await self._end(run, await self._run(run, make_workload, log))
        except StoreError as error:  # Of the history: it has not begun.
            await self._end(run, RunOutcome(RunEnding.FAILED, str(error)))
        except Exception:
            _logger.exception("job %s cannot be told what became of it, which is a mistake in asyncpipe", job)
        finally:
            self.metrics.ended(job)
            if self.jobs.running.get(job) is run:  # The store was not told of its end; the next start will do that.
                del self.jobs.running[job]
            self.jobs.changed.set()

    async def _run(self, run: JobRun, make_workload: Callable[[], Workload], log: JobLog) -> RunOutcome:
        if self._shutdown is not None:
            run.stop()
        try:
            return await run.run(self._make_trainer, make_workload, log, pool=self.pool)
        except Exception as error:
            _logger.exception("the run of job %s broke, which is a mistake in asyncpipe", run.record.id)
            return RunOutcome(RunEnding.HOPELESS, f"{type(error).__name__}: {error}")

    async def _end(self, run: JobRun, outcome: RunOutcome) -> None:
        """Write what the job becomes, as often as it takes."""
        job = run.record.id
        failed = outcome.ending is RunEnding.FAILED
        failures = (0 if run.has_snapshot else self._failures.get(job, 0)) + failed
        if failed and failures <= _retries(run.record):
            await self._rest(failures)
        while True:
            try:
                async with self.jobs.turn(job):
                    asked, why = run.record.asked, run.record.asked_cause or "asked for"
                    to, cause = next_state(outcome, asked, why, failures, _retries(run.record), self._shutdown)
                    after = await self.jobs.become(run.record, to, cause)
                break
            except StoreError as error:
                _logger.error("job %s has ended, and its store cannot be told: %s", job, error)
                if self._giving_up.is_set() or await _set_within(self._giving_up, self._retry_seconds):
                    return
        if after.state not in FINAL_STATES:
            self._failures[job] = failures
        if failed and after.state is JobState.QUEUED:
            self.metrics.retried("snapshot")

    async def _rest(self, failures: int) -> None:
        """Wait longer and longer before something is tried again that failed more than once."""
        if failures > 1:
            await _set_within(self._ending, min(2.0 ** (failures - 2), self._retry_seconds))

    def _forget(self, job: str) -> None:
        self._failures.pop(job, None)
        self._peaks.pop(job, None)

    def _log_failed(self, job: str, text: str) -> None:
        _logger.error("job %s: %s", job, text)
        self.metrics.log_failed()


class _Obsolete(Exception):
    """Ends a measurement that nobody waits for any more."""


def _candidate(record: JobRecord, peaks: Mapping[str, int] | None) -> Candidate:
    is_background = record.priority_class is PriorityClass.BACKGROUND
    return Candidate(record.id, record.submitted, background=is_background, peaks=peaks)


def _is_limited(record: JobRecord, limits: Mapping[str, int]) -> bool:
    """Whether the job names a device that has a limit."""
    pipeline = record.spec.document.get("pipeline")
    devices = pipeline.get("devices") if isinstance(pipeline, dict) else None
    return isinstance(devices, list) and any(device in limits for device in devices)


def _retries(record: JobRecord) -> int:
    """How many failures without a new snapshot between them are forgiven."""
    faults = record.spec.document.get("faults")
    retries = faults.get("snapshot_retries") if isinstance(faults, dict) else None
    return retries if isinstance(retries, int) else 0


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` was set within so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
