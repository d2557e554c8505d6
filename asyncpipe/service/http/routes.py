"""The API's handlers: read what was asked, ask the service, say what came of it.

Nothing is decided here but what a request means. What the service raises becomes an answer in ``problems.py``; whoever
may not ask has been refused in ``guard.py``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from asyncpipe.service.http import models
from asyncpipe.service.http.audit import Audit
from asyncpipe.service.http.event_stream import EventStreams
from asyncpipe.service.http.json_body import read_json
from asyncpipe.service.http.problems import Problem, draining, invalid, problem_of
from asyncpipe.service.http.redact import Redactor
from asyncpipe.service.job_states import FINAL_STATES, JSON, JobRecord, JobState
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import StoreError, UnknownJobError
from asyncpipe.service.submission.submission import SubmissionError
from asyncpipe.service.training_service import ServiceDrainingError, TrainingService
from asyncpipe.train.validation import wrong_keys

__all__ = ["Routes", "job_id"]

CAUSE = "asked for over HTTP"
MOST_STEP = 2**63 - 1
MOST_KEY = 200
_ID = re.compile(models.ID.removesuffix("$") + r"\Z")


class Routes:
    """The handlers of ``v1``, ``livez`` and ``readyz`` for one service."""

    def __init__(
        self, service: TrainingService, settings: ServiceSettings, streams: EventStreams, audit: Audit, redact: Redactor
    ) -> None:
        self._service = service
        self._settings = settings
        self._streams = streams
        self._audit = audit
        self._redact = redact

    def add_to(self, router: web.UrlDispatcher) -> tuple[web.AbstractRoute, ...]:
        """Add all routes; gives those of probes."""
        router.add_post("/v1/jobs", self.submit)
        router.add_get("/v1/jobs", self.list)
        router.add_get("/v1/jobs/{id}", self.show, name="job")
        router.add_get("/v1/jobs/{id}/history", self.history)
        router.add_get("/v1/jobs/{id}/losses", self.losses)
        router.add_get("/v1/jobs/{id}/events", self.events)
        router.add_post("/v1/jobs/{id}/pause", self.pause)
        router.add_post("/v1/jobs/{id}/resume", self.resume)
        router.add_post("/v1/jobs/{id}/cancel", self.cancel)
        router.add_put("/v1/jobs/{id}/schedule", self.change_schedule)
        router.add_get("/v1/schedules", self.schedules)
        router.add_get("/v1/entries", self.entries)
        return router.add_get("/livez", self.alive), router.add_get("/readyz", self.ready)

    # Changing

    async def submit(self, request: web.Request) -> web.Response:
        """A new job, or the one that the idempotency key has made before."""
        key = _idempotency_key(request)
        body = await self._body(request)
        if not isinstance(body, dict):
            raise invalid(("", "must be a JSON object"))
        record, new = await self._audited(request, "submit", None, lambda: self._service.submit(body, key))
        # The route's own name, so that it is right below a host's prefix.
        place = request.app.router["job"].url_for(id=record.id)
        return await self._details(record, status=201 if new else 200, headers={"Location": str(place)})

    async def pause(self, request: web.Request) -> web.Response:
        """The job, which pauses after its step."""
        return await self._act(request, "pause", lambda job: self._service.pause(job, CAUSE))

    async def resume(self, request: web.Request) -> web.Response:
        """The job, which waits for its turn."""
        return await self._act(request, "resume", lambda job: self._service.resume(job, CAUSE))

    async def cancel(self, request: web.Request) -> web.Response:
        """The job, which ends after its step."""
        return await self._act(request, "cancel", lambda job: self._service.cancel(job, CAUSE))

    async def change_schedule(self, request: web.Request) -> web.Response:
        """The job, whose next step runs by another schedule."""
        job = job_id(request)
        body = await self._body(request)
        try:
            asked = models.ScheduleRequest.model_validate(body)
        except ValidationError as error:
            raise SubmissionError(wrong_keys(error, models.ScheduleRequest)) from None
        change = self._audited(request, "schedule", job, lambda: self._service.change_schedule(job, asked.schedule))
        return await self._details(await change)

    async def _act(self, request: web.Request, what: str, act: Callable[[str], Awaitable[JobRecord]]) -> web.Response:
        job = job_id(request)
        if await self._body(request) != {}:
            raise invalid(("", "must be an empty JSON object"))
        return await self._details(await self._audited(request, what, job, lambda: act(job)))

    async def _audited(
        self, request: web.Request, what: str, job: str | None, act: Callable[[], Awaitable[Any]]
    ) -> Any:
        """What ``act`` gives, with a line in the audit, also for what was tried in vain."""
        try:
            done = await act()
        except Exception as error:
            problem = problem_of(error, self._redact)
            status, reason = (500, "internal") if problem is None else (problem.status, problem.kind)
            self._audit.line(request, what, "refused", job=job, status=status, reason=reason)
            raise
        record = done[0] if isinstance(done, tuple) else done
        more = {"new": done[1]} if isinstance(done, tuple) else {}
        self._audit.line(request, what, "ok", job=record.id, state=str(record.state), **more)
        return done

    async def _body(self, request: web.Request) -> JSON:
        return await read_json(request, self._settings.max_body, self._settings.body_seconds)

    # Looking

    async def list(self, request: web.Request) -> web.Response:
        """Jobs in the order of submission."""
        query = _query(request, "state", "limit", "after")
        states = [_state(name) for name in query.get("state", [])] or None
        limit, after = _whole(query, "limit", 100, 1, models.MOST_LISTED), _last(query, "after")
        if after is not None and not _ID.match(after):
            raise invalid(("after", "must be the id of a job"))
        try:
            records = await self._service.list(states, limit, after)
        except UnknownJobError:
            raise invalid(("after", "must be the id of a job, and there is none of this one")) from None
        return _answer(models.JobsAnswer.of(list(records), self._redact, limit))

    async def show(self, request: web.Request) -> web.Response:
        """One job, with what was submitted."""
        _query(request)
        return await self._details(await self._service.get(job_id(request)))

    async def history(self, request: web.Request) -> web.Response:
        """Every transition of a job."""
        _query(request)
        found = await self._service.history(job_id(request))
        of = models.TransitionAnswer.of
        return _answer(models.HistoryAnswer(transitions=[of(each, self._redact) for each in found]))

    async def losses(self, request: web.Request) -> web.Response:
        """Steps of a job."""
        job, query = job_id(request), _query(request, "after", "limit")
        after = _whole(query, "after", 0, 0, MOST_STEP)
        limit = _whole(query, "limit", models.MOST_LISTED, 1, models.MOST_LISTED)
        rows = await self._service.losses(job, after, limit)
        following = rows[-1].step if len(rows) >= limit else None
        return _answer(models.LossesAnswer(losses=[models.LossAnswer.of(row) for row in rows], next=following))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """What happens to a job, as it happens."""
        job, query = job_id(request), _query(request, "after")
        after = _whole(query, "after", 0, 0, MOST_STEP)
        if (seen := request.headers.get("Last-Event-ID")) is not None:
            after = _whole({"Last-Event-ID": [seen]}, "Last-Event-ID", 0, 0, MOST_STEP)
        await self._service.get(job)
        return await self._streams.send(request, self._service.follow(job, after), partial(self._is_over, job))

    async def _is_over(self, job: str) -> bool:
        try:
            return (await self._service.get(job)).state in FINAL_STATES
        except (ServiceDrainingError, StoreError):
            return False

    async def schedules(self, request: web.Request) -> web.Response:
        """Schedules that jobs may name."""
        _query(request)
        names = await asyncio.to_thread(_schedules)
        return _answer(models.SchedulesAnswer(schedules=names))

    async def entries(self, request: web.Request) -> web.Response:
        """Entries that jobs may name."""
        _query(request)
        found = [models.EntryAnswer(name=name, parameters=schema) for name, schema in schemas(self._service).items()]
        return _answer(models.EntriesAnswer(entries=found))

    async def alive(self, _: web.Request) -> web.Response:
        """Whether a restart would not help."""
        status = self._service.status()
        if not status.live:
            raise Problem(503, "not-alive", self._redact(status.reason, 300))
        return _answer(models.ReadyAnswer(ready=status.ready, reason=self._redact(status.reason, 300)))

    async def ready(self, _: web.Request) -> web.Response:
        """Whether jobs can be submitted."""
        status = self._service.status()
        if not status.ready:
            raise draining(self._redact(status.reason, 300))
        return _answer(models.ReadyAnswer(ready=True, reason=self._redact(status.reason, 300)))

    async def _details(
        self, record: JobRecord, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.Response:
        waits_for = await self._service.waits_for(record.id) if record.state is JobState.QUEUED else None
        return _answer(models.JobDetails.of(record, waits_for, self._redact), status, headers)


def job_id(request: web.Request) -> str:
    """The id in the request's path; whatever cannot be one is the id of no job. Raises ``UnknownJobError``."""
    job = request.match_info["id"]
    if not _ID.match(job):
        raise UnknownJobError(job[:100])
    return job


def schemas(service: TrainingService) -> dict[str, dict[str, Any]]:
    """The JSON schema of each entry's parameters."""
    return {name: service.entries.schema(name) for name in service.entries.names}


def _schedules() -> list[str]:
    from asyncpipe.core.schedules.registry import known_schedules

    return known_schedules()


def _answer(model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    text = model.model_dump_json(by_alias=True)
    return web.Response(body=text.encode(), status=status, content_type="application/json", headers=headers)


# What was asked


def _query(request: web.Request, *known: str) -> dict[str, list[str]]:
    """The values of each key. Raises ``Problem`` for a key that is not known, or a text that is none."""
    query: dict[str, list[str]] = {}
    for key, value in request.query.items():
        if key not in known:
            rule = f"known keys: {', '.join(known)}" if known else "there are no keys here"
            raise invalid((key[:50], f"unknown key; {rule}"))
        query.setdefault(key, []).append(value)
    return query


def _last(query: Mapping[str, list[str]], key: str) -> str | None:
    values = query.get(key, [])
    if len(values) > 1:
        raise invalid((key, "must be there once"))
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
    if len(keys) == 1 and 0 < len(keys[0]) <= MOST_KEY and keys[0].isascii() and keys[0].isprintable():
        return keys[0]
    raise invalid(("Idempotency-Key", f"must be there once, of 1 to {MOST_KEY} printable ASCII characters"))
