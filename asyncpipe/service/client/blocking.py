"""A client of the job service that needs only the standard library.

    client = JobClient("http://127.0.0.1:8080", token=...)
    job = client.submit({"name": "charlm", "entry": "charlm:build", "pipeline": {...}, "training": {...}})
    for event in client.events(job["id"]):
        print(event.kind, event.data)

Requests go to the host of the URL only: redirects and proxies of the environment are not followed, and the token is
sent in a header only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, TypeVar

from asyncpipe.service.client.asking import Asking
from asyncpipe.service.client.calls import JobCalls
from asyncpipe.service.client.dialogue import (
    Action,
    BrokenExchange,
    Dialogue,
    DialogueRun,
    Found,
    HttpRequest,
    MoreBytes,
    Pause,
    ResponseHead,
)
from asyncpipe.service.client.downloads import PartFile, target_of
from asyncpipe.service.client.events import ServerEvent

__all__ = ["JobClient"]

_T = TypeVar("_T")

CHUNK = 1024 * 1024
"""The most bytes that are read at once."""


class JobClient:
    """The jobs of the service at ``url``, such as ``http://127.0.0.1:8080`` or where an application has mounted it.

    ``token`` is the service's, if it has one. ``timeout`` in seconds limits connecting, each wait for bytes, and all
    pauses together; ``retries`` limits how often a request is repeated. Any number of threads may use a client: each
    call has its own connection. Jobs and other responses are dicts of the service's JSON.

    A request that is safe to repeat is repeated if the service cannot be reached, restarts or is busy. Every method
    raises ``ApiError`` if the service refuses, ``UnreachableError`` if it cannot be reached.
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
        self._asking = Asking(url, token, timeout, retries)
        self._calls = JobCalls(self._asking)
        self._sleep = sleep

    @property
    def url(self) -> str:
        """Where the service is."""
        return self._asking.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # Changing

    def submit(self, submission: Mapping[str, Any], idempotency_key: str | None = None) -> dict[str, Any]:
        """The new job. Submitting again with the same key returns the same job, even much later.

        Without a key, one is generated for this call, so that repeated requests create one job.
        """
        return self._one(self._calls.submit(submission, idempotency_key))

    def pause(self, job: str) -> dict[str, Any]:
        """The job, which is paused after its step, with a snapshot; a queued job is paused at once."""
        return self._one(self._calls.change(job, "pause"))

    def resume(self, job: str) -> dict[str, Any]:
        """The job, queued again."""
        return self._one(self._calls.change(job, "resume"))

    def cancel(self, job: str) -> dict[str, Any]:
        """The job, which is cancelled between two tasks if it runs, and at once if not."""
        return self._one(self._calls.change(job, "cancel"))

    def retry(self, job: str, from_step: int | None = None, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The job, which failed, was cancelled or quarantined, queued again.

        It goes on from its newest snapshot, or that of ``from_step``; 0 begins anew. ``changes`` are other values by
        dotted keys, as ``{"training.learning_rate": 1e-4}``.
        """
        return self._one(self._calls.again(job, "retry", from_step, changes))

    def fork(self, job: str, from_step: int | None = None, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A new job that goes on from a copy of a snapshot of ``job``, as ``retry`` would; ``job`` stays as it is."""
        return self._one(self._calls.again(job, "fork", from_step, changes))

    def delete(self, job: str, *, dry_run: bool = False) -> dict[str, Any]:
        """What was deleted with ``job``, which had ended: ``files``, ``bytes``, ``snapshots``.

        With ``dry_run``, what would be.
        """
        return self._one(self._calls.delete(job, dry_run))

    def amend(
        self,
        job: str,
        *,
        priority_class: str | None = None,
        weight: float | None = None,
        tags: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """The job, with another priority class, weight or other tags; what is left out stays."""
        changes = {"priority_class": priority_class, "weight": weight, "tags": None if tags is None else [*tags]}
        return self._one(self._calls.amend(job, changes))

    def change_schedule(self, job: str, schedule: str) -> dict[str, Any]:
        """The job, which follows the registered ``schedule`` from its next step on."""
        return self._one(self._calls.change_schedule(job, schedule))

    def drain(self, host: str) -> tuple[dict[str, Any], ...]:
        """The workers of ``host``, which jobs leave after their steps, until ``undrain``."""
        return self._one(self._calls.change_host(host, "drain"))

    def undrain(self, host: str) -> tuple[dict[str, Any], ...]:
        """The workers of ``host``, which jobs may use again."""
        return self._one(self._calls.change_host(host, "undrain"))

    # Reading

    def show(self, job: str) -> dict[str, Any]:
        """The job, with what was submitted as ``document``."""
        return self._one(self._calls.show(job))

    def list(
        self,
        states: Collection[str] | None = None,
        *,
        limit: int | None = None,
        after: str | None = None,
        **filters: Any,
    ) -> Iterator[dict[str, Any]]:
        """The first ``limit`` jobs in any of ``states`` that follow job ``after`` in the list, the newest first.

        ``filters`` are ``entry``, ``tags`` (with all of these), ``text`` (in the name, entry, id, cause or a tag),
        ``since`` (changed then, a Unix time, or later) and ``oldest_first=True``. Requests page by page as the iterator
        advances; jobs may be added and change meanwhile.
        """
        return self._each(self._calls.list(states, limit, after, filters))

    def history(self, job: str) -> tuple[dict[str, Any], ...]:
        """The job's transitions in their order: ``from``, ``to``, ``at``, ``cause``, ``sequence``."""
        return self._one(self._calls.history(job))

    def losses(self, job: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """The steps after number ``after``: ``step``, ``loss``, ``learning_rate``, ``seconds``, ``tokens``."""
        return self._each(self._calls.losses(job, after))

    def entries(self) -> tuple[dict[str, Any], ...]:
        """The entries that jobs may name: ``name``, and ``parameters`` as JSON schema."""
        return self._one(self._calls.named("entries"))

    def schedules(self) -> tuple[str, ...]:
        """The schedules that jobs may name."""
        return self._one(self._calls.named("schedules"))

    def workers(self) -> tuple[dict[str, Any], ...]:
        """The service's workers (``name``, ``host``, ``up``, ``draining``, ``jobs`` …); none if it has threads."""
        return self._one(self._calls.named("workers"))

    def artifacts(self, job: str) -> tuple[dict[str, Any], ...]:
        """What can be downloaded: ``name``, ``media_type``, and where known ``step``, ``size`` and ``sha256``."""
        return self._one(self._calls.artifacts(job))

    def download(self, job: str, artifact: str = "model.pt", to: str | Path = ".", *, step: int | None = None) -> Path:
        """Download ``artifact`` to the file, or into the folder, ``to``; returns where it is.

        It is whole: it appears under its name when it has the SHA-256 that the service says. What a broken connection,
        a restart of the service or the end of this process leaves half done goes on there when it is called again. A
        model is that of the snapshot after ``step``, by default the newest, also if newer ones are made meanwhile.
        Raises ``DamagedDownloadError``, and ``OSError`` if the disk fails.
        """
        with PartFile(target_of(to, artifact)) as part:
            for piece in self._each(self._calls.download(job, artifact, step, part.begun)):
                part.take(piece)
            return part.finish()

    def wait(self, job: str, timeout: float | None = None) -> dict[str, Any]:
        """The job, when it has ended. Raises ``WaitTimeoutError`` after ``timeout`` seconds."""
        return self._one(self._calls.wait(job, timeout))

    def events(self, job: str, after: int = 0) -> Iterator[ServerEvent]:
        """The past events of the job after event ``after``, then new ones as they happen, until the job has ended.

        If the connection breaks or the service restarts, the stream continues after the last event. Steps in between
        are left out (``losses`` has them), nothing else.
        """
        return self._each(self._calls.events(job, after))

    # Carrying it out

    def _one(self, dialogue: Dialogue[_T]) -> _T:
        with closing(_BlockingCarrier(self._asking, self._sleep)) as carrier:
            run = DialogueRun(dialogue)
            while run.action is not None:
                run.answer(carrier.do(run.action))
            return run.result

    def _each(self, dialogue: Dialogue[None]) -> Iterator[Any]:
        with closing(_BlockingCarrier(self._asking, self._sleep)) as carrier:
            run = DialogueRun(dialogue)
            while run.action is not None:
                if isinstance(run.action, Found):
                    yield run.action.value
                    run.answer(None)
                else:
                    run.answer(carrier.do(run.action))


class _BlockingCarrier:
    """Carries out the actions of one call, with a connection for each request."""

    def __init__(self, asking: Asking, sleep: Callable[[float], object]) -> None:
        self._asking = asking
        self._sleep = sleep
        self._connection: HTTPConnection | None = None
        self._response: HTTPResponse | None = None

    def do(self, action: Action) -> object:
        """What ``action`` comes to; a ``BrokenExchange`` is returned, not raised."""
        try:
            match action:
                case MoreBytes():
                    return b"" if self._response is None else self._response.read1(CHUNK)
                case HttpRequest():
                    self.close()
                    return self._open(action)
                case Pause(seconds):
                    self.close()
                    self._sleep(seconds)
                case _:
                    self.close()
        except BrokenExchange as error:
            return error
        except (OSError, HTTPException) as error:
            return _broken(error)
        return None

    def close(self) -> None:
        """Close the response and its connection."""
        response, connection = self._response, self._connection
        self._response = self._connection = None
        for thing in (response, connection):
            if thing is not None:
                thing.close()

    def _open(self, request: HttpRequest) -> ResponseHead:
        asking = self._asking
        kind = HTTPSConnection if asking.secure else HTTPConnection
        connection = self._connection = kind(asking.host, asking.port, timeout=asking.timeout)
        try:
            connection.connect()
        except OSError as error:
            raise _broken(error, sent=False) from error
        connection.sock.settimeout(request.patience)
        with suppress(BrokenPipeError):  # A service that refuses a long body responds before it has read it.
            connection.request(request.method, request.path, request.content, dict(request.headers))
        response = self._response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return ResponseHead(response.status, response.reason, headers)


def _broken(error: Exception, *, sent: bool = True) -> BrokenExchange:
    found = BrokenExchange(str(error) or type(error).__name__, sent=sent)
    found.__cause__ = error
    return found
