"""The table of the API's operations, and the OpenAPI 3.1 document that is made from it and the response models.

``routes.py`` registers its handlers by the same table, so every route is described. The document lists every status
that a route can answer with, so that tests can check responses against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from asyncpipe.core.schedules.registry import known_schedules
from asyncpipe.service.http import models
from asyncpipe.service.job_states import JobState
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.submission.submission import Submission, SubmittedPipeline
from asyncpipe.train.job_file import AUTO

__all__ = ["OPERATIONS", "Operation", "describe"]

REF = "#/components/schemas/{model}"
PROBLEM = "application/problem+json"
STREAM = "text/event-stream"
BODY = (400, 408, 413, 415)
ALWAYS = (421, 500, 503)
GUARDED = (401, 403, 429)
WORDS = {
    400: "The body is not JSON, or JSON that parsers read differently",
    401: "The token is missing or wrong",
    403: "Sent by a page of another server",
    404: "There is no such job, or no such host",
    408: "The body arrived too slowly",
    409: "The job's state or the idempotency key does not allow it",
    413: "The body is too large",
    415: "The body is not application/json",
    421: "The Host header does not name this server",
    422: "The request has wrong keys; problems lists them",
    429: "Too many requests of this client",
    500: "An error of the service; its log has the details",
    503: "Shutting down, or the queue is full, or out of connections or streams; see Retry-After",
    507: "The disk of the job store is full",
}
HEADERS: Mapping[int, Mapping[str, Any]] = {
    201: {"Location": {"description": "Of the job", "required": True, "schema": {"type": "string"}}},
    401: {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    429: {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}},
}
SUBMISSION = "Submission"


@dataclass(frozen=True)
class Operation:
    """One route: its handler is the method ``name`` of ``Routes``."""

    method: str
    path: str
    name: str
    summary: str
    done: Mapping[int, type[BaseModel] | str]
    wrong: Sequence[int] = ()
    parameters: Sequence[Mapping[str, Any]] = ()
    body: type[BaseModel] | str | None = None
    guarded: bool = True
    """Whether it needs the token and is counted."""

    @property
    def id(self) -> str:
        """The ``operationId``, in camel case."""
        first, *words = self.name.split("_")
        return first + "".join(word.capitalize() for word in words)


def _act(name: str, summary: str) -> Operation:
    done = {200: models.JobDetails}
    return Operation("post", f"/v1/jobs/{{id}}/{name}", name, summary, done, (404, 409, 422, 507), [JOB], NOTHING)


def _parameter(name: str, where: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": where, "description": description, "required": where == "path", "schema": schema}


JOB = _parameter("id", "path", "The job's id", type="string", pattern=models.ID)
HOST = _parameter("host", "path", "The host, as /v1/workers names it", type="string", minLength=1, maxLength=200)
LIMIT = _parameter(
    "limit", "query", "The most rows of the response", type="integer", minimum=1, maximum=models.MOST_LISTED
)
AFTER_STEP = _parameter("after", "query", "Only what follows it", type="integer", minimum=0, maximum=2**63 - 1)
STATES = {
    **_parameter("state", "query", "Only jobs in these states", type="array", items={"enum": list(map(str, JobState))}),
    "explode": True,
}
AFTER_JOB = _parameter("after", "query", "Only jobs that follow this one", type="string", pattern=models.ID)
LAST_EVENT = _parameter(
    "Last-Event-ID", "header", "The last event that the client has; overrides after", type="integer", minimum=0,
    maximum=2**63 - 1,
)  # fmt: skip
KEY = _parameter(
    "Idempotency-Key", "header", "With the same key again there is no second job", type="string", minLength=1,
    maxLength=200, pattern="^[!-~]([ -~]*[!-~])?$",
)  # fmt: skip
NOTHING = "nothing"
EVENT = {
    "description": "An event of the stream; the event end is the last.",
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "event": {"enum": ["state", "note", "snapshot", "step", "end"]},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {
                "anyOf": [
                    {"$ref": REF.format(model=models.EventAnswer.__name__)},
                    {"type": "object", "maxProperties": 0, "description": "Of the end"},
                ]
            },
        },
    },
    "required": ["event", "data"],
}

OPERATIONS = [
    Operation("post", "/v1/jobs", "submit", "Submit a job",
               {201: models.JobDetails, 200: models.JobDetails}, (409, 422, 507), [KEY], SUBMISSION),
    Operation("get", "/v1/jobs", "list", "Jobs in the order of submission",
               {200: models.JobsAnswer}, (422,), [STATES, LIMIT, AFTER_JOB]),
    Operation("get", "/v1/jobs/{id}", "show", "A job", {200: models.JobDetails}, (404, 422), [JOB]),
    Operation("get", "/v1/jobs/{id}/history", "history", "Every transition of a job",
               {200: models.HistoryAnswer}, (404, 422), [JOB]),
    Operation("get", "/v1/jobs/{id}/losses", "losses", "Steps of a job",
               {200: models.LossesAnswer}, (404, 422), [JOB, AFTER_STEP, LIMIT]),
    Operation("get", "/v1/jobs/{id}/events", "events", "Events of a job as they happen",
               {200: STREAM}, (404, 422), [JOB, AFTER_STEP, LAST_EVENT]),
    _act("pause", "Pause a job after its step"),
    _act("resume", "Resume a paused job"),
    _act("cancel", "Cancel a job for good"),
    Operation("put", "/v1/jobs/{id}/schedule", "change_schedule", "Change the schedule after the current step",
               {200: models.JobDetails}, (404, 409, 422, 507), [JOB], models.ScheduleRequest),
    Operation("get", "/v1/workers", "workers", "Worker processes and their hosts", {200: models.WorkersAnswer}, (422,)),
    Operation("post", "/v1/workers/{host}/drain", "drain", "Have jobs leave a host after their steps",
               {200: models.WorkersAnswer}, (404, 422), [HOST], NOTHING),
    Operation("post", "/v1/workers/{host}/undrain", "undrain", "Have jobs use a host again",
               {200: models.WorkersAnswer}, (404, 422), [HOST], NOTHING),
    Operation("get", "/v1/schedules", "schedules", "Schedules that jobs may name", {200: models.SchedulesAnswer},
               (422,)),
    Operation("get", "/v1/entries", "entries", "Entries that jobs may name", {200: models.EntriesAnswer}, (422,)),
    Operation("get", "/v1/openapi.json", "describe", "This document", {200: "application/json"}),
    Operation("get", "/livez", "alive", "Fails if a restart would help", {200: models.ReadyAnswer}, guarded=False),
    Operation("get", "/readyz", "ready", "Fails while no jobs can be submitted", {200: models.ReadyAnswer},
               guarded=False),
]  # fmt: skip


def describe(settings: ServiceSettings, entries: Sequence[str], below: str = "") -> dict[str, Any]:
    """The document of a service with these ``entries``; ``below`` is the path under which a host mounts the API."""
    from asyncpipe import __version__

    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "asyncpipe", "summary": "Training jobs", "version": __version__},
        "servers": [{"url": below or "/"}],
        "paths": {},
        "components": {"schemas": _schemas(settings, entries)},
    }
    has_token = settings.token is not None
    if has_token:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "basic": {"type": "http", "scheme": "basic", "description": "Any user, the token as password"},
        }
    for operation in OPERATIONS:
        document["paths"].setdefault(operation.path, {})[operation.method] = _described(operation, has_token)
    return document


def _described(operation: Operation, has_token: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"operationId": operation.id, "summary": operation.summary}
    if operation.parameters:
        found["parameters"] = list(operation.parameters)
    if operation.body is not None:
        content = {"application/json": {"schema": _body_schema(operation.body)}}
        found["requestBody"] = {"required": True, "content": content}
    if has_token:
        found["security"] = [{"bearer": []}, {"basic": []}] if operation.guarded else []
    wrong = {*operation.wrong, *ALWAYS}
    wrong |= set(BODY) if operation.body is not None else set()
    wrong |= set(GUARDED) if operation.guarded else set()
    found["responses"] = {
        **{str(status): _answer(status, "Done", what) for status, what in operation.done.items()},
        **{str(status): _answer(status, WORDS[status], models.ErrorAnswer, PROBLEM) for status in sorted(wrong)},
    }
    return found


def _body_schema(body: type[BaseModel] | str) -> dict[str, Any]:
    if body == NOTHING:
        return {"type": "object", "additionalProperties": False}
    return {"$ref": REF.format(model=body if isinstance(body, str) else body.__name__)}


def _answer(status: int, words: str, what: type[BaseModel] | str, kind: str = "application/json") -> dict[str, Any]:
    if isinstance(what, str):
        content: dict[str, Any] = {what: {"schema": EVENT if what == STREAM else {"type": "object"}}}
    else:
        content = {kind: {"schema": {"$ref": REF.format(model=what.__name__)}}}
    answer: dict[str, Any] = {"description": words, "content": content}
    if status in HEADERS:
        answer["headers"] = dict(HEADERS[status])
    return answer


def _schemas(settings: ServiceSettings, entries: Sequence[str]) -> dict[str, Any]:
    read: dict[str, type[BaseModel]] = {
        what.__name__: what for each in OPERATIONS for what in each.done.values() if not isinstance(what, str)
    }
    wanted: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
        (Submission, "validation"),
        (models.ScheduleRequest, "validation"),
    ]
    answers: list[type[BaseModel]] = [*read.values(), models.EventAnswer, models.ErrorAnswer]
    wanted += [(model, "serialization") for model in answers]
    _, found = models_json_schema(wanted, ref_template=REF)
    schemas: dict[str, Any] = found["$defs"]
    schemas[SUBMISSION]["properties"]["entry"]["enum"] = list(entries)
    # A problem leaves out members that are None.
    for member in schemas[models.ErrorAnswer.__name__]["properties"].values():
        member.pop("default", None)
    pipeline = schemas[SubmittedPipeline.__name__]["properties"]
    devices = {"items": {"enum": sorted(set(settings.devices))}, "minItems": 1, "maxItems": len(settings.devices)}
    pipeline["devices"] |= devices
    named = {"type": "string", "pattern": models.SCHEDULE, "maxLength": 200}
    known = known_schedules()
    pipeline["schedule"] = {"default": "1f1b", "anyOf": [{"enum": [AUTO, *known]}, named]}
    schemas[models.ScheduleRequest.__name__]["properties"]["schedule"] = {"anyOf": [{"enum": known}, named]}
    return schemas
