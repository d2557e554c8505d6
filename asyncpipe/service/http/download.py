"""The answer that sends an artifact, or a range of it: some bytes at a time, as fast as the client reads.

::

    open ─▶ which bytes (ranges.py) ─▶ 200, 206: head ─▶ read in a thread ─▶ send ─▶ read …     one piece in memory
                                   └─▶ 304, 412, 416                    └─ returns when the client has taken it

What is sent is one open artifact, which does not change; its SHA-256 is its entity tag. The end of a response that is
cut off is noticed by its ``Content-Length``, and asked for by ``Range`` with ``If-Range``.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from asyncpipe.observe.live.event_streams import UNREAD_SECONDS, until_gone
from asyncpipe.service.http.problems import Problem
from asyncpipe.service.http.ranges import Selection, select_bytes
from asyncpipe.service.jobs.artifacts import ArtifactError, OpenArtifact
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["ArtifactDownload"]

_logger = logging.getLogger("asyncpipe.service.http")

PIECE = 256 * 1024
"""Bytes that are read at once."""


class ArtifactDownload(Response):
    """Answers with what ``opening`` gives, or the range of it that is asked for; ``held`` is entered meanwhile.

    ``label`` begins the name under which browsers save it. What ``opening`` and ``held`` raise comes when it is sent.
    """

    def __init__(
        self, opening: Callable[[], Awaitable[OpenArtifact]], label: str, held: AbstractContextManager[None]
    ) -> None:
        super().__init__()
        self._opening = opening
        self._label = label
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self._held:
            artifact = await self._opening()
            try:
                await self._answer(artifact, scope, receive, send)
            finally:
                artifact.close()

    async def _answer(self, artifact: OpenArtifact, scope: Scope, receive: Receive, send: Send) -> None:
        request, tag, size = Request(scope), f'"{artifact.sha256}"', artifact.size
        is_get = scope["method"] == "GET"
        found = select_bytes(request.headers, tag, size, ranges=is_get)
        headers = {"ETag": tag, "Accept-Ranges": "bytes"}
        if found.status == 412:
            raise Problem(412, "changed", "the artifact is another one now", headers=[("ETag", tag)])
        if found.status == 416:
            detail = f"the artifact has {size} bytes, and the range begins behind them"
            where = [("Content-Range", found.content_range(size) or ""), ("ETag", tag)]
            raise Problem(416, "range", detail, headers=where)
        if found.status != 304:
            headers |= _about(artifact, found, self._label)
        await send({"type": "http.response.start", "status": found.status, "headers": _raw(headers)})
        if is_get and found.end > found.first:
            await until_gone(receive, _send(artifact, found, send))
        else:
            await send({"type": "http.response.body", "body": b""})


def _about(artifact: OpenArtifact, found: Selection, label: str) -> dict[str, str]:
    digest = base64.b64encode(bytes.fromhex(artifact.sha256)).decode()
    about = {
        "Content-Type": artifact.media_type,
        "Content-Length": str(found.end - found.first),
        "Content-Disposition": f'attachment; filename="{label}-{artifact.name}"',
        "Repr-Digest": f"sha-256=:{digest}:",
    }
    if (part := found.content_range(artifact.size)) is not None:
        about["Content-Range"] = part
    if artifact.step is not None:  # Where this one stays, when there is a newer one.
        about["Content-Location"] = f"{artifact.name}?step={artifact.step}"
    return about


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def _send(artifact: OpenArtifact, found: Selection, send: Send) -> None:
    offset = found.first
    while offset < found.end:
        try:
            piece = await in_thread(partial(artifact.read, offset, min(PIECE, found.end - offset)))
        except ArtifactError as error:
            _logger.error("a download ends too early, which the client sees: %s", error)
            return
        offset += len(piece)
        async with asyncio.timeout(UNREAD_SECONDS):
            await send({"type": "http.response.body", "body": piece, "more_body": offset < found.end})
