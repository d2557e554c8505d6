"""What the live view answers over HTTP. Kept apart from ``live.py``, since this cannot be imported without aiohttp.

Nothing here changes anything, so the danger is that foreign pages *read*. A browser lets no foreign page read an
answer without CORS headers, and there are none. What is left is DNS rebinding: a foreign page's own name, made to
point to this machine. Such requests carry that name as their ``Host`` and are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing, suppress
from functools import partial
from importlib import resources
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncpipe.service.live_feed import Feed

__all__ = ["make_app"]

FILES = {
    "/": ("live.html", "text/html"),
    "/live.css": ("live.css", "text/css"),
    "/live.js": ("live.js", "text/javascript"),
    "/live_draw.js": ("live_draw.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
RETRY = b"retry: 1000\n\n"
"""Milliseconds after which a page whose connection broke tries again."""
GOODBYE_SECONDS = 1.0
"""For pages to take the last message; connections of those that do not are cut."""


def make_app(feed: Feed, hosts: Iterable[str]) -> web.Application:
    """The application that serves ``feed``; it starts the feed when it starts, and closes it when it shuts down."""
    view = _View(feed)
    app = web.Application(middlewares=[_guard(frozenset(host.lower() for host in hosts))])
    for path, (name, kind) in FILES.items():
        text = resources.files("asyncpipe.service").joinpath(name).read_text(encoding="utf-8")
        app.router.add_get(path, partial(_file, text, kind))
    app.router.add_get("/state", view.state)
    app.router.add_get("/events", view.events)
    app.on_response_prepare.append(_add_headers)
    app.on_startup.append(view.start)
    app.on_shutdown.append(view.close)
    return app


class _View:
    """The handlers that tell the state of a run."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._open: set[asyncio.Transport] = set()
        self._left = asyncio.Event()
        """Set when a page has left."""

    async def start(self, _: web.Application) -> None:
        self._feed.start()

    async def close(self, _: web.Application) -> None:
        await self._feed.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                while self._open:
                    self._left.clear()
                    await self._left.wait()
        for line in self._open:
            # Its handler waits for room on the line, which will not come: this ends the wait.
            line.abort()

    async def state(self, _: web.Request) -> web.Response:
        message = await self._feed.newest()
        return web.Response(body=message.data, content_type="application/json")

    async def events(self, request: web.Request) -> web.StreamResponse:
        # Proxies such as nginx would gather events until they have some kilobytes.
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        if request.method == "HEAD":
            return response
        line = request.transport
        if line is None:
            return response
        self._open.add(line)
        try:
            await response.prepare(request)
            await response.write(RETRY)
            async with aclosing(self._feed.follow(request.headers.get("Last-Event-ID"))) as events:
                async for event in events:
                    await response.write(event)
            await response.write_eof()
        except ConnectionError:
            # The page was closed.
            pass
        finally:
            self._open.discard(line)
            self._left.set()
        return response


async def _file(text: str, kind: str, _: web.Request) -> web.Response:
    return web.Response(text=text, content_type=kind)


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _guard(hosts: frozenset[str]) -> Middleware:
    """Refuses requests that do not name a host that this server is known under."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        name = _name(request.headers.get("Host", ""))
        if name in hosts or _is_loopback(name) or name == _own_address(request):
            return await handler(request)
        raise web.HTTPForbidden(text=f"This server is not known as {name!r}; ask for it by its address.\n")

    return guard


def _name(host: str) -> str:
    """The name in a ``Host`` header, in lower case, without the port; empty if it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _own_address(request: web.Request) -> str | None:
    """The address that the request came in on, where the server listens on several."""
    own = None if request.transport is None else request.transport.get_extra_info("sockname")
    return own[0] if isinstance(own, tuple) else None
