"""What the routes of the API have in common: parameters, the role that a token needs, and how bodies are read."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.routing import APIRoute
from pydantic import Field
from pydantic_core import from_json

from asyncpipe.service.access import Access, Whose
from asyncpipe.service.http import models
from asyncpipe.service.http.access_control import READING, holder_of
from asyncpipe.service.http.problems import Problem
from asyncpipe.service.job_states import MAX_NAME, JobRecord
from asyncpipe.service.store.job_store import UnknownJobError
from asyncpipe.service.token_roles import TokenRole
from asyncpipe.service.training_service import TrainingService

__all__ = [
    "Cause",
    "JobId",
    "Seen",
    "Service",
    "Step",
    "api_router",
    "changes_need",
    "details",
    "job_id",
    "locate",
    "owner_of",
]

MOST_STEP = 2**63 - 1
ONLY_READ = frozenset({"fork"})
"""Names of routes that change something, but not the job that their path names."""

_ID = re.compile(models.ID.removesuffix("$") + r"\Z")


def changes_need(role: TokenRole) -> Callable[[Request], Awaitable[None]]:
    """A dependency of routes: who asks must have ``role`` for changes; to read, any will do."""

    async def check(request: Request) -> None:
        holder = holder_of(request)
        if holder is not None and request.method not in READING and not holder.role.may(role):
            detail = f"{holder.user} may {holder.role}; this needs somebody who may {role}"
            raise Problem(403, "role", detail)

    return check


# Dependencies are coroutines, since FastAPI would call functions on threads.


async def _service(request: Request) -> TrainingService:
    service: TrainingService = request.app.state.service
    return service


Service: TypeAlias = Annotated[TrainingService, Depends(_service)]
"""A parameter of a handler."""


def access_of(request: Request) -> Access | None:
    """What who sends ``request`` may do with jobs; ``None`` where no token is needed, and everybody may everything."""
    if (holder := holder_of(request)) is None:
        return None
    settings = request.app.state.service.settings
    return Access(holder.user, holder.role, holder.teams, settings.team_access, settings.others)


def owner_of(request: Request) -> dict[str, Any]:
    """The ``owner`` and the ``teams`` of a job that ``request`` submits."""
    holder = holder_of(request)
    return {} if holder is None else {"owner": holder.user, "teams": holder.teams}


async def _cause(request: Request) -> str:
    holder = holder_of(request)
    return f"asked for by {'a client' if holder is None else holder.user}"


Cause: TypeAlias = Annotated[str, Depends(_cause)]
"""A parameter of a handler: why it changes the state of a job."""


async def _seen(request: Request) -> Whose | None:
    access = access_of(request)
    return None if access is None else access.seen


Seen: TypeAlias = Annotated[Whose | None, Depends(_seen)]
"""A parameter of a handler: whose jobs alone its answer may have; ``None``: everybody's."""


async def job_id(request: Request, text: str, deed: str | None = None) -> str:
    """The id of the job that ``text`` means: an id, the unique beginning of one, or a name.

    The only place that decides whether who sends ``request`` may see the job, and do ``deed`` with it. Raises
    ``UnknownJobError``, also for a job that is not to be seen, ``AmbiguousJobError``, ``NotYoursError``.
    """
    service: TrainingService = request.app.state.service
    access = access_of(request)
    job = text
    if not _ID.match(text):
        if len(text) > MAX_NAME:
            raise UnknownJobError(text[:100])
        job = await service.resolve(text, None if access is None else access.seen)
    if access is not None:
        record = await service.get(job)
        if not access.may_see(record):
            raise UnknownJobError(job)
        if deed is not None:
            access.check(record, deed)
    return job


async def _job_id(
    request: Request,
    job: Annotated[
        str,
        Path(alias="id", description="the job's id, the unique beginning of it, or its name if no other job has it"),
    ],
) -> str:
    name = request.scope["route"].name
    deed = None if request.method in READING or name in ONLY_READ else name.partition("_")[0]
    return await job_id(request, job, deed)


JobId: TypeAlias = Annotated[str, Depends(_job_id)]
"""A parameter of a handler: the job that the path names, if who asks may do with it what the route's name says."""
Step: TypeAlias = Annotated[int, Field(ge=0, le=MOST_STEP)]
"""A step, or the number of an event."""


async def details(service: TrainingService, record: JobRecord) -> models.JobDetails:
    """The answer for one job."""
    outlooks = await service.outlooks([record.id])
    return models.JobDetails.of_record(record, outlooks[record.id])


def locate(request: Request, response: Response, record: JobRecord) -> None:
    """Say in ``response`` where the new job is, with the path under which a host mounts the API."""
    below = request.scope.get("root_path", "")
    response.headers["Location"] = f"{below}{request.app.url_path_for('show', id=record.id)}"


class _JsonRequest(Request):
    async def json(self) -> Any:
        """The body, without NaN and unpaired surrogates, which no answer could tell again."""
        return from_json(await self.body(), allow_inf_nan=False)


class _JsonRoute(APIRoute):
    """Reads bodies with pydantic's reader of JSON, which is stricter than Python's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await answer(_JsonRequest(request.scope, request.receive))

        return handle


def api_router(prefix: str = "") -> APIRouter:
    """A router for the routes of one module."""
    return APIRouter(prefix=prefix, route_class=_JsonRoute, redirect_slashes=False)
