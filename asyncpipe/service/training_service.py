"""The service as a component: jobs that train for weeks, inside whatever application embeds it.

::

    async with TrainingService(settings) as service:        # opens the store, goes on with what was running
        job, _ = await service.submit({...})
        async for event in service.follow(job.id): ...
                                                            # drains: every job ends its step and takes a snapshot

    the host's loop ── submit, pause … ──▶ TrainingService ──hop──▶ the service's loop: Manager, DevicePool
                    ── status ───────────▶ (plain values)               ▲ beats, so that status knows that it answers

The service's loop is in a thread of its own unless ``settings.loop`` says otherwise, so a handler of the host that
blocks does not stop training. Every method may be called from any loop; whoever is cancelled in one does not learn what
became of it, and it is done all the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from prometheus_client.registry import Collector

from asyncpipe.errors import AsyncpipeError
from asyncpipe.observe.live import LiveView
from asyncpipe.runtime.portal import Portal, PortalCall
from asyncpipe.runtime.waiting import wait_uncancelled
from asyncpipe.service.job_states import JobRecord, JobState, Transition
from asyncpipe.service.jobs.job_control import JobControl
from asyncpipe.service.jobs.job_log import JobEvent, JobLog, LossRow, read_losses
from asyncpipe.service.jobs.manager import Manager
from asyncpipe.service.jobs.service_metrics import ServiceMetrics
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import Submission, check_submission
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["JobEvent", "LossRow", "ServiceDrainingError", "ServiceStatus", "TrainingService"]

_T = TypeVar("_T")

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""A service's loop that has not beaten for so long is taken for stuck."""
_CLOSED = "is closed"

MOST_LOSSES = 10_000
"""Rows of a loss curve in one answer."""


class ServiceDrainingError(AsyncpipeError, RuntimeError):
    """The service is not open, or shuts down and takes no more jobs; the message says which."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """How a service stands."""

    ready: bool
    """Whether it takes new jobs."""
    live: bool
    """False only where a restart would help."""
    reason: str
    """In words, what ``ready`` and ``live`` say."""
    running: int
    queued: int


class TrainingService:
    """Trains the jobs that it is given; ``async with`` opens it once, and its end drains it.

    Methods that change a job return when that is on disk, and raise ``UnknownJobError``, ``JobStateError`` for what a
    job cannot do in its state, and ``StoreError`` where the store cannot keep it: nothing was changed then.
    """

    def __init__(self, settings: ServiceSettings, *, entries: Entries | None = None, **options: Any) -> None:
        """``entries`` are those of ``settings`` by default. ``options`` are ``Manager``'s, for tests."""
        self.settings = settings
        self._entries = entries
        self._options = options
        self._metrics = ServiceMetrics()
        self._metrics.is_ready = lambda: self.status().ready
        self._manager: Manager | None = None
        self._control: JobControl | None = None
        self._portal: Portal | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stack = AsyncExitStack()
        self._asked: set[asyncio.Task[Any]] = set()
        self._beat = 0.0
        self._beats: asyncio.TimerHandle | None = None
        self._state = "is not open; use 'async with'"
        self._calls: set[Future[Any]] = set()
        """What other loops have asked and wait for."""
        self._calling = Lock()

    @property
    def collector(self) -> Collector:
        """What Prometheus is told of the service and its jobs; for a registry of the caller's."""
        return self._metrics

    @property
    def entries(self) -> Entries:
        """The entries that jobs may name, once the service is open."""
        if self._entries is None:
            raise ServiceDrainingError(f"the service {self._state}")
        return self._entries

    # Life

    async def __aenter__(self) -> TrainingService:
        if self._loop is not None:
            raise ServiceDrainingError("a service opens once; make a new one")
        if self.settings.loop == "own":
            self._portal = Portal()
            self._loop = self._portal.loop
        else:
            self._loop = asyncio.get_running_loop()
        try:
            await self._hop(self._open())
        except BaseException:
            await self._close_portal()
            raise
        self._state = ""
        return self

    async def __aexit__(self, *_: object) -> None:
        self._state = "is closing"
        try:
            await self._hop(self._close())
        finally:
            with self._calling:
                self._state = _CLOSED
                calls = [asyncio.wrap_future(call) for call in self._calls]
            if calls:  # Of followers, which end by themselves now.
                await asyncio.wait(calls)
            await self._close_portal()

    async def _open(self) -> None:
        settings = self.settings
        async with AsyncExitStack() as stack:
            await in_thread(settings.make_folder)
            if self._entries is None:
                self._entries = await in_thread(lambda: Entries.load(settings))
            store = await stack.enter_async_context(JobStore(settings.folder / "jobs.sqlite3"))
            manager = Manager(settings, self._entries, store, metrics=self._metrics, **self._options)
            self._metrics.commits = lambda: store.commits
            self._metrics.hung_tasks = lambda: manager.watchdog.hung
            self._manager = await stack.enter_async_context(manager)
            self._control = JobControl(manager.jobs, settings.max_queued)
            self._heart()
            self._stack = stack.pop_all()

    async def _close(self) -> None:
        try:
            await self._stack.aclose()
            if self._asked:
                await asyncio.wait(self._asked)
        finally:
            if self._beats is not None:
                self._beats.cancel()

    async def _close_portal(self) -> None:
        if self._portal is not None:
            self._portal.close()
            await in_thread(self._portal.join)

    def take_no_more(self, cause: str) -> None:
        """Take no more jobs, from now on; ``drain`` does the rest. From any thread."""
        self._opened()[0].take_no_more(cause)

    async def drain(self, cause: str) -> None:
        """Take no more jobs, and let every one end after its step with a snapshot; they go on at the next start.

        ``cause`` is what their history says. Those that have not ended after ``settings.grace_seconds`` are cancelled.
        """
        await self._hop(self._opened()[0].drain(cause))

    # Jobs

    async def submit(
        self, submission: Submission | Mapping[str, Any], idempotency_key: str | None = None
    ) -> tuple[JobRecord, bool]:
        """The job, and whether it is new: the same key and submission again give the job that they made before.

        Raises ``SubmissionError`` that names every wrong key, ``IdempotencyConflictError``, ``QueueFullError``,
        ``ServiceDrainingError`` and ``OptionError`` for a key that is none.
        """
        manager, requests = self._opened()
        if manager.shutdown is not None:
            raise ServiceDrainingError(f"the service takes no more jobs: {manager.shutdown}")
        spec = check_submission(submission, self.settings, self.entries)
        return await self._do(requests.submit(spec, idempotency_key))

    async def pause(self, job: str, cause: str = "asked to pause") -> JobRecord:
        """The job, paused, or running and ``asked`` to pause: it ends after its step, with a snapshot."""
        return await self._do(self._opened()[1].pause(job, cause))

    async def resume(self, job: str, cause: str = "asked to go on") -> JobRecord:
        """The job, in the queue again; or running, where it had been asked to pause and has not yet.

        Raises ``QueueFullError``.
        """
        return await self._do(self._opened()[1].resume(job, cause))

    async def cancel(self, job: str, cause: str = "asked to end") -> JobRecord:
        """The job, cancelled, or running and ``asked`` to be: it ends between two tasks, without a snapshot."""
        return await self._do(self._opened()[1].cancel(job, cause))

    async def change_schedule(self, job: str, schedule: str) -> JobRecord:
        """The job, which follows ``schedule`` from its next step on, also after a restart.

        Raises ``SubmissionError`` for one that is not registered or does not fit the job, ``ScheduleError`` where the
        running pipeline cannot follow it; nothing was changed then.
        """
        return await self._do(self._opened()[1].change_schedule(job, schedule))

    # Looking

    async def get(self, job: str) -> JobRecord:
        """The job of this id. Raises ``UnknownJobError``."""
        return await self._opened()[0].jobs.store.get(job)

    async def list(
        self, states: Collection[JobState] | None = None, limit: int = 100, after: str | None = None
    ) -> tuple[JobRecord, ...]:
        """Jobs in the order of submission, as ``JobStore.list``."""
        return await self._opened()[0].jobs.store.list(states, limit, after)

    async def history(self, job: str) -> tuple[Transition, ...]:
        """Every transition of ``job``, its submission first. Raises ``UnknownJobError``."""
        return await self._opened()[0].jobs.store.history(job)

    async def waits_for(self, job: str) -> str | None:
        """Why a queued job has not begun, in words; ``None`` for any other one."""
        manager = self._opened()[0]

        async def ask() -> str | None:
            return manager.waits_for(job)

        return await self._hop(ask())

    async def follow(self, job: str, after: int = 0) -> AsyncIterator[JobEvent]:
        """What happened to ``job`` behind event ``after``, then what happens, its steps from now on.

        Ends when nothing more will come: the job is at its end, or the service. Whoever is slow misses steps, never a
        state. Raises ``UnknownJobError``.
        """
        manager, _ = self._opened()
        store = manager.jobs.store
        await store.get(job)
        use = manager.logs.use(job, lambda: store.history(job))
        log: JobLog = await self._hop(use.__aenter__())
        try:
            follower = log.follow(after)
            while events := await self._hop(follower.next()):
                for event in events:
                    yield event
        finally:
            with suppress(ServiceDrainingError):  # It was closed meanwhile.
                await self._hop(use.__aexit__(None, None, None))

    async def losses(self, job: str, after: int = 0, limit: int = 1000) -> Sequence[LossRow]:
        """At most ``limit`` steps of the job's curve, from the first one behind step ``after`` on.

        Each step is there once, with the numbers that a run that was never interrupted has. Raises ``UnknownJobError``.
        """
        manager = self._opened()[0]
        await manager.jobs.store.get(job)
        folder = manager.logs.folder / job
        return await in_thread(lambda: read_losses(folder, after, min(limit, MOST_LOSSES)))

    def view(self, job: str) -> LiveView | None:
        """What a live page shows of a job that runs; ``None`` for any other one. From any thread."""
        run = None if self._manager is None else self._manager.jobs.running.get(job)
        return None if run is None else run.view

    def status(self) -> ServiceStatus:
        """How the service stands. From any thread; blocks never."""
        manager = self._manager
        if manager is None or self._state:
            return ServiceStatus(False, True, f"the service {self._state or 'opens'}", 0, 0)
        running, queued = len(manager.jobs.running), len(manager.jobs.queued)
        silence = 0.0 if _is_running(self._loop) else time.monotonic() - self._beat
        trouble = manager.broken()
        if trouble is None and silence > SILENCE_SECONDS:
            trouble = f"the service's loop has not answered for {silence:.0f} s"
        if trouble is not None:
            return ServiceStatus(False, False, trouble, running, queued)
        if manager.shutdown is not None:
            return ServiceStatus(False, True, f"takes no more jobs: {manager.shutdown}", running, queued)
        return ServiceStatus(True, True, "takes jobs", running, queued)

    # The service's loop

    def _opened(self) -> tuple[Manager, JobControl]:
        if self._manager is None or self._control is None or self._state:
            raise ServiceDrainingError(f"the service {self._state or 'opens'}")
        return self._manager, self._control

    async def _do(self, request: Coroutine[Any, Any, _T]) -> _T:
        """What ``request`` returns; it is done to its end, whoever is cancelled meanwhile."""
        if asyncio.get_running_loop() is self._loop:
            task = asyncio.create_task(request)
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
            return await asyncio.shield(task)
        return await asyncio.shield(asyncio.wrap_future(self._call(request).future))

    async def _hop(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Await ``coroutine`` on the service's loop; a cancellation goes through to it."""
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        call = self._call(coroutine)
        future = asyncio.wrap_future(call.future)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            call.cancel()
            await wait_uncancelled(future)
            future.cancelled() or future.exception()  # Retrieved: the cancellation is what the caller learns.
            raise
        finally:
            # An exception holds the frames it passed; one that held it in turn would wait for the cycle collector.
            del call, future

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> PortalCall[_T]:
        """Have ``coroutine`` begin on the service's loop, from another one."""
        assert self._loop is not None
        with self._calling:
            if self._state == _CLOSED:
                coroutine.close()
                raise ServiceDrainingError(f"the service {_CLOSED}")
            call = PortalCall(self._loop, coroutine)
            self._calls.add(call.future)
            call.future.add_done_callback(self._calls.discard)
            call.start()
        return call

    def _heart(self) -> None:
        self._beat = time.monotonic()
        self._beats = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._heart)


def _is_running(loop: asyncio.AbstractEventLoop | None) -> bool:
    """Whether ``loop`` is what runs the caller, and so is not stuck."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
