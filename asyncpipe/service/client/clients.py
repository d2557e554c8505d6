"""The clients of the job service, which carry out its calls with httpx: one blocks, the other is for asyncio.

    client = JobClient("http://127.0.0.1:8080", token=...)
    job = client.submit({"name": "charlm", "entry": "charlm:build", "pipeline": {...}, "training": {...}})
    for event in client.events(job["id"]):
        print(event.kind, event.data)

Requests go to the host of the URL only: redirects and proxies of the environment are not followed, and the token is
sent in a header only.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar

import httpx

from asyncpipe.errors import OptionError
from asyncpipe.runtime.thread_calls import wait_to_end
from asyncpipe.service.client.calls import JobCalls
from asyncpipe.service.client.events import ServerEvent

__all__ = ["AsyncJobClient", "JobClient"]

_T = TypeVar("_T")
_Row = dict[str, Any]


class JobClient(JobCalls[_Row, tuple[Any, ...], Iterator[_Row], Iterator[ServerEvent], Path]):
    """The jobs of the service at ``url``, such as ``http://127.0.0.1:8080`` or where an application has mounted it.

    ``token`` is the service's, if it has one. ``timeout`` in seconds limits connecting, each wait for bytes, and all
    pauses together; ``retries`` limits how often a request is repeated. Any number of threads may use a client: each
    request has its own connection, so a client needs no closing. Jobs and other responses are dicts of the service's
    JSON.

    A request that is safe to repeat is repeated if the service cannot be reached, restarts or is busy. Every method
    raises ``ApiError`` if the service refuses, ``UnreachableError`` if it cannot be reached.
    """

    @staticmethod
    def _wire(url: str, sleep: Callable[[float], Any] | None, authority: str | Path | None) -> _BlockingWire:
        return _BlockingWire(url, sleep or time.sleep, authority)

    def _one(self, call: Coroutine[Any, Any, _T]) -> _T:
        return _run(call)

    def _many(self, call: AsyncGenerator[_T, None]) -> Iterator[_T]:
        try:
            while True:
                yield _run(anext(call))
        except StopAsyncIteration:
            pass
        finally:
            _run(call.aclose())


class AsyncJobClient(
    JobCalls[
        Coroutine[Any, Any, _Row],
        Coroutine[Any, Any, tuple[Any, ...]],
        AsyncIterator[_Row],
        AsyncIterator[ServerEvent],
        Coroutine[Any, Any, Path],
    ]
):
    """The jobs of the service at ``url``, as ``JobClient`` has them, for any event loop of asyncio.

    The arguments, methods and errors are those of ``JobClient``; what it returns is awaited here, and its iterators are
    asynchronous. A call that is cancelled closes its connection; what it asked for may have been done.
    """

    @staticmethod
    def _wire(url: str, sleep: Callable[[float], Any] | None, authority: str | Path | None) -> _AsyncWire:
        return _AsyncWire(url, sleep or asyncio.sleep, authority)

    def _one(self, call: Coroutine[Any, Any, _T]) -> Coroutine[Any, Any, _T]:
        return call

    def _many(self, call: AsyncGenerator[_T, None]) -> AsyncIterator[_T]:
        return call


# Each request has a transport of its own, so that none meets a connection that the service has closed meanwhile. And it
# has no client of httpx, since redirects, proxies and cookies are not followed.


class _BlockingWire:
    """Coroutines over this one never wait: they block."""

    def __init__(self, url: str, sleep: Callable[[float], object], authority: str | Path | None) -> None:
        self._tls = _certificates(url, authority)
        self._sleep = sleep

    @asynccontextmanager
    async def open(self, request: httpx.Request) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
        with (
            httpx.HTTPTransport(verify=self._tls, trust_env=False) as transport,
            closing(transport.handle_request(request)) as response,
        ):
            yield response, _each(response.iter_raw())

    async def sleep(self, seconds: float) -> object:
        return self._sleep(seconds)

    async def work(self, function: Callable[[], _T]) -> _T:
        return function()


class _AsyncWire:
    def __init__(self, url: str, sleep: Callable[[float], Awaitable[object]], authority: str | Path | None) -> None:
        self._tls = _certificates(url, authority)
        self._sleep = sleep

    @asynccontextmanager
    async def open(self, request: httpx.Request) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
        async with (
            httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False) as transport,
            aclosing(await transport.handle_async_request(request)) as response,
        ):
            yield response, response.aiter_raw()

    async def sleep(self, seconds: float) -> object:
        return await self._sleep(seconds)

    async def work(self, function: Callable[[], _T]) -> _T:
        # A cancellation is raised when the function has returned.
        return await wait_to_end(asyncio.get_running_loop().run_in_executor(None, function))


def _run(call: Awaitable[_T]) -> _T:
    """The result of ``call``, which waits for nothing."""
    try:
        call.__await__().send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    raise AssertionError("a blocking client has waited for a loop")


async def _each(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def _certificates(url: str, authority: str | Path | None) -> ssl.SSLContext | bool:
    """The certificates that ``authority`` signs, or else the system trusts; without TLS, none are loaded."""
    if not url.startswith("https"):
        return False
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise OptionError(f"authority: {authority} cannot be used: {error}") from error
