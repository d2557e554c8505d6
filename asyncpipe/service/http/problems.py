"""Errors of the API: ``application/problem+json`` (RFC 9457) for every one of them.

Code that cannot serve a request raises a ``Problem``, which ``catch_problems`` turns into the response. ``problem_of``
translates errors of the service. Any other error is a 500 with nothing but a number, under which the log has the
details.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from secrets import token_hex
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncpipe.errors import OptionError, ScheduleError
from asyncpipe.service.http.redact import Redactor
from asyncpipe.service.job_states import JobSpecError, JobStateError
from asyncpipe.service.jobs.artifacts import ArtifactError, UnknownArtifactError
from asyncpipe.service.jobs.hosts import UnknownHostError
from asyncpipe.service.store.job_store import (
    IdempotencyConflictError,
    QueueFullError,
    StoreError,
    StoreProblem,
    UnknownJobError,
)
from asyncpipe.service.submission.submission import SubmissionError
from asyncpipe.service.training_service import ServiceDrainingError

__all__ = ["Problem", "catch_problems", "invalid", "problem_of"]

RETRY_SECONDS = 10
"""``Retry-After`` of a service that is shutting down, or whose store cannot be used."""
QUEUE_SECONDS = 60
"""``Retry-After`` of a full queue."""
MOST_PROBLEMS = 50
MOST_DETAIL = 600
TYPE = "urn:asyncpipe:problem:"

_logger = logging.getLogger("asyncpipe.service.http")


class Problem(Exception):
    """A request that cannot be served: a ``status``, a ``kind`` for programs and a sentence for people.

    ``more`` has further members of the response, ``headers`` its headers. ``close`` closes the connection afterwards.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        more: Mapping[str, Any] | None = None,
        headers: Sequence[tuple[str, str]] = (),
        close: bool = False,
    ) -> None:
        super().__init__(f"{status} {kind}: {detail}")
        self.status = status
        self.kind = kind
        self.detail = detail
        self.more = dict(more or {})
        self.headers = tuple(headers)
        self.close = close

    def document(self, redact: Redactor) -> dict[str, Any]:
        """The members of the response."""
        return {
            "type": f"{TYPE}{self.kind}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": redact(self.detail, MOST_DETAIL),
            **self.more,
        }

    def answer(self, redact: Redactor) -> web.Response:
        """The response."""
        response = web.Response(
            status=self.status,
            body=json.dumps(self.document(redact)).encode(),
            content_type="application/problem+json",
        )
        response.headers.extend(self.headers)
        if self.close:
            response.force_close()
        return response


def invalid(*problems: tuple[str, str]) -> Problem:
    """A 422 that lists every wrong key."""
    listed = [{"key": key, "text": text} for key, text in problems[:MOST_PROBLEMS]]
    keys = "a wrong key" if len(problems) == 1 else f"{len(problems)} wrong keys"
    return Problem(422, "invalid", f"the request has {keys}; see problems", more={"problems": listed})


def problem_of(error: BaseException, redact: Redactor) -> Problem | None:
    """The problem for an error of the service; ``None`` if the request is not its cause."""
    match error:
        case SubmissionError():
            return invalid(*((redact(key, 100), redact(text, 300)) for key, text in error.problems))
        case UnknownJobError():
            return Problem(404, "unknown-job", "there is no job of this id")
        case UnknownArtifactError():
            return Problem(404, "unknown-artifact", str(error))
        case ArtifactError():
            _logger.error("%s", error)
            detail = "the artifact cannot be read now; the log of the service says why"
            return Problem(503, "artifact", detail, headers=[("Retry-After", str(RETRY_SECONDS))])
        case UnknownHostError():
            return Problem(404, "unknown-host", redact(str(error), 300))
        case JobStateError():
            possible = [str(state) for state in error.possible]
            more = {"job": error.job, "state": str(error.state), "possible": possible}
            return Problem(409, "job-state", str(error), more=more)
        case IdempotencyConflictError():
            detail = "the idempotency key belongs to a job with another specification"
            return Problem(409, "idempotency-conflict", detail, more={"job": error.job})
        case QueueFullError():
            return Problem(503, "queue-full", str(error), headers=[("Retry-After", str(QUEUE_SECONDS))])
        case ServiceDrainingError():
            return draining("the service is shutting down; submitted jobs continue after its restart")
        case StoreError():
            return _store_problem(error)
        case ScheduleError():
            return invalid(("schedule", redact(str(error), 300)))
        case JobSpecError() | OptionError():
            return invalid(("", redact(str(error), 300)))
    return None


def draining(detail: str) -> Problem:
    """A 503 that says when to try again."""
    return Problem(503, "draining", detail, headers=[("Retry-After", str(RETRY_SECONDS))])


def _store_problem(error: StoreError) -> Problem:
    _logger.error("%s", error)
    if error.problem is StoreProblem.FULL:
        return Problem(507, "store-full", "the disk of the job store is full; the request changed nothing")
    if error.problem is StoreProblem.CLOSED:
        return draining("the service is closed")
    detail = f"the job store cannot be used ({error.problem}); the request changed nothing"
    return Problem(503, "store", detail, headers=[("Retry-After", str(RETRY_SECONDS))])


def catch_problems(redact: Redactor) -> Middleware:
    """The middleware that turns every exception into a response."""

    @web.middleware
    async def catch(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Problem as problem:
            return problem.answer(redact)
        except web.HTTPException as error:
            return _http_problem(error).answer(redact)
        except Exception as error:
            if isinstance(error, ConnectionError):  # The client has gone; aiohttp handles that.
                raise
            return (problem_of(error, redact) or _unexpected(request)).answer(redact)

    return catch


def _http_problem(error: web.HTTPException) -> Problem:
    """The problem for an error of aiohttp, such as an unknown route or method."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return Problem(405, "method", f"allowed here: {allowed}", headers=[("Allow", allowed)])
    if error.status == 404:
        return Problem(404, "not-found", "there is nothing at this address; see v1/openapi.json")
    return Problem(error.status, "refused", error.reason)


def _unexpected(request: web.Request) -> Problem:
    number = token_hex(8)
    route = request.match_info.route.resource
    _logger.exception("error %s in %s %s", number, request.method, route.canonical if route else "an unknown route")
    return Problem(500, "internal", f"something went wrong; the log has it as error {number}", more={"error": number})
