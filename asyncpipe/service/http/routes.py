"""The handlers of the API: each one reads a request, calls the service, and makes the response.

``problems.py`` turns errors of the service into responses; ``access_control.py`` has refused unauthorised requests
before.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from asyncpipe.core.schedules.registry import known_schedules
from asyncpipe.service.http import models, openapi
from asyncpipe.service.http.audit import Audit
from asyncpipe.service.http.event_stream import JobEventStreams
from asyncpipe.service.http.json_body import read_json
from asyncpipe.service.http.problems import Problem, draining, invalid, problem_of
from asyncpipe.service.http.redact import Redactor
from asyncpipe.service.job_states import (
    FINAL_STATES,
    IDEMPOTENCY_KEY,
    JSON,
    JobRecord,
    JobState,
    is_idempotency_key,
)
from asyncpipe.service.jobs.hosts import WorkerStatus
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import StoreError, UnknownJobError
from asyncpipe.service.submission.submission import SubmissionError
from asyncpipe.service.training_service import ServiceDrainingError, TrainingService
from asyncpipe.train.validation import wrong_keys

__all__ = ["Routes", "job_id"]

CAUSE = "asked for over HTTP"
MOST_STEP = 2**63 - 1
_ID = re.compile(models.ID.removesuffix("$") + r"\Z")


@dataclass(frozen=True)
class Routes:
    """The handlers of ``v1``, ``livez`` and ``readyz`` for one service."""

    service: TrainingService
    settings: ServiceSettings
    streams: JobEventStreams
    audit: Audit
    redact: Redactor

    def add_to(self, router: web.UrlDispatcher) -> list[web.AbstractRoute]:
        """Add a route for each of ``OPERATIONS``; returns those that need no token."""
        free: list[web.AbstractRoute] = []
        for operation in openapi.OPERATIONS:
            add = {"get": router.add_get, "post": router.add_post, "put": router.add_put}[operation.method]
            route = add(operation.path, getattr(self, operation.name), name=operation.name)
            if not operation.guarded:
                free.append(route)
        return free

    # Changing

    async def submit(self, request: web.Request) -> web.Response:
        """A new job, or the job that the idempotency key created before."""
        key = _idempotency_key(request)
        body = await self._body(request)
        if not isinstance(body, dict):
            raise invalid(("", "must be a JSON object"))
        record, new = await self._audited(request, "submit", None, lambda: self.service.submit(body, key))
        # By the route's name, so that it includes the path under which a host mounts the API.
        location = request.app.router["show"].url_for(id=record.id)
        return await self._details(record, status=201 if new else 200, headers={"Location": str(location)})

    async def pause(self, request: web.Request) -> web.Response:
        """The job, paused or asked to pause after its step."""
        return await self._act(request, "pause", lambda job: self.service.pause(job, CAUSE))

    async def resume(self, request: web.Request) -> web.Response:
        """The job, queued again."""
        return await self._act(request, "resume", lambda job: self.service.resume(job, CAUSE))

    async def cancel(self, request: web.Request) -> web.Response:
        """The job, cancelled or asked to end after its current tasks."""
        return await self._act(request, "cancel", lambda job: self.service.cancel(job, CAUSE))

    async def change_schedule(self, request: web.Request) -> web.Response:
        """The job, which follows another schedule from its next step on."""
        job = job_id(request)
        body = await self._body(request)
        try:
            asked = models.ScheduleRequest.model_validate(body)
        except ValidationError as error:
            raise SubmissionError(wrong_keys(error, models.ScheduleRequest)) from None
        change = self._audited(request, "schedule", job, lambda: self.service.change_schedule(job, asked.schedule))
        return await self._details(await change)

    async def _act(self, request: web.Request, what: str, act: Callable[[str], Awaitable[JobRecord]]) -> web.Response:
        job = job_id(request)
        if await self._body(request) != {}:
            raise invalid(("", "must be an empty JSON object"))
        return await self._details(await self._audited(request, what, job, lambda: act(job)))

    async def drain(self, request: web.Request) -> web.Response:
        """The workers of a host that jobs leave after their steps."""
        return await self._act_on_host(request, "drain", self.service.drain_host)

    async def undrain(self, request: web.Request) -> web.Response:
        """The workers of a host that jobs may use again."""
        return await self._act_on_host(request, "undrain", self.service.undrain_host)

    async def _act_on_host(
        self, request: web.Request, what: str, act: Callable[[str], Awaitable[Sequence[WorkerStatus]]]
    ) -> web.Response:
        host = request.match_info["host"]
        if await self._body(request) != {}:
            raise invalid(("", "must be an empty JSON object"))
        try:
            found = await act(host)
        except Exception as error:
            self._refused(request, what, error, host=host)
            raise
        self.audit.line(request, what, "ok", host=host)
        return self._workers(found)

    def _workers(self, found: Sequence[WorkerStatus]) -> web.Response:
        return _answer(models.WorkersAnswer(workers=[models.WorkerAnswer.of(each, self.redact) for each in found]))

    def _refused(self, request: web.Request, what: str, error: Exception, **about: str | None) -> None:
        problem = problem_of(error, self.redact)
        status, reason = (500, "internal") if problem is None else (problem.status, problem.kind)
        self.audit.line(request, what, "refused", **about, status=status, reason=reason)

    async def _audited(
        self, request: web.Request, what: str, job: str | None, act: Callable[[], Awaitable[Any]]
    ) -> Any:
        """What ``act`` returns; writes a line to the audit, also if ``act`` raises."""
        try:
            done = await act()
        except Exception as error:
            self._refused(request, what, error, job=job)
            raise
        record = done[0] if isinstance(done, tuple) else done
        more = {"new": done[1]} if isinstance(done, tuple) else {}
        self.audit.line(request, what, "ok", job=record.id, state=str(record.state), **more)
        return done

    async def _body(self, request: web.Request) -> JSON:
        return await read_json(request, self.settings.max_body, self.settings.body_seconds)

    # Reading

    async def list(self, request: web.Request) -> web.Response:
        """Jobs in the order of submission."""
        query = _query(request, "state", "limit", "after")
        states = [_state(name) for name in query.get("state", [])] or None
        limit, after = _whole(query, "limit", 100, 1, models.MOST_LISTED), _last(query, "after")
        if after is not None and not _ID.match(after):
            raise invalid(("after", "must be the id of a job"))
        try:
            records = await self.service.list(states, limit, after)
        except UnknownJobError:
            raise invalid(("after", "must be the id of a job, and no job has this one")) from None
        return _answer(models.JobsAnswer.of_records(list(records), self.redact, limit))

    async def show(self, request: web.Request) -> web.Response:
        """One job, with what was submitted."""
        _query(request)
        return await self._details(await self.service.get(job_id(request)))

    async def history(self, request: web.Request) -> web.Response:
        """All transitions of a job."""
        _query(request)
        found = await self.service.history(job_id(request))
        transitions = [models.TransitionAnswer.of(each, self.redact) for each in found]
        return _answer(models.HistoryAnswer(transitions=transitions))

    async def losses(self, request: web.Request) -> web.Response:
        """Steps of a job."""
        job, query = job_id(request), _query(request, "after", "limit")
        after = _whole(query, "after", 0, 0, MOST_STEP)
        limit = _whole(query, "limit", models.MOST_LISTED, 1, models.MOST_LISTED)
        rows = await self.service.losses(job, after, limit)
        following = rows[-1].step if len(rows) >= limit else None
        return _answer(models.LossesAnswer(losses=[models.LossAnswer.of(row) for row in rows], next=following))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The events of a job as they happen."""
        job, query = job_id(request), _query(request, "after")
        after = _whole(query, "after", 0, 0, MOST_STEP)
        if (seen := request.headers.get("Last-Event-ID")) is not None:
            after = _whole({"Last-Event-ID": [seen]}, "Last-Event-ID", 0, 0, MOST_STEP)
        await self.service.get(job)
        return await self.streams.send(request, self.service.follow(job, after), partial(self._is_over, job))

    async def _is_over(self, job: str) -> bool:
        try:
            return (await self.service.get(job)).state in FINAL_STATES
        except (ServiceDrainingError, StoreError):
            return False

    async def workers(self, request: web.Request) -> web.Response:
        """The workers of the service."""
        _query(request)
        return self._workers(await self.service.workers())

    async def schedules(self, request: web.Request) -> web.Response:
        """The schedules that jobs may name."""
        _query(request)
        return _answer(models.SchedulesAnswer(schedules=await asyncio.to_thread(known_schedules)))

    async def entries(self, request: web.Request) -> web.Response:
        """The entries that jobs may name."""
        _query(request)
        entries = self.service.entries
        found = [models.EntryAnswer(name=name, parameters=entries.schema(name)) for name in entries.names]
        return _answer(models.EntriesAnswer(entries=found))

    async def describe(self, request: web.Request) -> web.Response:
        """The OpenAPI document."""
        below = request.path.removesuffix("/v1/openapi.json")
        # In a thread: it looks for installed schedules, and makes a schema of every model.
        names = self.service.entries.names
        document = await asyncio.to_thread(openapi.describe, self.settings, names, below)
        return web.Response(body=json.dumps(document).encode(), content_type="application/json")

    async def alive(self, _: web.Request) -> web.Response:
        """Fails if a restart would help."""
        status = self.service.status()
        reason = self.redact(status.reason, 300)
        if not status.live:
            raise Problem(503, "not-alive", reason)
        return _answer(models.ReadyAnswer(ready=status.ready, reason=reason))

    async def ready(self, _: web.Request) -> web.Response:
        """Fails while no jobs can be submitted."""
        status = self.service.status()
        reason = self.redact(status.reason, 300)
        if not status.ready:
            raise draining(reason)
        return _answer(models.ReadyAnswer(ready=True, reason=reason))

    async def _details(
        self, record: JobRecord, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.Response:
        waiting = record.state in (JobState.QUEUED, JobState.RUNNING)
        waits_for = await self.service.waits_for(record.id) if waiting else None
        return _answer(models.JobDetails.of_record(record, waits_for, self.redact), status, headers)


def job_id(request: web.Request) -> str:
    """The id in the request's path. Raises ``UnknownJobError`` for a text that cannot be an id."""
    job = request.match_info["id"]
    if not _ID.match(job):
        raise UnknownJobError(job[:100])
    return job


def _answer(model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    text = model.model_dump_json(by_alias=True)
    return web.Response(body=text.encode(), status=status, content_type="application/json", headers=headers)


# Parsing requests


def _query(request: web.Request, *known: str) -> dict[str, list[str]]:
    """The query's values by key. Raises ``Problem`` for an unknown key."""
    query: dict[str, list[str]] = {}
    for key, value in request.query.items():
        if key not in known:
            rule = f"known keys: {', '.join(known)}" if known else "this route has no keys"
            raise invalid((key[:50], f"unknown key; {rule}"))
        query.setdefault(key, []).append(value)
    return query


def _last(query: Mapping[str, list[str]], key: str) -> str | None:
    values = query.get(key, [])
    if len(values) > 1:
        raise invalid((key, "must be given once"))
    return values[0] if values else None


def _whole(query: Mapping[str, list[str]], key: str, default: int, least: int, most: int) -> int:
    text = _last(query, key)
    if text is None:
        return default
    if re.fullmatch(r"[0-9]{1,19}", text) and least <= int(text) <= most:
        return int(text)
    raise invalid((key, f"must be an integer from {least} to {most}"))


def _state(name: str) -> JobState:
    with suppress(ValueError):
        return JobState(name)
    raise invalid(("state", f"must be one of {', '.join(JobState)}"))


def _idempotency_key(request: web.Request) -> str | None:
    keys = request.headers.getall("Idempotency-Key", [])
    if not keys:
        return None
    if len(keys) == 1 and is_idempotency_key(keys[0]):
        return keys[0]
    raise invalid(("Idempotency-Key", f"must be given once, with {IDEMPOTENCY_KEY}"))
