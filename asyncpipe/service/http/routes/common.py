"""What the routes of the API have in common: parameters, the role that a token needs, and how bodies are read."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.routing import APIRoute
from pydantic import Field
from pydantic_core import from_json

from asyncpipe.service.http import models
from asyncpipe.service.http.access_control import READING, holder_of
from asyncpipe.service.http.problems import Problem
from asyncpipe.service.job_states import MAX_NAME, JobRecord
from asyncpipe.service.store.job_store import UnknownJobError
from asyncpipe.service.token_roles import TokenRole
from asyncpipe.service.training_service import TrainingService

__all__ = ["CAUSE", "JobId", "Service", "Step", "api_router", "changes_need", "details", "job_id", "locate"]

CAUSE = "asked for over HTTP"
MOST_STEP = 2**63 - 1

_ID = re.compile(models.ID.removesuffix("$") + r"\Z")


def changes_need(role: TokenRole) -> Callable[[Request], Awaitable[None]]:
    """A dependency of routes: a token must have ``role`` for changes; to read, any will do. Deleting is `operate`'s."""

    async def check(request: Request) -> None:
        holder = holder_of(request)
        needed = TokenRole.OPERATE if request.method == "DELETE" else role
        if holder is not None and request.method not in READING and not holder.role.may(needed):
            detail = f"the token {holder.name!r} may {holder.role}; this needs one that may {needed}"
            raise Problem(403, "role", detail)

    return check


# Dependencies are coroutines, since FastAPI would call functions on threads.


async def _service(request: Request) -> TrainingService:
    service: TrainingService = request.app.state.service
    return service


Service: TypeAlias = Annotated[TrainingService, Depends(_service)]
"""A parameter of a handler."""


async def job_id(service: TrainingService, text: str) -> str:
    """The id of the job that ``text`` means: an id, the unique beginning of one, or a name.

    Raises ``UnknownJobError``, ``AmbiguousJobError``.
    """
    if _ID.match(text):
        return text
    if len(text) > MAX_NAME:
        raise UnknownJobError(text[:100])
    return await service.resolve(text)


async def _job_id(
    service: Service,
    job: Annotated[
        str,
        Path(alias="id", description="the job's id, the unique beginning of it, or its name if no other job has it"),
    ],
) -> str:
    return await job_id(service, job)


JobId: TypeAlias = Annotated[str, Depends(_job_id)]
"""A parameter of a handler: the job that the path names."""
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
