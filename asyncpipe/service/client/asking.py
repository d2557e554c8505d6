"""One request to the service, repeated where that may help and is safe::

    request                     no connection    connection lost     429, 502, 503, 504    other errors
    submit (with its key)       repeated         repeated            repeated              raised
    reading                     repeated         repeated            repeated              raised
    pause, resume, cancel …     repeated         raised              repeated if 429, 503  raised

Pauses grow, requests are repeated a limited number of times, and all pauses of a call together are no longer than its
timeout. Pure: clients carry it out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from random import uniform
from typing import Any, NoReturn
from urllib.parse import urlencode, urlsplit

from asyncpipe.errors import OptionError
from asyncpipe.service.client.dialogue import (
    BrokenExchange,
    Dialogue,
    HttpRequest,
    Pause,
    ResponseHead,
    hang_up,
    more_bytes,
    open_response,
)
from asyncpipe.service.client.errors import ApiError, UnreachableError
from asyncpipe.service.settings.token_file import check_token

__all__ = ["Asking", "read_refusal"]

MOST_BYTES = 64 * 1024 * 1024
"""The most bytes of a response; the service's are far smaller."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before a request is repeated, at first and at most."""
BUSY = frozenset({429, 502, 503, 504})
NOT_TAKEN = frozenset({429, 503})
"""Statuses of requests that had no effect."""


class Asking:
    """Asks the service at ``url``; ``timeout`` in seconds, ``retries`` of a request. Any thread may use it."""

    def __init__(self, url: str, token: str | None, timeout: float, retries: int) -> None:
        """Raises ``OptionError`` for an address or a token that cannot be one."""
        address = _split(url)
        self.url = url.rstrip("/")
        self.secure = address.scheme == "https"
        self.host: str = address.hostname or ""
        self.port: int | None = address.port
        self.timeout = timeout
        self._prefix = address.path.rstrip("/")
        self._retries = retries
        self._headers = {"Accept": "application/json", "User-Agent": "asyncpipe"}
        if token is not None:
            try:
                self._headers["Authorization"] = f"Bearer {check_token(token)}"
            except ValueError as error:
                raise OptionError(f"token: {error}") from None

    def get(self, path: str, query: Collection[tuple[str, str]] = ()) -> Dialogue[dict[str, Any]]:
        """What the service says at ``path``."""
        return self.ask("GET", f"{path}?{urlencode(list(query))}" if query else path, None, repeatable=True)

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None = None,
        *,
        repeatable: bool = False,
    ) -> Dialogue[dict[str, Any]]:
        """The JSON of the response. ``repeatable``: doing it twice is doing it once."""
        request = self.request(method, path, headers or {}, body=body)
        failures, waited = 0, 0.0
        while True:
            try:
                head = yield from open_response(request)
                if not 200 <= head.status < 300:
                    raise (yield from read_refusal(head))
                return _parsed(head, (yield from _read_whole(head)))
            except (BrokenExchange, ApiError) as error:
                failures += 1
                pause = self.pause_after(failures, error, repeatable=repeatable)
                waited += pause
                if waited > self.timeout:
                    self.give_up(error)
            yield Pause(pause)

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        body: Mapping[str, Any] | None = None,
        patience: float | None = None,
    ) -> HttpRequest:
        """The request, with all headers and the path below which the service is mounted."""
        content = None if body is None else _encoded(body)
        typed = {} if content is None else {"Content-Type": "application/json"}
        together = {**self._headers, **typed, **headers}
        return HttpRequest(method, self._prefix + path, together, content, patience or self.timeout)

    def pause_after(self, failures: int, error: BrokenExchange | ApiError, *, repeatable: bool = True) -> float:
        """Seconds to wait before the request is repeated, after ``failures`` in a row. Gives up where it may not be."""
        if failures > self._retries or not _may_repeat(error, repeatable):
            self.give_up(error)
        # Longer each time, and random, since many clients may have failed at once.
        most = min(FIRST_PAUSE * 2.0**failures, LONGEST_PAUSE)
        asked = error.retry_after if isinstance(error, ApiError) else 0.0
        return max(uniform(most / 2, most), min(asked, LONGEST_PAUSE))  # noqa: S311 - no secret

    def give_up(self, error: BrokenExchange | ApiError) -> NoReturn:
        """Raise what the caller is told of ``error``."""
        if isinstance(error, ApiError):
            raise error
        raise UnreachableError(f"{self.url}: {error}") from (error.__cause__ or error)


def read_refusal(head: ResponseHead) -> Dialogue[ApiError]:
    """The error that a response with ``head`` tells of."""
    content = yield from _read_whole(head)
    try:
        found = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        found = {"title": head.reason, "detail": "is this the address of an asyncpipe service?"}
    if 300 <= head.status < 400:
        found["detail"] = "the service redirects, and redirects are not followed; use its own address"
    return ApiError(head.status, found, float(head.number("retry-after") or 0))


def _read_whole(head: ResponseHead) -> Dialogue[bytes]:
    chunks, size = list[bytes](), 0
    while chunk := (yield from more_bytes()):
        chunks.append(chunk)
        size += len(chunk)
        if size > MOST_BYTES:
            raise BrokenExchange(f"a response of more than {MOST_BYTES} bytes")
    yield from hang_up()
    if size < (head.number("content-length") or 0):
        raise BrokenExchange(f"the response ended after {size} bytes")
    return b"".join(chunks)


def _parsed(head: ResponseHead, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    raise BrokenExchange("the response is not a JSON object; is this the address of an asyncpipe service?")


def _may_repeat(error: BrokenExchange | ApiError, repeatable: bool) -> bool:
    if isinstance(error, ApiError):
        return error.status in (BUSY if repeatable else NOT_TAKEN)
    return repeatable or not error.sent


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"a submission must be JSON, with finite numbers: {error}") from error


def _split(url: str) -> Any:
    try:
        address = urlsplit(url)
        sound = address.port != 0 and address.scheme in ("http", "https") and bool(address.hostname)
    except ValueError:
        sound = False
    if not sound or address.query or address.fragment or "@" in address.netloc or not url.isascii():
        raise OptionError(f"url must look like http://127.0.0.1:8080, without user and query; got {url!r:.100}")
    return address
