"""What the live view answers over HTTP. Kept apart from ``server.py``, since this cannot be imported without aiohttp.

Nothing here changes anything, so the danger is that foreign pages *read*: ``http/hosts.py`` says how that is kept from
them. ``make_app`` serves one feed; ``LiveHandlers`` finds the feed of each request, so that one application can have
the live pages of many jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from importlib import resources

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncpipe.observe.http_hosts import host_name, own_host
from asyncpipe.observe.live.feed import LiveFeed

__all__ = ["FILES", "HEADERS", "LiveHandlers", "add_files", "add_headers", "make_app"]

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


def make_app(feed: LiveFeed, hosts: Iterable[str]) -> web.Application:
    """The application that serves ``feed``; it starts the feed when it starts, and closes it when it shuts down."""

    async def find(_: web.Request) -> LiveFeed:
        return feed

    async def start(_: web.Application) -> None:
        feed.start()

    async def close(_: web.Application) -> None:
        await feed.close()
        await handlers.close()

    handlers = LiveHandlers(find)
    app = web.Application(middlewares=[_guard(frozenset(host.lower() for host in hosts))])
    add_files(app.router, "/", "asyncpipe.observe.live", FILES)
    app.router.add_get("/state", handlers.state)
    app.router.add_get("/events", handlers.events)
    app.on_response_prepare.append(add_headers)
    app.on_startup.append(start)
    app.on_shutdown.append(close)
    return app


def add_files(router: web.UrlDispatcher, below: str, package: str, files: Mapping[str, tuple[str, str]]) -> None:
    """Serve ``files`` of ``package``, by their paths ``below``: each a name and a media type. Reads them now."""
    for path, (name, kind) in files.items():
        text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
        router.add_get(f"{below}{path.removeprefix('/')}", partial(_file, text, kind))


class LiveHandlers:
    """The handlers that tell the state of a run: that whose feed ``find`` gives for a request, or raises for it."""

    def __init__(self, find: Callable[[web.Request], Awaitable[LiveFeed]]) -> None:
        self._find = find
        self._open: set[asyncio.Transport] = set()
        self._left = asyncio.Event()
        """Set when a page has left."""

    async def close(self) -> None:
        """Wait until pages have taken the last message, which closing their feeds has sent; cut those that do not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                while self._open:
                    self._left.clear()
                    await self._left.wait()
        for line in self._open:
            # Its handler waits for room on the line, which will not come: this ends the wait.
            line.abort()

    async def state(self, request: web.Request) -> web.Response:
        """The newest state, once, as JSON."""
        message = await (await self._find(request)).newest()
        return web.Response(body=message.data, content_type="application/json")

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The newest state and every newer one, as server-sent events."""
        feed = await self._find(request)
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
            async with aclosing(feed.follow(request.headers.get("Last-Event-ID"))) as events:
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


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Give ``response`` the headers of all answers; for an application's ``on_response_prepare``."""
    response.headers.update(HEADERS)


def _guard(hosts: frozenset[str]) -> Middleware:
    """Refuses requests that do not name a host that this server is known under."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if own_host(request, hosts):
            return await handler(request)
        name = host_name(request.headers.get("Host", ""))
        raise web.HTTPForbidden(text=f"This server is not known as {name[:100]!r}; ask for it by its address.\n")

    return guard
