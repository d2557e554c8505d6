"""Errors of the API: ``application/problem+json`` (RFC 9457) for every one of them.

Code that cannot serve a request raises a ``Problem`` or an error of the service, which ``answer`` turns into the
response. Any other error is a 500 with nothing but a number, under which the log has the details.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from secrets import token_hex
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from asyncpipe.errors import AsyncpipeError, OptionError, ScheduleError
from asyncpipe.service.access import NotYoursError
from asyncpipe.service.http.models import ErrorAnswer
from asyncpipe.service.job_states import JobStateError
from asyncpipe.service.jobs.artifacts import ArtifactError, UnknownArtifactError
from asyncpipe.service.jobs.hosts import UnknownHostError
from asyncpipe.service.jobs.job_folder import JobFolderError
from asyncpipe.service.service_loop import ServiceDrainingError
from asyncpipe.service.store.job_store import (
    AmbiguousJobError,
    IdempotencyConflictError,
    PastDeadlineError,
    QueueFullError,
    QuotaError,
    StoreError,
    StoreProblem,
    UnknownJobError,
)
from asyncpipe.service.submission.submission import SubmissionError
from asyncpipe.service.token_roles import TokenFileError

__all__ = ["RESPONSES", "Problem", "answer", "invalid"]

RETRY_SECONDS = 10
"""``Retry-After`` of a service that cannot serve a request now."""
MOST_PROBLEMS = 50
MOST_DETAIL = 600
TYPE = "urn:asyncpipe:problem:"
MEDIA = "application/problem+json"

_logger = logging.getLogger("asyncpipe.service.http")

TOLD: Mapping[type[AsyncpipeError], tuple[int, str]] = {
    UnknownArtifactError: (404, "unknown-artifact"),
    UnknownHostError: (404, "unknown-host"),
    NotYoursError: (403, "not-yours"),
    QuotaError: (409, "quota"),
    QueueFullError: (503, "queue-full"),
    ServiceDrainingError: (503, "draining"),
}
"""The status and kind of errors whose message is the detail."""
LOGGED: Mapping[type[AsyncpipeError], tuple[int, str, str]] = {
    ArtifactError: (503, "artifact", "the artifact cannot be read now"),
    JobFolderError: (507, "job-folder", "the job's folder could not be copied or removed, as on a full disk"),
    TokenFileError: (503, "tokens", "who may use the service is not known now"),
}
"""The status and kind of errors of the machine, whose message is in the log, and what clients are told."""
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "model": ErrorAnswer,
        "description": HTTPStatus(status).phrase,
        "content": {MEDIA: {"schema": {"$ref": f"#/components/schemas/{ErrorAnswer.__name__}"}}},
    }
    for status in (400, 401, 403, 404, 405, 409, 413, 421, 422, 429, 500, 503, 507)
}
"""What any route may answer, for the OpenAPI document."""


class Problem(AsyncpipeError):
    """A request that cannot be served: a ``status``, a ``kind`` for programs and a sentence for people.

    ``more`` has further members of the response, ``headers`` its headers.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        more: Mapping[str, Any] | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(f"{status} {kind}: {detail}")
        self.status = status
        self.kind = kind
        self.detail = detail
        self.more = dict(more or {})
        self.headers = tuple(headers) or ((("Retry-After", str(RETRY_SECONDS)),) if status in (429, 503) else ())


def invalid(*problems: tuple[str, str]) -> Problem:
    """A 422 that lists every wrong key."""
    listed = [{"key": key[:100], "text": text[:300]} for key, text in problems[:MOST_PROBLEMS]]
    keys = "a wrong key" if len(problems) == 1 else f"{len(problems)} wrong keys"
    return Problem(422, "invalid", f"the request has {keys}; see problems", more={"problems": listed})


async def answer(request: Request, error: Exception) -> Response:
    """The response to ``request``, which failed with ``error``: FastAPI's handler of all exceptions."""
    problem = _problem_of(error) or _unexpected(request, error)
    document = {
        "type": f"{TYPE}{problem.kind}",
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail[:MOST_DETAIL],
        **problem.more,
    }
    response = Response(json.dumps(document), problem.status, media_type=MEDIA)
    for name, value in problem.headers:
        response.headers.append(name, value)
    return response


def _problem_of(error: Exception) -> Problem | None:
    """The problem for an error of a request or of the service; ``None`` if it is neither."""
    match error:
        case Problem():
            return error
        case RequestValidationError():
            return invalid(*((".".join(map(str, each["loc"][1:])), each["msg"]) for each in error.errors()))
        case HTTPException():
            headers = list((error.headers or {}).items())
            return Problem(error.status_code, "refused", str(error.detail), headers=headers)
        case SubmissionError():
            return invalid(*error.problems)
        case UnknownJobError():
            return Problem(404, "unknown-job", "there is no job of this id or name")
        case AmbiguousJobError():
            listed = [{"id": each.id, "name": each.name, "state": str(each.state)} for each in error.candidates]
            return Problem(404, "ambiguous-job", str(error), more={"candidates": listed})
        case JobStateError():
            more = {"job": error.job, "state": str(error.state), "possible": list(map(str, error.possible))}
            return Problem(409, "job-state", str(error), more=more)
        case IdempotencyConflictError():
            detail = "the idempotency key belongs to a job with another specification"
            return Problem(409, "idempotency-conflict", detail, more={"job": error.job})
        case StoreError():
            _logger.error("%s", error)
            status = 507 if error.problem is StoreProblem.FULL else 503
            return Problem(status, "store", f"the job store cannot be used ({error.problem}); nothing was changed")
    for kind, (status, name) in TOLD.items():
        if isinstance(error, kind):
            return Problem(status, name, str(error))
    for kind, (status, name, detail) in LOGGED.items():
        if isinstance(error, kind):
            _logger.error("%s", error)
            return Problem(status, name, f"{detail}; the log of the service says why")
    keys = {PastDeadlineError: "deadline", ScheduleError: "schedule", OptionError: ""}
    found = next((key for kind, key in keys.items() if isinstance(error, kind)), None)
    return None if found is None else invalid((found, str(error)))


def _unexpected(request: Request, error: Exception) -> Problem:
    number = token_hex(8)
    _logger.error("error %s in %s %s", number, request.method, request.url.path, exc_info=error)
    return Problem(500, "internal", f"something went wrong; the log has it as error {number}", more={"error": number})
