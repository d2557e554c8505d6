"""A client of the job service that needs only the standard library: submits, controls and watches jobs.

    client = JobClient("http://127.0.0.1:8080", token=...)
    job = client.submit({"name": "charlm", "entry": "charlm:build", "pipeline": {...}, "training": {...}})
    for event in client.events(job["id"]):
        print(event.kind, event.data)

A request that is safe to repeat is repeated if the service cannot be reached, restarts or is busy: with growing pauses,
a limited number of times, and for no longer than the timeout::

    request                     no connection    connection lost     429, 502, 503, 504    other errors
    submit (with its key)       repeated         repeated            repeated              raised
    reading                     repeated         repeated            repeated              raised
    pause, resume, cancel …     repeated         raised              repeated if 429, 503  raised

Requests go to the host of the URL only: redirects and proxies of the environment are not followed, and the token is
sent in a header only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from random import uniform
from secrets import token_urlsafe
from typing import Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

from asyncpipe.errors import AsyncpipeError, OptionError
from asyncpipe.service.client_events import ServerEvent, read_events
from asyncpipe.service.job_states import FINAL_STATES, IDEMPOTENCY_KEY, is_idempotency_key
from asyncpipe.service.settings.token_file import check_token

__all__ = ["ApiError", "JobClient", "ServerEvent", "UnreachableError", "WaitTimeoutError"]

MOST_BYTES = 64 * 1024 * 1024
"""The most bytes of a response; the service's are far smaller."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before a request is repeated, at first and at most."""
POLL_FIRST, POLL_MOST = 0.05, 2.0
"""Seconds between two requests while waiting for a job, at first and at most."""
STREAM_SECONDS = 60.0
"""A stream without any bytes for so long, not even a keep-alive comment, counts as broken."""
BUSY = frozenset({429, 502, 503, 504})
NOT_TAKEN = frozenset({429, 503})
"""Statuses of requests that had no effect."""


class ApiError(AsyncpipeError, RuntimeError):
    """The service refused a request: its HTTP ``status``, ``title``, ``detail``, and ``problems`` by wrong key.

    ``kind`` is a name for programs (``job-state``), ``body`` the whole response, ``retry_after`` in seconds.
    """

    def __init__(self, status: int, body: Mapping[str, Any], retry_after: float = 0.0) -> None:
        self.status = status
        self.retry_after = retry_after
        self.body = dict(body)
        self.title = str(body.get("title") or "HTTP error")
        self.detail = str(body.get("detail") or "")
        self.kind = str(body.get("type") or "").rpartition(":")[2]
        self.problems = _problems(body.get("problems"))
        lines = [f"{self.title} ({status}): {self.detail}".removesuffix(": ")]
        super().__init__("\n".join([*lines, *(f"{key}: {text}" if key else text for key, text in self.problems)]))

    def __reduce__(self) -> tuple[type[ApiError], tuple[int, dict[str, Any], float]]:
        return type(self), (self.status, self.body, self.retry_after)


class UnreachableError(AsyncpipeError, ConnectionError):
    """The service could not be reached, or its response did not arrive; the message says where and why."""


class WaitTimeoutError(AsyncpipeError, TimeoutError):
    """A job did not end within the given time; it continues."""


class JobClient:
    """The jobs of the service at ``url``, such as ``http://127.0.0.1:8080`` or where an application has mounted it.

    ``token`` is the service's, if it has one. ``timeout`` in seconds limits connecting, each wait for bytes, and all
    pauses together; ``retries`` limits how often a request is repeated. Any number of threads may use a client: each
    call has its own connection. Jobs and other responses are dicts of the service's JSON.

    Every method raises ``ApiError`` if the service refuses, ``UnreachableError`` if it cannot be reached.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        retries: int = 5,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        address = _split(url)
        self.url = url.rstrip("/")
        self._secure = address.scheme == "https"
        self._host, self._port, self._prefix = address.hostname or "", address.port, address.path.rstrip("/")
        self._headers = {"Accept": "application/json", "User-Agent": "asyncpipe"}
        if token is not None:
            try:
                self._headers["Authorization"] = f"Bearer {check_token(token)}"
            except ValueError as error:
                raise OptionError(f"token: {error}") from None
        self._timeout = timeout
        self._retries = retries
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"JobClient({self.url!r})"

    # Changing

    def submit(self, submission: Mapping[str, Any], idempotency_key: str | None = None) -> dict[str, Any]:
        """The new job. Submitting again with the same key returns the same job, even much later.

        Without a key, one is generated for this call, so that repeated requests create one job.
        """
        key = token_urlsafe(24) if idempotency_key is None else idempotency_key
        if not is_idempotency_key(key):
            raise OptionError(f"an idempotency key is {IDEMPOTENCY_KEY}")
        return self._ask("POST", "/v1/jobs", dict(submission), {"Idempotency-Key": key}, repeatable=True)

    def pause(self, job: str) -> dict[str, Any]:
        """The job, which is paused after its step, with a snapshot; a queued job is paused at once."""
        return self._change(job, "pause")

    def resume(self, job: str) -> dict[str, Any]:
        """The job, queued again."""
        return self._change(job, "resume")

    def cancel(self, job: str) -> dict[str, Any]:
        """The job, which is cancelled between two tasks if it runs, and at once if not."""
        return self._change(job, "cancel")

    def change_schedule(self, job: str, schedule: str) -> dict[str, Any]:
        """The job, which follows the registered ``schedule`` from its next step on."""
        return self._ask("PUT", f"{_path(job)}/schedule", {"schedule": schedule})

    def drain(self, host: str) -> tuple[dict[str, Any], ...]:
        """The workers of ``host``, which jobs leave after their steps, until ``undrain``."""
        return self._change_host(host, "drain")

    def undrain(self, host: str) -> tuple[dict[str, Any], ...]:
        """The workers of ``host``, which jobs may use again."""
        return self._change_host(host, "undrain")

    def _change_host(self, host: str, what: str) -> tuple[dict[str, Any], ...]:
        if not host:
            raise OptionError("a host's name must not be empty")
        # Draining twice is draining.
        answer = self._ask("POST", f"/v1/workers/{quote(host, safe='')}/{what}", {}, repeatable=True)
        return tuple(answer.get("workers", ()))

    def _change(self, job: str, what: str) -> dict[str, Any]:
        return self._ask("POST", f"{_path(job)}/{what}", {})

    # Reading

    def show(self, job: str) -> dict[str, Any]:
        """The job, with what was submitted as ``document``."""
        return self._get(_path(job))

    def list(
        self, states: Collection[str] | None = None, *, limit: int | None = None, after: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """The first ``limit`` jobs in any of ``states`` that follow job ``after``, in the order of submission.

        Requests page by page as the iterator advances; jobs may be added and change meanwhile.
        """
        left = limit
        while left is None or left > 0:
            page = 1000 if left is None else min(left, 1000)
            query: list[tuple[str, str]] = [("limit", str(page)), *(("state", state) for state in states or ())]
            answer = self._get("/v1/jobs", [*query, ("after", after)] if after is not None else query)
            jobs = answer.get("jobs") or []
            yield from jobs
            left = None if left is None else left - len(jobs)
            after = answer.get("next")
            if after is None or not jobs:
                return

    def history(self, job: str) -> tuple[dict[str, Any], ...]:
        """The job's transitions in their order: ``from``, ``to``, ``at``, ``cause``, ``sequence``."""
        return tuple(self._get(f"{_path(job)}/history").get("transitions", ()))

    def losses(self, job: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """The steps after number ``after``: ``step``, ``loss``, ``learning_rate``, ``seconds``, ``tokens``."""
        following: int | None = after
        while following is not None:
            answer = self._get(f"{_path(job)}/losses", [("after", str(following)), ("limit", "1000")])
            yield from answer.get("losses", ())
            following = answer.get("next")

    def entries(self) -> tuple[dict[str, Any], ...]:
        """The entries that jobs may name: ``name``, and ``parameters`` as JSON schema."""
        return tuple(self._get("/v1/entries").get("entries", ()))

    def schedules(self) -> tuple[str, ...]:
        """The schedules that jobs may name."""
        return tuple(self._get("/v1/schedules").get("schedules", ()))

    def workers(self) -> tuple[dict[str, Any], ...]:
        """The service's workers (``name``, ``host``, ``up``, ``draining``, ``jobs`` …); none if it has threads."""
        return tuple(self._get("/v1/workers").get("workers", ()))

    def wait(self, job: str, timeout: float | None = None) -> dict[str, Any]:
        """The job, finished, failed or cancelled. Raises ``WaitTimeoutError`` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = POLL_FIRST
        while (found := self.show(job))["state"] not in FINAL_STATES:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise WaitTimeoutError(f"job {job} is {found['state']} after {timeout:g} s; it goes on")
            self._sleep(pause if left is None else min(pause, left))
            pause = min(pause * 1.5, POLL_MOST)
        return found

    def events(self, job: str, after: int = 0) -> Iterator[ServerEvent]:
        """The past events of the job after event ``after``, then new ones as they happen, until the job has ended.

        If the connection breaks or the service restarts, the stream continues after the last event. Steps in between
        are left out (``losses`` has them), nothing else.
        """
        last, failures = after, 0
        while True:
            error: Exception = HTTPException(f"the event stream of job {job} ends again and again before the job does")
            try:
                for event in self._stream(job, last):
                    failures = 0
                    if event.kind == "end":
                        return
                    last = max(last, event.id)
                    yield event
            except (OSError, HTTPException, ApiError) as broken:
                error = broken
            failures += 1
            if failures > self._retries or not _may_repeat(error, repeatable=True):
                self._give_up(error)
            self._sleep(_pause(failures, error))

    def _stream(self, job: str, last: int) -> Iterator[ServerEvent]:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(last)}
        connection, response = self._send("GET", f"{_path(job)}/events", None, headers, STREAM_SECONDS)
        with closing(connection), closing(response):
            if response.status != 200:
                raise ApiError(response.status, _body(response), _retry_after(response))
            yield from read_events(response)

    # HTTP

    def _get(self, path: str, query: Collection[tuple[str, str]] = ()) -> dict[str, Any]:
        return self._ask("GET", f"{path}?{urlencode(list(query))}" if query else path, None, repeatable=True)

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None = None,
        *,
        repeatable: bool = False,
    ) -> dict[str, Any]:
        """The response; repeats the request where that may help and is safe."""
        content = None if body is None else _encoded(body)
        failures, waited = 0, 0.0
        while True:
            try:
                return self._once(method, path, content, headers or {})
            except (OSError, HTTPException, ApiError) as error:
                failures += 1
                pause = _pause(failures, error)
                waited += pause
                if failures > self._retries or waited > self._timeout or not _may_repeat(error, repeatable):
                    self._give_up(error)
            self._sleep(pause)

    def _once(self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]) -> dict[str, Any]:
        connection, response = self._send(method, path, content, headers, self._timeout)
        with closing(connection), closing(response):
            answer = _body(response)
            if not 200 <= response.status < 300:
                raise ApiError(response.status, answer, _retry_after(response))
            return answer

    def _send(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str], timeout: float
    ) -> tuple[HTTPConnection, HTTPResponse]:
        """Send one request on a new connection, and read the response's head. Raises ``OSError``, ``HTTPException``."""
        kind = HTTPSConnection if self._secure else HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        typed = {} if content is None else {"Content-Type": "application/json"}
        try:
            try:
                connection.connect()
            except OSError as error:
                raise _NotConnected(str(error)) from error
            connection.sock.settimeout(timeout)
            with suppress(BrokenPipeError):  # A service that refuses a long body responds before it has read it.
                connection.request(method, self._prefix + path, content, {**self._headers, **typed, **headers})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _give_up(self, error: Exception) -> NoReturn:
        if isinstance(error, ApiError):
            raise error
        raise UnreachableError(f"{self.url}: {error or type(error).__name__}") from error


class _NotConnected(OSError):
    """There was no connection, so the request was not sent."""


def _split(url: str) -> Any:
    try:
        address = urlsplit(url)
        sound = address.port != 0 and address.scheme in ("http", "https") and bool(address.hostname)
    except ValueError:
        sound = False
    if not sound or address.query or address.fragment or "@" in address.netloc or not url.isascii():
        raise OptionError(f"url must look like http://127.0.0.1:8080, without user and query; got {url!r:.100}")
    return address


def _path(job: str) -> str:
    if not job:
        raise OptionError("a job's id must not be empty")
    return f"/v1/jobs/{quote(job, safe='')}"


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"a submission must be JSON, with finite numbers: {error}") from error


def _may_repeat(error: Exception, repeatable: bool) -> bool:
    if isinstance(error, ApiError):
        return error.status in (BUSY if repeatable else NOT_TAKEN)
    return repeatable or isinstance(error, _NotConnected)


def _pause(failures: int, error: Exception | None = None) -> float:
    """Seconds before the next try: longer each time, and random, since many clients may have failed at once."""
    most = min(FIRST_PAUSE * 2.0**failures, LONGEST_PAUSE)
    asked = error.retry_after if isinstance(error, ApiError) else 0.0
    return max(uniform(most / 2, most), min(asked, LONGEST_PAUSE))  # noqa: S311 - no secret


def _body(response: HTTPResponse) -> dict[str, Any]:
    """The response's JSON object; for an error without one, an object that says so."""
    content = response.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise HTTPException(f"a response of more than {MOST_BYTES} bytes")
    try:
        found = json.loads(content) if content else {}
    except ValueError:
        found = None
    if response.status < 300:
        if isinstance(found, dict):
            return found
        raise HTTPException("the response is not a JSON object; is this the address of an asyncpipe service?")
    if not isinstance(found, dict):
        found = {"title": response.reason, "detail": "is this the address of an asyncpipe service?"}
    if 300 <= response.status < 400:
        found["detail"] = "the service redirects, and redirects are not followed; use its own address"
    return found


def _retry_after(response: HTTPResponse) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _problems(found: object) -> list[tuple[str, str]]:
    if not isinstance(found, list):
        return []
    return [(str(row.get("key", "")), str(row.get("text", ""))) for row in found if isinstance(row, dict)]
