"""One request to the service, repeated where that may help and is safe::

    request                     no connection    connection lost     429, 502, 503, 504    other errors
    submit (with its key)       repeated         repeated            repeated              raised
    reading                     repeated         repeated            repeated              raised
    pause, resume, cancel …     repeated         raised              repeated if 429, 503  raised

Pauses grow, requests are repeated a limited number of times, and all pauses of a call together are no longer than its
timeout.

Everything is written once, as coroutines over a ``Wire``, of which each client has its own (``clients.py``): that of
the blocking client blocks in its methods, so its coroutines run to their ends without a loop.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from random import uniform
from typing import Any, Protocol, TypeVar

import httpx

from asyncpipe.errors import OptionError
from asyncpipe.service.client.errors import ApiError, UnreachableError
from asyncpipe.service.settings.token_file import check_token

__all__ = ["Asking", "BrokenExchange", "Repeating", "Wire", "refusal"]

_T = TypeVar("_T")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before a request is repeated, at first and at most."""
BUSY = frozenset({429, 502, 503, 504})
NOT_TAKEN = frozenset({429, 503})
"""Statuses of requests that had no effect."""
NO_SERVICE = "is this the address of an asyncpipe service?"


class Wire(Protocol):
    """What a client sends, waits and works with."""

    def open(self, request: httpx.Request) -> AbstractAsyncContextManager[tuple[httpx.Response, AsyncIterator[bytes]]]:
        """The response to ``request`` and the bytes of its body, on a connection of its own."""

    async def sleep(self, seconds: float) -> object:
        """Do nothing for so long."""

    async def work(self, function: Callable[[], _T]) -> _T:
        """What ``function``, which blocks, returns."""


class BrokenExchange(Exception):
    """The response is incomplete, or is not one of a service."""


class Asking:
    """Asks the service at ``url``; ``timeout`` in seconds, ``retries`` of a request. Any thread may use it."""

    def __init__(self, wire: Wire, url: str, token: str | None, timeout: float, retries: int) -> None:
        """Raises ``OptionError`` for an address or a token that cannot be one."""
        _check_url(url)
        self.wire = wire
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.retries = retries
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "asyncpipe"}
        if token is not None:
            try:
                self._headers["Authorization"] = f"Bearer {check_token(token)}"
            except ValueError as error:
                raise OptionError(f"token: {error}") from None

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        patience: float | None = None,
    ) -> httpx.Request:
        """The request, which waits at most ``patience`` seconds for each part of its response."""
        timeout = httpx.Timeout(self.timeout, read=patience or self.timeout).as_dict()
        try:
            return httpx.Request(
                method,
                self.url + path,
                params=list(query) or None,
                json=body,
                headers={**self._headers, **(headers or {})},
                extensions={"timeout": timeout},
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"a submission must be JSON, with finite numbers: {error}") from error

    async def ask(self, method: str, path: str, *, repeatable: bool = False, **options: Any) -> dict[str, Any]:
        """The JSON of the response. ``repeatable``: doing it twice is doing it once. ``options`` as of ``request``."""
        request, repeating = self.request(method, path, **options), Repeating(self, repeatable=repeatable)
        while True:
            try:
                async with self.wire.open(request) as (response, content):
                    if not response.is_success:
                        raise await refusal(response, content)
                    if (found := await _read(content)) is None:
                        raise BrokenExchange(f"the response is not a JSON object; {NO_SERVICE}")
                    return found
            except (httpx.TransportError, BrokenExchange, ApiError) as error:
                await repeating.after(error)


class Repeating:
    """How often one call has failed in a row, and whether its request is sent again."""

    def __init__(self, asking: Asking, *, repeatable: bool = True) -> None:
        self._asking = asking
        self._repeatable = repeatable
        self._failures = 0
        self._waited = 0.0

    def progressed(self) -> None:
        """Something has come: the next failure is the first one."""
        self._failures, self._waited = 0, 0.0

    async def after(self, error: httpx.TransportError | BrokenExchange | ApiError) -> None:
        """Wait until the request may be repeated after ``error``. Raises what the caller is told if it may not."""
        self._failures += 1
        # Longer each time, and random, since many clients may have failed at once.
        most = min(FIRST_PAUSE * 2.0**self._failures, LONGEST_PAUSE)
        asked = error.retry_after if isinstance(error, ApiError) else 0.0
        pause = max(uniform(most / 2, most), min(asked, LONGEST_PAUSE))  # noqa: S311 - no secret
        self._waited += pause
        if self._failures > self._asking.retries or self._waited > self._asking.timeout or not self._may(error):
            if isinstance(error, ApiError):
                raise error
            raise UnreachableError(f"{self._asking.url}: {str(error) or type(error).__name__}") from error
        await self._asking.wire.sleep(pause)

    def _may(self, error: Exception) -> bool:
        if isinstance(error, ApiError):
            return error.status in (BUSY if self._repeatable else NOT_TAKEN)
        return self._repeatable or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


async def refusal(response: httpx.Response, content: AsyncIterator[bytes]) -> ApiError:
    """The error that ``response`` tells of."""
    found = await _read(content) or {"title": response.reason_phrase, "detail": NO_SERVICE}
    if response.is_redirect:
        found["detail"] = "the service redirects, and redirects are not followed; use its own address"
    wait = response.headers.get("retry-after", "")
    return ApiError(response.status_code, found, float(wait) if wait.isascii() and wait.isdigit() else 0.0)


async def _read(content: AsyncIterator[bytes]) -> dict[str, Any] | None:
    """The JSON object in ``content``; ``None`` for anything else."""
    try:
        found = json.loads(b"".join([chunk async for chunk in content]))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _check_url(url: str) -> None:
    try:
        address = httpx.URL(url)
        is_sound = address.scheme in ("http", "https") and bool(address.host) and 0 < (address.port or 80) < 2**16
    except httpx.InvalidURL:
        is_sound = False
    if not is_sound or address.query or address.fragment or address.userinfo or not url.isascii():
        raise OptionError(f"url must look like http://127.0.0.1:8080, without user and query; got {url!r:.100}")
