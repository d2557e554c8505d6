"""A client of the job service for asyncio, which needs httpx: ``JobClient`` with ``await``.

client = AsyncJobClient("http://127.0.0.1:8080", token=...)
job = await client.submit({"name": "charlm", "entry": "charlm:build", "pipeline": {...}, "training": {...}})
async for event in client.events(job["id"]):
    print(event.kind, event.data)
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncpipe.errors import missing_package
from asyncpipe.runtime.thread_calls import wait_to_end
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

__all__ = ["AsyncJobClient"]

_T = TypeVar("_T")


class AsyncJobClient:
    """The jobs of the service at ``url``, as ``JobClient`` has them, for any event loop of asyncio.

    The arguments, methods, results and errors are those of ``JobClient``. A client keeps no connection between calls,
    so it needs no closing. A call that is cancelled closes its connection; what it asked for may have been done.
    Requires httpx; raises ``OptionError`` without.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        retries: int = 5,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        try:
            import httpx  # noqa: F401
        except ImportError as error:
            raise missing_package("AsyncJobClient needs httpx", "client") from error
        self._asking = Asking(url, token, timeout, retries)
        self._calls = JobCalls(self._asking)
        self._sleep = sleep
        # The certificates that JobClient trusts, too; without TLS, none are loaded.
        secure = self._asking.secure
        self._tls = ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    @property
    def url(self) -> str:
        """Where the service is."""
        return self._asking.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # Changing

    async def submit(self, submission: Mapping[str, Any], idempotency_key: str | None = None) -> dict[str, Any]:
        """The new job. Submitting again with the same key returns the same job, even much later.

        Without a key, one is generated for this call, so that repeated requests create one job.
        """
        return await self._one(self._calls.submit(submission, idempotency_key))

    async def pause(self, job: str) -> dict[str, Any]:
        """The job, which is paused after its step, with a snapshot; a queued job is paused at once."""
        return await self._one(self._calls.change(job, "pause"))

    async def resume(self, job: str) -> dict[str, Any]:
        """The job, queued again."""
        return await self._one(self._calls.change(job, "resume"))

    async def cancel(self, job: str) -> dict[str, Any]:
        """The job, which is cancelled between two tasks if it runs, and at once if not."""
        return await self._one(self._calls.change(job, "cancel"))

    async def retry(
        self, job: str, from_step: int | None = None, changes: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The job, which failed, was cancelled or quarantined, queued again.

        It goes on from its newest snapshot, or that of ``from_step``; 0 begins anew. ``changes`` are other values by
        dotted keys, as ``{"training.learning_rate": 1e-4}``.
        """
        return await self._one(self._calls.again(job, "retry", from_step, changes))

    async def fork(
        self, job: str, from_step: int | None = None, changes: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """A new job that goes on from a copy of a snapshot of ``job``, as ``retry`` would; ``job`` stays as it is."""
        return await self._one(self._calls.again(job, "fork", from_step, changes))

    async def delete(self, job: str, *, dry_run: bool = False) -> dict[str, Any]:
        """What was deleted with ``job``, which had ended: ``files``, ``bytes``, ``snapshots``.

        With ``dry_run``, what would be.
        """
        return await self._one(self._calls.delete(job, dry_run))

    async def amend(
        self,
        job: str,
        *,
        priority_class: str | None = None,
        weight: float | None = None,
        tags: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """The job, with another priority class, weight or other tags; what is left out stays."""
        changes = {"priority_class": priority_class, "weight": weight, "tags": None if tags is None else [*tags]}
        return await self._one(self._calls.amend(job, changes))

    async def change_schedule(self, job: str, schedule: str) -> dict[str, Any]:
        """The job, which follows the registered ``schedule`` from its next step on."""
        return await self._one(self._calls.change_schedule(job, schedule))

    async def drain(self, host: str) -> tuple[dict[str, Any], ...]:
        """The workers of ``host``, which jobs leave after their steps, until ``undrain``."""
        return await self._one(self._calls.change_host(host, "drain"))

    async def undrain(self, host: str) -> tuple[dict[str, Any], ...]:
        """The workers of ``host``, which jobs may use again."""
        return await self._one(self._calls.change_host(host, "undrain"))

    # Reading

    async def show(self, job: str) -> dict[str, Any]:
        """The job, with what was submitted as ``document``."""
        return await self._one(self._calls.show(job))

    def list(
        self,
        states: Collection[str] | None = None,
        *,
        limit: int | None = None,
        after: str | None = None,
        **filters: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """The first ``limit`` jobs in any of ``states`` that follow job ``after`` in the list, the newest first.

        ``filters`` are ``entry``, ``tags`` (with all of these), ``text`` (in the name, entry, id, cause or a tag),
        ``since`` (changed then, a Unix time, or later) and ``oldest_first=True``. Requests page by page as the iterator
        advances; jobs may be added and change meanwhile.
        """
        return self._each(self._calls.list(states, limit, after, filters))

    async def history(self, job: str) -> tuple[dict[str, Any], ...]:
        """The job's transitions in their order: ``from``, ``to``, ``at``, ``cause``, ``sequence``."""
        return await self._one(self._calls.history(job))

    def losses(self, job: str, after: int = 0) -> AsyncIterator[dict[str, Any]]:
        """The steps after number ``after``: ``step``, ``loss``, ``learning_rate``, ``seconds``, ``tokens``."""
        return self._each(self._calls.losses(job, after))

    async def entries(self) -> tuple[dict[str, Any], ...]:
        """The entries that jobs may name: ``name``, and ``parameters`` as JSON schema."""
        return await self._one(self._calls.named("entries"))

    async def schedules(self) -> tuple[str, ...]:
        """The schedules that jobs may name."""
        return await self._one(self._calls.named("schedules"))

    async def workers(self) -> tuple[dict[str, Any], ...]:
        """The service's workers (``name``, ``host``, ``up``, ``draining``, ``jobs`` …); none if it has threads."""
        return await self._one(self._calls.named("workers"))

    async def artifacts(self, job: str) -> tuple[dict[str, Any], ...]:
        """What can be downloaded: ``name``, ``media_type``, and where known ``step``, ``size`` and ``sha256``."""
        return await self._one(self._calls.artifacts(job))

    async def download(
        self, job: str, artifact: str = "model.pt", to: str | Path = ".", *, step: int | None = None
    ) -> Path:
        """Download ``artifact`` to the file, or into the folder, ``to``; returns where it is.

        It is whole: it appears under its name when it has the SHA-256 that the service says. What a broken connection,
        a restart of the service or the end of this process leaves half done goes on there when it is called again. A
        model is that of the snapshot after ``step``, by default the newest, also if newer ones are made meanwhile.
        Raises ``DamagedDownloadError``, and ``OSError`` if the disk fails.
        """
        part = PartFile(target_of(to, artifact))
        try:
            await _in_thread(part.find)
            async with aclosing(self._each(self._calls.download(job, artifact, step, part.begun))) as pieces:
                async for piece in pieces:
                    await _in_thread(partial(part.take, piece))
            return await _in_thread(part.finish)
        finally:
            part.close()

    async def wait(self, job: str, timeout: float | None = None) -> dict[str, Any]:  # noqa: ASYNC109 - as JobClient
        """The job, when it has ended. Raises ``WaitTimeoutError`` after ``timeout`` seconds."""
        return await self._one(self._calls.wait(job, timeout))

    def events(self, job: str, after: int = 0) -> AsyncIterator[ServerEvent]:
        """The past events of the job after event ``after``, then new ones as they happen, until the job has ended.

        If the connection breaks or the service restarts, the stream continues after the last event. Steps in between
        are left out (``losses`` has them), nothing else.
        """
        return self._each(self._calls.events(job, after))

    # Carrying it out

    async def _one(self, dialogue: Dialogue[_T]) -> _T:
        async with aclosing(_AsyncCarrier(self._asking, self._tls, self._sleep)) as carrier:
            run = DialogueRun(dialogue)
            while run.action is not None:
                run.answer(await carrier.do(run.action))
            return run.result

    async def _each(self, dialogue: Dialogue[None]) -> AsyncGenerator[Any, None]:
        async with aclosing(_AsyncCarrier(self._asking, self._tls, self._sleep)) as carrier:
            run = DialogueRun(dialogue)
            while run.action is not None:
                if isinstance(run.action, Found):
                    yield run.action.value
                    run.answer(None)
                else:
                    run.answer(await carrier.do(run.action))


class _AsyncCarrier:
    """Carries out the actions of one call, with a connection for each request."""

    def __init__(self, asking: Asking, tls: ssl.SSLContext, sleep: Callable[[float], Awaitable[object]]) -> None:
        self._asking = asking
        self._tls = tls
        self._sleep = sleep
        self._opened = AsyncExitStack()
        self._content: AsyncIterator[bytes] | None = None

    async def do(self, action: Action) -> object:
        """What ``action`` comes to; a ``BrokenExchange`` is returned, not raised."""
        import httpx

        try:
            match action:
                case MoreBytes():
                    return b"" if self._content is None else await anext(self._content, b"")
                case HttpRequest():
                    await self.aclose()
                    return await self._open(action)
                case Pause(seconds):
                    await self.aclose()
                    await self._sleep(seconds)
                case _:
                    await self.aclose()
        except httpx.TransportError as error:
            sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            found = BrokenExchange(_cause(error), sent=sent)
            found.__cause__ = error
            return found
        return None

    async def aclose(self) -> None:
        """Close the response and its connection."""
        self._content = None
        await self._opened.aclose()

    async def _open(self, request: HttpRequest) -> ResponseHead:
        import httpx

        asking = self._asking
        # Of its own for each request, so that none meets a connection that the service has closed meanwhile.
        transport = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)
        await self._opened.enter_async_context(transport)
        seconds = {"connect": asking.timeout, "read": request.patience, "write": request.patience, "pool": None}
        host = f"[{asking.host}]" if ":" in asking.host else asking.host
        scheme, port = ("https" if asking.secure else "http"), ("" if asking.port is None else f":{asking.port}")
        response = await transport.handle_async_request(
            httpx.Request(
                request.method,
                f"{scheme}://{host}{port}{request.path}",
                headers={**request.headers, "Accept-Encoding": "identity"},
                content=request.content,
                extensions={"timeout": seconds},
            )
        )
        self._opened.push_async_callback(response.aclose)
        self._content = response.aiter_raw()
        return ResponseHead(response.status_code, response.reason_phrase, dict(response.headers.items()))


async def _in_thread(function: Callable[[], _T]) -> _T:
    """What ``function`` returns, called in a thread; a cancellation is raised when it has returned."""
    return await wait_to_end(asyncio.get_running_loop().run_in_executor(None, function))


def _cause(error: BaseException) -> str:
    """What the system says about the failure, where it does; httpx's own words say less."""
    text, link = str(error) or type(error).__name__, error.__cause__ or error.__context__
    while link is not None:
        if isinstance(link, ssl.SSLError | socket.gaierror):
            return str(link)
        if isinstance(link, OSError) and link.errno is not None:
            return f"[Errno {link.errno}] {os.strerror(link.errno)}"
        link = link.__cause__ or link.__context__
    return text
