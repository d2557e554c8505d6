"""The training service as a component of an application: it trains jobs that may take weeks.

::

    async with TrainingService(settings) as service:        # opens the store and resumes the jobs that were running
        job, _ = await service.submit({...})
        async for event in service.follow(job.id): ...
                                                            # drains: every job ends its step and takes a snapshot

    the host's loop ── submit, pause … ──▶ TrainingService ──hop──▶ the service's loop: Manager, DevicePool
                    ── status ───────────▶ (plain values)               ▲ a timer there shows that the loop runs

The service's loop runs in a thread of its own, so a blocking handler of the host does not stop training. Methods may be
called from any other loop. A caller that is cancelled does not learn the result
of a request that changes a job; the request is carried out nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncpipe.observe.live import LiveView
from asyncpipe.service.job_reading import JobReading
from asyncpipe.service.job_states import JobRecord, PriorityClass
from asyncpipe.service.jobs.hosts import WorkerStatus
from asyncpipe.service.jobs.job_folder import FilesOfJob
from asyncpipe.service.jobs.lost_state import check_before_opening, check_state
from asyncpipe.service.jobs.manager import Manager
from asyncpipe.service.jobs.service_metrics import ServiceMetrics
from asyncpipe.service.keeping.retention import Retainer
from asyncpipe.service.known_tokens import KnownTokens
from asyncpipe.service.service_loop import ServiceDrainingError, ServiceLoop
from asyncpipe.service.settings.service_settings import ServiceSettings, SettingsError
from asyncpipe.service.store.database import STORE
from asyncpipe.service.store.job_records import JobEvent, LossRow
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import (
    Submission,
    SubmissionError,
    changed_document,
    check_amendment,
    check_submission,
)
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["JobEvent", "LossRow", "ServiceDrainingError", "ServiceStatus", "TrainingService"]

SILENCE_SECONDS = 10.0
"""A service's loop without a heartbeat for this long counts as stuck."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The state of a service."""

    ready: bool
    """Whether it takes new jobs."""
    live: bool
    """False only if a restart of the process would help."""
    reason: str
    """Why ``ready`` and ``live`` are what they are."""
    running: int
    queued: int


class TrainingService(JobReading):
    """Trains submitted jobs; an async context manager that opens once and drains at its end.

    Methods that change a job return when the change is on disk. They raise ``UnknownJobError``, ``JobStateError`` if
    the job's state does not allow the change, and ``StoreError`` if the store cannot record it; nothing was changed
    then.
    """

    def __init__(self, settings: ServiceSettings, *, entries: Entries | None = None, **options: Any) -> None:
        """``entries`` replaces those of ``settings``. ``options`` are passed to ``Manager``, for tests."""
        self.settings = settings
        self._entries = entries
        self._options = options
        self.collector = ServiceMetrics()
        """The metrics of the service and its jobs, for a Prometheus registry of the caller."""
        self.collector.is_ready = lambda: self.status().ready
        self.tokens = KnownTokens(settings.folder, settings.token)
        """Who may use the service over HTTP."""
        self.reloading: list[Callable[[], Callable[[], object]]] = []
        """What ``reload`` calls as well: each reads something, or raises, and returns what makes use of it."""
        self._manager: Manager | None = None
        self.loop = ServiceLoop()
        """Where everything happens."""
        self._stack = AsyncExitStack()
        self._not_open: str = "is not open; use 'async with'"
        """Why the service cannot be used; empty while it is open."""
        self._lost = ""
        """What the store has lost, in a sentence."""

    @property
    def manager(self) -> Manager:
        """The manager of the jobs, while the service is open; it belongs to the service's loop."""
        if self._manager is None or self._not_open:
            raise ServiceDrainingError(f"the service {self._not_open or 'opens'}")
        return self._manager

    @property
    def entries(self) -> Entries:
        """The entries that jobs may name, once the service is open."""
        if self._entries is None:
            raise ServiceDrainingError(f"the service {self._not_open}")
        return self._entries

    def wait_for(self, what: str) -> None:
        """Say that it opens when ``what`` is over."""
        self._not_open = f"waits for {what}"

    # Opening and closing

    async def __aenter__(self) -> TrainingService:
        if self.loop.is_open:
            raise ServiceDrainingError("a service opens once; make a new one")
        self.loop.open()
        try:
            await self.loop.hop(self._open())
        except BaseException:
            await self.loop.close()
            raise
        self._not_open = ""
        return self

    async def __aexit__(self, *_: object) -> None:
        self._not_open = "is closing"
        try:
            await self.loop.hop(self._close())
        finally:
            self._not_open = "is closed"
            await self.loop.close()

    async def _open(self) -> None:
        settings = self.settings
        async with AsyncExitStack() as stack:
            await in_thread(settings.make_folder)
            if self._entries is None:
                self._entries = await in_thread(lambda: Entries.load(settings))
            jobs = settings.folder / "jobs"
            refuse = settings.lost_state == "refuse"
            path = settings.folder / STORE
            if refuse:
                await in_thread(lambda: check_before_opening(path, jobs))
            store = await stack.enter_async_context(JobStore(path))
            self._lost = await check_state(store, jobs, refuse=refuse)
            await in_thread(self.tokens.refresh)
            manager = Manager(settings, self._entries, store, metrics=self.collector, **self._options)
            self.collector.commits = lambda: store.commits
            self.collector.hung_tasks = lambda: manager.hung
            self.collector.heartbeats = manager.hosts.heartbeats
            self.collector.drained = manager.hosts.drained
            self._manager = await stack.enter_async_context(manager)
            await stack.enter_async_context(Retainer(settings, manager))
            self.loop.beat()
            self._stack = stack.pop_all()

    async def _close(self) -> None:
        try:
            await self._stack.aclose()
        finally:
            self.loop.beat_no_more()

    async def reload(self, settings: ServiceSettings) -> list[str]:
        """Use ``settings`` from now on, as far as a service can that runs; the keys that differ and need a restart.

        Jobs that run go on; modules that were imported before stay as they are. Raises ``SettingsError``, and nothing
        has changed then.
        """
        if settings.token is None and self.settings.token is not None:
            raise SettingsError("token: missing; a service that asks for a token asks for one until it ends")
        own = self.settings.model_copy(update={"entries": settings.entries})
        entries, uses = await in_thread(lambda: (Entries.load(own), [read() for read in self.reloading]))
        self.manager.entries = self._entries = entries
        self.tokens.use(settings.token)
        for use in uses:
            use()
        left = self.settings.take(settings)
        await self.loop.hop(self.manager.look_again())
        return left

    def take_no_more(self, cause: str) -> None:
        """Take no more jobs from now on, without waiting for anything. From any thread."""
        self.manager.take_no_more(cause)

    async def drain(self, cause: str) -> None:
        """Take no more jobs, and end every running one after its step with a snapshot; the next start resumes them.

        ``cause`` goes into their histories. Runs that have not ended after ``settings.grace_seconds`` are cancelled.
        """
        await self.loop.hop(self.manager.drain(cause))

    # Jobs

    async def submit(
        self,
        submission: Submission | Mapping[str, Any],
        idempotency_key: str | None = None,
        *,
        owner: str | None = None,
        teams: Collection[str] = (),
    ) -> tuple[JobRecord, bool]:
        """The job, and whether it is new: the same key and submission again return the job that they created before.

        The job belongs to the user ``owner``, who is in ``teams`` and has idempotency keys of his own; without one it
        belongs to nobody, and over HTTP to the operators. Raises ``SubmissionError`` that names every wrong key,
        ``IdempotencyConflictError``, ``QueueFullError``, ``QuotaError``, ``PastDeadlineError``,
        ``ServiceDrainingError``, and ``OptionError`` for an invalid idempotency key.
        """
        manager = self.manager
        if manager.shutdown is not None:
            raise ServiceDrainingError(f"the service takes no more jobs: {manager.shutdown}")
        document = check_submission(submission, self.settings, self.entries)
        await manager.quotas.measure(owner, teams)
        more = {"owner": owner, "teams": tuple(teams), "code": await self._code(document)}
        return await self.loop.do(manager.jobs.submit(document, idempotency_key, **more))

    async def _code(self, document: Mapping[str, Any]) -> str | None:
        """The content of the entry's code now. Raises ``SubmissionError`` if ``document`` names another."""
        code = await in_thread(partial(self.entries.code, document["entry"]))
        if not (code or "").startswith(document.get("code") or ""):
            raise SubmissionError([("code", f"the content of the entry is {(code or 'not known')[:12]} now")])
        return code

    async def pause(self, job: str, cause: str = "asked to pause") -> JobRecord:
        """The job, paused; or running and asked to pause after its step, with a snapshot."""
        return await self.loop.do(self.manager.jobs.pause(job, cause))

    async def resume(self, job: str, cause: str = "asked to go on") -> JobRecord:
        """The job, queued; or still running, if it had been asked to pause. Raises ``QueueFullError``."""
        return await self.loop.do(self.manager.jobs.resume(job, cause))

    async def cancel(self, job: str, cause: str = "asked to end") -> JobRecord:
        """The job, cancelled; or running and asked to end between two tasks, without a snapshot."""
        return await self.loop.do(self.manager.jobs.cancel(job, cause))

    async def retry(
        self,
        job: str,
        from_step: int | None = None,
        changes: Mapping[str, Any] | None = None,
        cause: str = "asked to be tried again",
    ) -> JobRecord:
        """The job, which failed, was cancelled or quarantined, queued again.

        It goes on from its newest snapshot, or that of ``from_step``; 0 begins anew. ``changes`` are other values by
        dotted keys, as ``{"training.learning_rate": 1e-4}``. Raises ``JobStateError``, ``SubmissionError`` for wrong
        changes, ``OptionError`` where there is no such snapshot, ``QueueFullError``.
        """
        manager, document = self.manager, None
        if changes:
            fixed = ("entry", "name")  # A snapshot knows whose it is.
            document = changed_document(await self.get(job), changes, self.settings, self.entries, fixed=fixed)
        record = await self.get(job)
        if changed := await in_thread(partial(self.entries.changed, record.entry, record.code)):
            cause = f"{cause}; {changed}"
        return await self.loop.do(manager.ended.retry(job, cause, from_step, document))

    async def fork(
        self,
        job: str,
        from_step: int | None = None,
        changes: Mapping[str, Any] | None = None,
        *,
        owner: str | None = None,
        teams: Collection[str] = (),
    ) -> JobRecord:
        """A new job that goes on from a copy of a snapshot of ``job``, as ``retry`` would, with ``changes``.

        It belongs to ``owner``, as of ``submit``. ``job`` may be in any state and stays as it is. Raises as ``retry``,
        ``QuotaError``, and ``JobFolderError`` if there is no room.
        """
        manager = self.manager
        record = await self.get(job)
        document = changed_document(record, changes or {}, self.settings, self.entries, fixed=("entry",))
        await manager.quotas.measure(owner, teams)
        more = {"owner": owner, "teams": tuple(teams), "code": await self._code(document)}
        changed = await in_thread(partial(self.entries.changed, record.entry, record.code, "that"))
        more["because"] = f"; {changed}" if changed else ""
        return await self.loop.do(manager.ended.fork(job, document | {"deadline": None}, from_step, **more))

    async def delete(self, job: str, *, dry_run: bool = False) -> tuple[JobRecord, FilesOfJob]:
        """Delete a job that has ended, with all that it has on disk; what it was, and what it had.

        With ``dry_run`` nothing is deleted. Raises ``JobStateError`` for a job that has not ended, and
        ``JobFolderError`` if its folder cannot be removed.
        """
        ended = self.manager.ended
        if dry_run:
            return await self.get(job), await self.loop.hop(ended.files(job))
        return await self.loop.do(ended.delete(job))

    async def amend(
        self,
        job: str,
        *,
        priority_class: PriorityClass | None = None,
        weight: float | None = None,
        priority: int | None = None,
        tags: Collection[str] | None = None,
    ) -> JobRecord:
        """The job with another priority class, weight, priority or other tags; what is ``None`` stays.

        A running job has its new share of the devices from its next step on, or, where its stages are in worker
        processes or it has a process of its own, from its next run on. Raises ``SubmissionError`` for wrong values.
        """
        tags = None if tags is None else list(tags)
        changes = check_amendment(priority_class=priority_class, weight=weight, priority=priority, tags=tags)
        return await self.loop.do(self.manager.jobs.amend(job, **changes))

    async def change_schedule(self, job: str, schedule: str) -> JobRecord:
        """The job, which follows ``schedule`` from its next step on, also after a restart.

        Raises ``SubmissionError`` for a schedule that is not registered or does not fit the job, ``ScheduleError`` if
        the running pipeline cannot follow it; nothing was changed then.
        """
        return await self.loop.do(self.manager.jobs.change_schedule(job, schedule))

    # Workers

    async def workers(self) -> Sequence[WorkerStatus]:
        """The workers of the service's devices, those that are not up as well; none if the devices are threads."""
        return await self.loop.hop(self.manager.hosts.workers())

    async def drain_host(self, host: str) -> Sequence[WorkerStatus]:
        """Have jobs leave ``host`` after their steps, until ``undrain_host``; its workers.

        They go on elsewhere from a snapshot of that step, or wait if nothing is left. Raises ``UnknownHostError``.
        """
        return await self.loop.do(self.manager.hosts.drain(host))

    async def undrain_host(self, host: str) -> Sequence[WorkerStatus]:
        """Have jobs use ``host`` again, those that left it as well; its workers. Raises ``UnknownHostError``."""
        return await self.loop.do(self.manager.hosts.undrain(host))

    def view(self, job: str) -> LiveView | None:
        """The state of a running job's live page; ``None`` for any other job. From any thread."""
        run = None if self._manager is None else self._manager.jobs.running.get(job)
        return None if run is None else run.view

    def status(self) -> ServiceStatus:
        """The state of the service. From any thread; never blocks."""
        manager = self._manager
        if manager is None or self._not_open:
            return ServiceStatus(False, True, f"the service {self._not_open or 'opens'}", 0, 0)
        running, queued = len(manager.jobs.running), len(manager.jobs.queue)
        silence = self.loop.silence()
        failure = manager.broken()
        if failure is None and silence > SILENCE_SECONDS:
            failure = f"the service's loop has not answered for {silence:.0f} s"
        if failure is not None:
            return ServiceStatus(False, False, failure, running, queued)
        if manager.shutdown is not None:
            return ServiceStatus(False, True, f"takes no more jobs: {manager.shutdown}", running, queued)
        if (trouble := manager.jobs.store.trouble) is not None:
            return ServiceStatus(False, True, f"takes no jobs: its store {trouble.what}", running, queued)
        return ServiceStatus(True, True, "; ".join(filter(None, ["takes jobs", self._lost])), running, queued)
