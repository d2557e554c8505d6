"""A service without training for the API's tests: real settings, store and checks, jobs that are moved by hand."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import ClientSession
from starlette.applications import Starlette
from starlette.routing import Mount
from torch import Generator, Tensor, nn

from asyncpipe.errors import OptionError
from asyncpipe.observe import http_server
from asyncpipe.observe.live import LiveView
from asyncpipe.service.http import make_api, serve_api
from asyncpipe.service.job_reading import JobReading
from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobState, JobStateError
from asyncpipe.service.jobs.artifacts import Artifact, JobFiles, OpenArtifact, event_lines, loss_lines
from asyncpipe.service.jobs.hosts import UnknownHostError, WorkerStatus
from asyncpipe.service.jobs.job_folder import FilesOfJob
from asyncpipe.service.jobs.last_view import PastView
from asyncpipe.service.jobs.outlook import Outlook
from asyncpipe.service.jobs.quotas import Quotas
from asyncpipe.service.known_tokens import KnownTokens
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.device_runs import DeviceRun
from asyncpipe.service.store.job_records import JobEvent, LossRow
from asyncpipe.service.store.job_store import JobFilter, JobStore, make_id
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import (
    changed_document,
    check_amendment,
    check_new_schedule,
    check_submission,
)
from asyncpipe.service.training_service import ServiceDrainingError, ServiceStatus, TrainingService
from asyncpipe.train.workload import Workload

TOKEN = "quite-a-secret-token-0123456789"
ENTRY = "tiny:build"
JSON = {"Content-Type": "application/json"}
NOBODY = "0" * 26
"""The id of no job."""


def build(width: int = 4, scale: float = 1.0) -> Workload:
    """Trains nothing."""
    raise AssertionError("nothing is trained here")


def submission(**more: Any) -> dict[str, Any]:
    """A whole one."""
    return {
        "name": "demo",
        "entry": ENTRY,
        "parameters": {"width": 8},
        "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 4, "schedule": "gpipe"},
        "training": {"steps": 100, "batch_size": 8, "learning_rate": 0.01},
    } | more


def make_settings(folder: Path, **more: Any) -> ServiceSettings:
    """Settings on a free port, with jobs on threads."""
    given = {
        "isolation": "thread",
        "folder": folder,
        "devices": ("cpu:0", "cpu:1"),
        "entries": [ENTRY],
        "port": 0,
    }
    return ServiceSettings(**given | more)


@dataclass
class FakeService:
    """What the API needs of a ``TrainingService``; jobs become what they are told at once."""

    settings: ServiceSettings
    store: JobStore
    draining: str = ""
    live: bool = True
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.entries = Entries({ENTRY: build})
        self.tokens = KnownTokens(self.settings.folder, self.settings.token)
        self.views: dict[str, LiveView] = {}
        self.rows: dict[str, list[LossRow]] = {}
        self.known: dict[str, Outlook] = {}
        self.told: dict[str, list[JobEvent]] = {}
        self.news = asyncio.Event()
        self.followers = 0
        self.drained: set[str] = set()
        self.on_workers: tuple[str, ...] = ()
        self.busy: set[str] = set()
        """Jobs that cannot be paused."""

    async def submit(
        self, asked: Mapping[str, Any], idempotency_key: str | None = None, **whose: Any
    ) -> tuple[JobRecord, bool]:
        self._check()
        return await self.store.add(check_submission(asked, self.settings, self.entries), idempotency_key, **whose)

    async def amend(self, job: str, **changes: Any) -> JobRecord:
        self._check()
        return await self.store.amend(job, **check_amendment(**changes))

    async def pause(self, job: str, cause: str = "") -> JobRecord:
        if job in self.busy:
            raise JobStateError(job, JobState.RUNNING, "pause just now")
        return await self.become(job, JobState.PAUSED, cause)

    async def resume(self, job: str, cause: str = "") -> JobRecord:
        if (state := (await self.store.get(job)).state) in FINAL_STATES:
            raise JobStateError(job, state, "be resumed")
        return await self.become(job, JobState.QUEUED, cause)

    async def cancel(self, job: str, cause: str = "") -> JobRecord:
        return await self.become(job, JobState.CANCELLED, cause)

    async def retry(self, job: str, from_step: int | None = None, changes: Any = None, cause: str = "") -> JobRecord:
        record = await self.get(job)
        if changes:
            changed_document(record, changes, self.settings, self.entries, fixed=("entry", "name"))
        if record.state not in FINAL_STATES:
            raise JobStateError(job, record.state, "be retried")
        return await self.become(job, JobState.QUEUED, "retried")

    async def fork(self, job: str, from_step: int | None = None, changes: Any = None, **whose: Any) -> JobRecord:
        record = await self.get(job)
        spec = changed_document(record, changes or {}, self.settings, self.entries, fixed=("entry",))
        return await self.store.fork(make_id(time.time()), spec, job, 0, **whose)

    async def delete(self, job: str, *, dry_run: bool = False) -> tuple[JobRecord, FilesOfJob]:
        record = await self.get(job)
        if record.state not in FINAL_STATES:
            raise JobStateError(job, record.state, "be deleted before it has ended")
        if not dry_run:
            await self.store.delete(job)
        return record, FilesOfJob(3, 1000, (2, 4))

    async def become(self, job: str, to: JobState, cause: str = "because") -> JobRecord:
        self._check()
        try:
            return await self.store.transition(job, to, cause)
        finally:
            self._wake()

    async def change_schedule(self, job: str, schedule: str) -> JobRecord:
        self._check()
        record = await self.store.get(job)
        check_new_schedule(record, schedule)
        return record

    async def get(self, job: str) -> JobRecord:
        if self.error is not None:
            raise self.error
        return await self.store.get(job)

    async def resolve(self, text: str, whose: Any = None) -> str:
        return await self.store.resolve(text, whose)

    async def list(
        self, wanted: JobFilter, limit: int = 100, after: str | None = None, **options: bool
    ) -> Sequence[JobRecord]:
        return await self.store.list(wanted, limit, after, **options)

    async def history(self, job: str) -> Sequence[Any]:
        return await self.store.history(job)

    async def outlooks(self, jobs: Sequence[str]) -> Mapping[str, Outlook]:
        known = await self.store.figures(jobs)
        return {job: replace(self.known.get(job, Outlook(waits_for="a place")), **known[job]._asdict()) for job in jobs}

    async def changes(self, whose: Any = None) -> tuple[Mapping[JobState, int], int]:
        return await self.store.count(whose), await self.store.newest_change(whose)

    async def use(self, owner: str, teams: Any) -> Sequence[Mapping[str, Any]]:
        return await Quotas(self.settings, self.store, self.settings.folder / "jobs").use(owner, teams, ())

    async def runs(self, since: float) -> Sequence[DeviceRun]:
        return await self.store.runs(since)

    async def past_view(self, job: str) -> LiveView:
        return PastView((await self.store.get(job)).name, 100, {})

    async def spread_losses(self, job: str, points: int) -> Sequence[LossRow]:
        rows = self.rows.get(job, [])
        return rows[:: max(1, len(rows) // points)][:points]

    runs_said, said, failures = JobReading.runs_said, JobReading.said, JobReading.failures

    @property
    def manager(self) -> Any:
        """What these need of one."""
        logs = SimpleNamespace(folder=self.settings.folder / "jobs")
        return SimpleNamespace(logs=logs, jobs=SimpleNamespace(store=self.store))

    async def losses(self, job: str, after: int = 0, limit: int = 1000) -> Sequence[LossRow]:
        await self.store.get(job)
        return [row for row in self.rows.get(job, []) if row.step > after][:limit]

    async def artifacts(self, job: str) -> Sequence[Artifact]:
        return (await self._files(job)).found()

    async def open_artifact(self, job: str, name: str, step: int | None = None) -> OpenArtifact:
        is_table = name == "losses.csv"
        parts = [f"{','.join(LossRow._fields)}\r\n".encode()] if is_table else []
        parts.append(loss_lines(self.rows.get(job, []), as_csv=is_table))
        if name.startswith("log"):
            parts = [event_lines(self.told.get(job, []))]
        return (await self._files(job)).open(name, step, parts)

    async def _files(self, job: str) -> JobFiles:
        await self.store.get(job)
        folder = self.settings.folder / "jobs" / job
        folder.mkdir(parents=True, exist_ok=True)
        return JobFiles(folder, has_losses=job in self.rows)

    def tell(self, job: str, kind: Any, **data: Any) -> None:
        """An event for those who follow."""
        told = self.told.setdefault(job, [])
        told.append(JobEvent(len(told) + 1, 1.5, kind, data))
        self._wake()

    async def follow(self, job: str, after: int = 0) -> AsyncIterator[JobEvent]:
        self.followers += 1
        try:
            while True:
                news = self.news
                state = (await self.store.get(job)).state
                for event in self.told.get(job, [])[after:]:
                    after = event.id
                    yield event
                if state in FINAL_STATES or self.draining:
                    return
                await news.wait()
        finally:
            self.followers -= 1
            self._wake()

    def view(self, job: str) -> LiveView | None:
        return self.views.get(job)

    async def workers(self) -> Sequence[WorkerStatus]:
        up: dict[str, Any] = {"heartbeat_seconds": 0.25, "round_trip_seconds": math.inf, "machine": "here", "pid": 7}
        down: dict[str, Any] = {"heartbeat_seconds": None, "round_trip_seconds": None, "machine": "", "pid": 0}
        return [
            WorkerStatus(
                name=f"{host}/cpu:0",
                host=host,
                up=host == "a",
                draining=host in self.drained,
                devices=(f"{host}/cpu:0",),
                jobs=self.on_workers,
                **(up if host == "a" else down),
            )
            for host in "ab"
        ]

    async def drain_host(self, host: str) -> Sequence[WorkerStatus]:
        return await self._of_host(host, self.drained.add)

    async def undrain_host(self, host: str) -> Sequence[WorkerStatus]:
        return await self._of_host(host, self.drained.discard)

    async def _of_host(self, host: str, change: Callable[[str], object]) -> Sequence[WorkerStatus]:
        self._check()
        if host not in "ab":
            raise UnknownHostError(host, ["a", "b"])
        change(host)
        return [each for each in await self.workers() if each.host == host]

    def status(self) -> ServiceStatus:
        return ServiceStatus(not self.draining and self.live, self.live, self.draining or "takes jobs", 1, 2)

    async def drain(self, cause: str) -> None:
        """Say that it drains."""
        self.draining = cause
        self._wake()

    def _wake(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()

    def _check(self) -> None:
        if self.draining:
            raise ServiceDrainingError(self.draining)
        if self.error is not None:
            raise self.error


@asynccontextmanager
async def fake(folder: Path, **settings: Any) -> AsyncIterator[FakeService]:
    """A fake service in ``folder``."""
    made = make_settings(folder, **settings)
    made.make_folder()
    async with JobStore(folder / "jobs.sqlite3") as store:
        yield FakeService(made, store)


class Api:
    """A client of the API under test."""

    def __init__(self, session: ClientSession, base: str, service: FakeService, app: Any = None) -> None:
        self.session = session
        self.base = base
        """The URL of the API, without a slash at its end."""
        self.service = service
        self.app = app

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """Status, JSON (or text) and headers of the answer; ``body`` is sent as JSON unless it is bytes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = ({} if data is None else JSON) | {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.request(
            method, self.base + path, data=data, headers=given, allow_redirects=False
        ) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text and "json" in answer.content_type else text, answer.headers

    async def submitted(self, **more: Any) -> str:
        """The id of a new job."""
        status, job, _ = await self.ask("POST", "/v1/jobs", submission(**more))
        assert status == 201, job
        return str(job["id"])


@asynccontextmanager
async def mounted(folder: Path, below: str = "", **settings: Any) -> AsyncIterator[Api]:
    """The application alone, or ``below`` a path of a host's, under a server that is not ours."""
    async with fake(folder, **settings) as service:
        app = host = make_api(service, service.settings)  # type: ignore[arg-type]
        if below:
            host = Starlette(routes=[Mount(below, app)], lifespan=lambda _: app.router.lifespan_context(app))  # type: ignore[assignment]
        async with http_server.served(host, "127.0.0.1", 0, "the API") as port, ClientSession() as session:
            yield Api(session, f"http://127.0.0.1:{port}{below}", service, app)


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[Api]:
    """The API on a socket of its own."""
    async with (
        fake(folder, **settings) as service,
        serve_api(service, service.settings) as url,  # type: ignore[arg-type]
        ClientSession() as session,
    ):
        yield Api(session, url.rstrip("/"), service)


# The real one


def tiny(width: int = 8, scale: float = 1.0) -> Workload:
    """A regression of a few numbers."""
    if not 0 < width <= 64:
        raise OptionError("width must be from 1 to 64")

    def batches(size: int, generator: Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            x = torch.randn(size, width, generator=generator)
            yield x, scale * x.sum(1, keepdim=True)

    model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))
    return Workload(model, nn.functional.mse_loss, batches, memoryless=True)


def job(steps: int = 20, **more: Any) -> dict[str, Any]:
    """A submission of so many steps."""
    return submission(training={"steps": steps, "batch_size": 8, "learning_rate": 0.01}) | more


@asynccontextmanager
async def real(folder: Path, **settings: Any) -> AsyncIterator[Api]:
    """The API of a service that trains."""
    made = make_settings(folder, **settings)
    async with (
        TrainingService(made, entries=Entries({ENTRY: tiny})) as service,
        serve_api(service, made) as url,
        ClientSession() as session,
    ):
        yield Api(session, url.rstrip("/"), service)  # type: ignore[arg-type]
