"""Errors of the API: ``application/problem+json`` (RFC 9457) for every one of them.

Code that cannot serve a request raises a ``Problem``, which ``CatchProblems`` turns into the response. ``problem_of``
translates errors of the service. Any other error is a 500 with nothing but a number, under which the log has the
details.

A request whose body was refused may still be sending it. A connection that is closed meanwhile is reset, and the client
may never read why; so the answer is sent, and then up to ``LINGER_SECONDS`` of the body are read and dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from secrets import token_hex
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncpipe.errors import OptionError, ScheduleError
from asyncpipe.service.http.redact import Redactor
from asyncpipe.service.job_states import JobSpecError, JobStateError
from asyncpipe.service.jobs.artifacts import ArtifactError, UnknownArtifactError
from asyncpipe.service.jobs.hosts import UnknownHostError
from asyncpipe.service.jobs.job_folder import JobFolderError
from asyncpipe.service.service_loop import ServiceDrainingError
from asyncpipe.service.store.job_store import (
    AmbiguousJobError,
    IdempotencyConflictError,
    PastDeadlineError,
    QueueFullError,
    StoreError,
    StoreProblem,
    UnknownJobError,
)
from asyncpipe.service.submission.submission import SubmissionError
from asyncpipe.service.token_roles import TokenFileError

__all__ = ["CatchProblems", "Problem", "draining", "invalid", "problem_of"]

RETRY_SECONDS = 10
"""``Retry-After`` of a service that is shutting down, or whose store cannot be used."""
QUEUE_SECONDS = 60
"""``Retry-After`` of a full queue."""
LINGER_SECONDS = 2.0
"""How long a client whose body was refused may go on sending it and read the answer."""
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

    def answer(self, redact: Redactor) -> Response:
        """The response."""
        body = json.dumps(self.document(redact)).encode()
        response = Response(body, self.status, media_type="application/problem+json")
        for name, value in (*self.headers, *([("Connection", "close")] if self.close else [])):
            response.headers.append(name, value)
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
        case PastDeadlineError():
            return invalid(("deadline", str(error)))
        case UnknownJobError():
            return Problem(404, "unknown-job", "there is no job of this id or name")
        case AmbiguousJobError():
            listed = [
                {"id": each.id, "name": redact(each.name, 200), "state": str(each.state)} for each in error.candidates
            ]
            detail = "several jobs have this name, or ids that begin so; see candidates"
            return Problem(404, "ambiguous-job", detail, more={"candidates": listed})
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
        case JobFolderError():
            _logger.error("%s", error)
            detail = "the job's folder could not be copied or removed, as on a full disk; the request changed nothing"
            return Problem(507, "job-folder", detail)
        case StoreError():
            return _store_problem(error)
        case TokenFileError():
            _logger.error("%s", error)
            return Problem(503, "tokens", "who may use the service is not known now; the log of the service says why")
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


class CatchProblems:
    """Middleware that turns every exception into a response, unless a response has begun."""

    def __init__(self, app: ASGIApp, redact: Redactor) -> None:
        self._app = app
        self._redact = redact

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer what is raised."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, more_body = False, True

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        async def received() -> Message:
            nonlocal more_body
            message = await receive()
            more_body = bool(message.get("more_body"))
            return message

        try:
            await self._app(scope, received, sent)
        except ClientDisconnect:
            pass  # Nobody is left to be answered.
        except Exception as error:
            if begun:
                raise
            problem = self._problem(error, scope)
            response = problem.answer(self._redact)
            await response(scope, receive, _kept_open(send) if problem.close else send)
            if problem.close:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_SECONDS):
                        while more_body:
                            await received()
                await send({"type": "http.response.body", "body": b""})

    def _problem(self, error: Exception, scope: Scope) -> Problem:
        match error:
            case Problem():
                return error
            case HTTPException():
                return _http_problem(error, scope)
        return problem_of(error, self._redact) or _unexpected(scope)


def _kept_open(send: Send) -> Send:
    """``send``, which does not say yet that the response is over."""

    async def keep_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    return keep_open


def _http_problem(error: HTTPException, scope: Scope) -> Problem:
    """The problem for an error of the router: an unknown route or method."""
    if error.status_code == 405:
        methods: set[str] = set()
        for route in scope["app"].routes:
            if route.matches(scope)[0] is Match.PARTIAL:
                methods |= route.methods | ({"HEAD"} if "GET" in route.methods else set())
        allowed = ", ".join(sorted(methods))
        return Problem(405, "method", f"allowed here: {allowed}", headers=[("Allow", allowed)])
    if error.status_code == 404:
        return Problem(404, "not-found", "there is nothing at this address; see v1/openapi.json")
    return Problem(error.status_code, "refused", HTTPStatus(error.status_code).phrase)


def _unexpected(scope: Scope) -> Problem:
    number = token_hex(8)
    # Not ``scope["route"]``: what comes before the routes may have given them a scope of their own.
    found = (route.path for route in scope["app"].routes if route.matches(scope)[0] is Match.FULL)
    where = next(found, "an unknown route")
    _logger.exception("error %s in %s %s", number, scope["method"], where)
    return Problem(500, "internal", f"something went wrong; the log has it as error {number}", more={"error": number})
