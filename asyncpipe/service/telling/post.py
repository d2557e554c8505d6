"""One POST over asyncio, with nothing but the standard library.

A thread could not be ended while it waits for a server that does not answer; a coroutine can be cancelled at any time.
Redirects are not followed: a signed message goes where the operator said.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

__all__ = ["PostAnswer", "post"]

MOST_HEAD = 64 * 1024
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: |\r\n)")
_RETRY_AFTER = re.compile(rb"\r\nretry-after:[ \t]*(\d{1,6})[ \t]*\r\n", re.IGNORECASE)


class PostAnswer(NamedTuple):
    """What a server has answered."""

    status: int
    retry_after: float | None
    """Seconds, if it says when to come again."""


async def post(url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> PostAnswer:
    """Send ``body`` to ``url`` (http or https, the certificate is checked); the whole takes ``seconds`` at most.

    Raises ``OSError`` (``TimeoutError`` included) where the server cannot be reached or gives no answer of HTTP.
    """
    parts = urlsplit(url)
    host, is_secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    context = ssl.create_default_context() if is_secure else None
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=MOST_HEAD)
        try:
            writer.write(_head(parts.netloc.rpartition("@")[2], _path(url), len(body), headers) + body)
            await writer.drain()
            return _answer(await _read_head(reader))
        finally:
            writer.close()
            with suppress(OSError):
                writer.transport.abort()


def _path(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _head(host: str, path: str, length: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", f"content-length: {length}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "user-agent: asyncpipe", "", ""]).encode("ascii")


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """The first lines of the answer, behind those that only say that one will come."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise ConnectionError("the server has closed the connection without an answer") from error
        if not head.startswith(b"HTTP/1.1 1"):
            return head


def _answer(head: bytes) -> PostAnswer:
    status, wait = _STATUS.match(head), _RETRY_AFTER.search(head)
    if status is None:
        raise ConnectionError(f"the answer is not HTTP: {head[:40]!r}")
    return PostAnswer(int(status[1]), None if wait is None else float(wait[1]))
