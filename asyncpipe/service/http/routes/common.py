"""What the routes of the API have in common: how a request is read, what it may have, and how it can fail.

``ApiRoute`` adds to FastAPI's: bodies are read within limits, by our own reading of JSON; keys of the query that a
route does not have are refused; a wrong request is a problem that names each wrong key; every status that a route can
answer with is in the OpenAPI document.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import getdoc
from typing import Annotated, Any, TypeAlias, get_args, get_origin

from fastapi import Depends, Path, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, APIRouter
from pydantic import BaseModel, BeforeValidator, Field, GetJsonSchemaHandler
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from asyncpipe.service.http import models
from asyncpipe.service.http.access_control import READING
from asyncpipe.service.http.audit import Audit
from asyncpipe.service.http.event_stream import JobEventStreams
from asyncpipe.service.http.json_body import read_json
from asyncpipe.service.http.problems import Problem, invalid, problem_of
from asyncpipe.service.http.rate_limits import StreamLimit
from asyncpipe.service.http.redact import Redactor
from asyncpipe.service.http.who import holder_of
from asyncpipe.service.job_states import JSON, MAX_NAME, JobRecord
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import UnknownJobError
from asyncpipe.service.token_roles import TokenRole
from asyncpipe.service.training_service import TrainingService
from asyncpipe.train.validation import explained

__all__ = [
    "CAUSE",
    "MOST_STEP",
    "LOCATION",
    "PROBLEM",
    "WHOLE",
    "Api",
    "ApiParts",
    "ApiRoute",
    "JobId",
    "JobRoute",
    "ProbeRoute",
    "SchemaOf",
    "Step",
    "api_router",
    "job_id",
    "locate",
    "wrong",
]

CAUSE = "asked for over HTTP"
MOST_STEP = 2**63 - 1
PROBLEM = "application/problem+json"
BODY = (400, 408, 413, 415)
ALWAYS = (417, 421, 500, 503)
GUARDED = (401, 403, 422, 429)
WORDS = {
    400: "The body is not JSON, or JSON that parsers read differently",
    401: "The token is missing or wrong",
    403: "Sent by a page of another server, or the token's role does not allow it",
    404: "There is no such job, host or artifact, or the name may mean several jobs",
    408: "The body arrived too slowly",
    409: "The job's state or the idempotency key does not allow it",
    412: "If-Match has another tag",
    413: "The body is too large",
    415: "The body is not application/json",
    416: "The range begins behind the end; Content-Range has the size",
    417: "An expectation other than 100-continue",
    421: "The Host header does not name this server",
    422: "The request has wrong keys; problems lists them",
    429: "Too many requests of this client, or with this token",
    500: "An error of the service; its log has the details",
    503: "Shutting down, or the queue is full, or out of connections or streams; see Retry-After",
    507: "The disk of the job store is full",
}
HEADERS: Mapping[int, Mapping[str, Any]] = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    429: {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}},
}

_ID = re.compile(models.ID.removesuffix("$") + r"\Z")


@dataclass(frozen=True)
class ApiParts:
    """What the handlers of one service's API share."""

    service: TrainingService
    settings: ServiceSettings
    streams: JobEventStreams
    downloads: StreamLimit
    audit: Audit
    redact: Redactor

    async def details(self, record: JobRecord) -> models.JobDetails:
        """The answer for one job."""
        outlooks = await self.service.outlooks([record.id])
        return models.JobDetails.of_record(record, outlooks[record.id], self.redact)

    async def audited(self, request: Request, what: str, job: str | None, act: Awaitable[Any]) -> Any:
        """What ``act`` returns, a job's record or a tuple that begins with it; the audit gets a line in any case.

        A boolean behind it is whether the job is new.
        """
        try:
            done = await act
        except Exception as error:
            self.refused(request, what, error, job=job)
            raise
        record = done[0] if isinstance(done, tuple) else done
        more = {"new": done[1]} if isinstance(done, tuple) and isinstance(done[1], bool) else {}
        self.audit.line(request, what, "ok", job=record.id, state=str(record.state), **more)
        return done

    def refused(self, request: Request, what: str, error: Exception, **about: str | None) -> None:
        """Tell the audit that ``what`` was refused with ``error``."""
        problem = problem_of(error, self.redact)
        status, reason = (500, "internal") if problem is None else (problem.status, problem.kind)
        self.audit.line(request, what, "refused", **about, status=status, reason=reason)


# Dependencies are coroutines, since FastAPI would call functions on threads.


async def _parts(request: Request) -> ApiParts:
    parts: ApiParts = request.app.state.parts
    return parts


Api: TypeAlias = Annotated[ApiParts, Depends(_parts)]
"""A parameter of a handler."""


async def job_id(request: Request) -> str:
    """The id of the job that the request's path means: an id, the unique beginning of one, or a name.

    Raises ``UnknownJobError``, ``AmbiguousJobError``.
    """
    job: str = request.path_params["id"]
    if _ID.match(job):
        return job
    if len(job) > MAX_NAME:
        raise UnknownJobError(job[:100])
    return await (await _parts(request)).service.resolve(job)


async def _job_id(
    request: Request,
    _: Annotated[
        str,
        Path(
            alias="id",
            description="the job's id, the unique beginning of it, or its name if no other job has it",
            json_schema_extra={"minLength": 1, "maxLength": MAX_NAME},
        ),
    ],
) -> str:
    return await job_id(request)


JobId: TypeAlias = Annotated[str, Depends(_job_id)]
"""A parameter of a handler: the job that the path names."""


def _whole(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"[0-9]{1,19}", value):
        raise ValueError("must be an integer")
    return value


WHOLE = BeforeValidator(_whole)
"""Of a number in a query or a header, after its bounds: digits alone. Pydantic would take ``1.0`` and `` 1_0``."""
Step: TypeAlias = Annotated[int, Field(ge=0, le=MOST_STEP), WHOLE]
"""A step, or the number of an event."""


LOCATION = {"Location": {"description": "Of the job", "required": True, "schema": {"type": "string"}}}
"""Headers of a status with which ``locate`` was called."""


def locate(request: Request, response: Response, record: JobRecord) -> None:
    """Say in ``response`` where the new job is, with the path under which a host mounts the API."""
    below = request.scope.get("root_path", "")
    response.headers["Location"] = f"{below}{request.app.url_path_for('show', id=record.id)}"


def wrong(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For ``responses=``: the problems of a route in particular, beside those that all routes have."""
    return {status: _described(status) for status in statuses}


def _described(status: int) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{models.ErrorAnswer.__name__}"}
    found: dict[str, Any] = {"description": WORDS[status], "content": {PROBLEM: {"schema": schema}}}
    return found | ({"headers": dict(HEADERS[status])} if status in HEADERS else {})


class ApiRoute(APIRoute):
    """One route. The first line of its handler's docstring is its summary."""

    guarded = True
    """Whether it needs a token, is counted, and refuses unknown keys of the query."""
    changes_need = TokenRole.OPERATE
    """What a token must allow for a change by this route; a subclass may ask for less. To read, any token will do."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        summary = (getdoc(endpoint) or "").partition("\n")[0].removesuffix(".")
        super().__init__(path, endpoint, **options | {"summary": summary, "response_description": "Done"})
        self.description = ""
        self.operation_id = _camel(self.name)
        statuses = (*ALWAYS, *(GUARDED if self.guarded else ()), *(BODY if self.body_field is not None else ()))
        if self.guarded:
            self.openapi_extra = {**(self.openapi_extra or {}), "x-role": str(self.role)}
        self.responses = {**wrong(*statuses), **self.responses}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As FastAPI's; HEAD matches what GET does, and is not described on its own."""
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        return super().matches({**scope, "method": "GET"} if is_head else scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; the server leaves out the body of an answer to HEAD."""
        if scope["method"] == "HEAD" and "GET" in (self.methods or ()):
            await self.app(scope, receive, send)
        else:
            await super().handle(scope, receive, send)

    @cached_property
    def role(self) -> TokenRole:
        """What a token must allow. Who may submit may not delete."""
        methods = set(self.methods or ())
        if methods <= READING:
            return TokenRole.READ
        return TokenRole.OPERATE if "DELETE" in methods else self.changes_need

    def _check_role(self, request: Request) -> None:
        holder = holder_of(request)
        if holder is not None and not holder.role.may(self.role):
            detail = f"the token {holder.name!r} may {holder.role}; this needs one that may {self.role}"
            problem = Problem(403, "role", detail)
            audit: Audit = request.app.state.parts.audit
            audit.line(request, f"{request.method} {request.url.path}", "refused", status=403, reason=problem.kind)
            raise problem

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, with our reading of requests before it, and our problems after it."""
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if self.guarded:
                self._check_role(request)
                self._check_keys(request)
            if self.body_field is not None:
                settings = (await _parts(request)).settings
                body = await read_json(request, settings.max_body, settings.body_seconds)
                request = _ReadRequest(request.scope, body)
            try:
                return await answer(request)
            except RequestValidationError as error:
                raise invalid(*self._problems(error)) from None

        return handle

    @cached_property
    def _parameters(self) -> dict[tuple[str, str], Any]:
        """What is known of each parameter, by where it is (``query``, ``header``) and its name there."""
        found: dict[tuple[str, str], Any] = {}
        waiting: list[Dependant] = [self.dependant]
        while waiting:
            each = waiting.pop()
            waiting += each.dependencies
            for where, fields in (("query", each.query_params), ("header", each.header_params)):
                found |= {(where, field.alias): field.field_info for field in fields}
        return found

    def _check_keys(self, request: Request) -> None:
        """Refuse keys of the query that this route does not have, and keys that are there twice and may not be."""
        known = [name for where, name in self._parameters if where == "query"]
        for key in request.query_params:
            if key not in known:
                rule = f"known keys: {', '.join(known)}" if known else "this route has no keys"
                raise invalid((key[:50], f"unknown key; {rule}"))
        for (where, name), info in self._parameters.items():
            sent = request.query_params if where == "query" else request.headers
            if len(sent.getlist(name)) > 1 and not _is_list(info.annotation):
                raise invalid((name, "must be given once"))

    def _problems(self, error: RequestValidationError) -> Iterator[tuple[str, str]]:
        """Each wrong key, and what it must be."""
        for detail in error.errors():
            where, *place = detail["loc"]
            if where == "body":
                yield self._body_problem({**detail, "loc": tuple(place)})
            else:
                info = self._parameters.get((where, place[0]))
                yield place[0], (info and info.description) or detail["msg"]

    def _body_problem(self, detail: Any) -> tuple[str, str]:
        assert self.body_field is not None
        model = self.body_field.field_info.annotation
        if model is models.NothingRequest:
            return "", "must be an empty JSON object"
        if isinstance(model, type) and issubclass(model, BaseModel):
            return explained(detail, model)
        return "", "must be a JSON object"


class JobRoute(ApiRoute):
    """A route of jobs, which those may change who may submit them."""

    changes_need = TokenRole.SUBMIT


class ProbeRoute(ApiRoute):
    """A route that needs no token, is not counted, and takes any query: a process must not be restarted for that."""

    guarded = False


class _ReadRequest(Request):
    """A request whose body has been read."""

    def __init__(self, scope: Scope, body: JSON) -> None:
        super().__init__(scope)
        self._read = body

    async def body(self) -> bytes:
        """Something, so that FastAPI asks for the JSON."""
        return b"read"

    async def json(self) -> Any:
        """The body."""
        return self._read


def api_router(prefix: str, route_class: type[ApiRoute] = ApiRoute) -> APIRouter:
    """A router for the routes of one module."""
    return APIRouter(prefix=prefix, route_class=route_class, redirect_slashes=False)


def _camel(name: str) -> str:
    first, *words = name.split("_")
    return first + "".join(word.capitalize() for word in words)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(map(_is_list, get_args(annotation)))


@dataclass(frozen=True)
class SchemaOf:
    """Describes a value as ``model`` is described; something else checks it."""

    model: type[BaseModel]

    def __get_pydantic_json_schema__(self, _: Any, handler: GetJsonSchemaHandler) -> Any:
        return handler(self.model.__pydantic_core_schema__)
