"""The HTTP handlers of the live view. A file apart from ``server.py``, because it needs aiohttp to be imported.

No request changes anything, so the only danger is that foreign pages read a run's state; ``http_hosts.py`` says how
that is prevented. ``make_app`` serves one feed. ``LiveHandlers`` looks up the feed of each request, so that one
application can have the live pages of many jobs. ``EventStreams`` sends any server-sent events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from importlib import resources

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncpipe.observe.http_hosts import host_name, own_host
from asyncpipe.observe.live.feed import LiveFeed

__all__ = ["FILES", "HEADERS", "EventStreams", "LiveHandlers", "add_files", "add_headers", "make_app"]

FILES = {
    "/": ("live.html", "text/html"),
    "/live.css": ("live.css", "text/css"),
    "/live.js": ("live.js", "text/javascript"),
    "/live_draw.js": ("live_draw.js", "text/javascript"),
}
RETRY = b"retry: 1000\n\n"
"""The milliseconds after which a page reconnects when its connection is lost."""
GOODBYE_SECONDS = 1.0
"""The time that clients have to take the last events before their connections are cut."""
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


class EventStreams:
    """The open event streams of an application."""

    def __init__(self) -> None:
        self._open: set[asyncio.Transport] = set()
        self._left = asyncio.Event()
        """Set when a stream has ended."""

    async def send(self, request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
        """Answer ``request`` with ``events``, until they end or the client has gone."""
        # Without the second header, proxies such as nginx hold events back until they have some kilobytes.
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        connection = request.transport
        if request.method == "HEAD" or connection is None:
            return response
        self._open.add(connection)
        try:
            await response.prepare(request)
            await response.write(RETRY)
            async with aclosing(events):
                async for event in events:
                    await response.write(event)
            await response.write_eof()
        except ConnectionError:
            pass  # The client has gone.
        finally:
            self._open.discard(connection)
            self._left.set()
        return response

    async def close(self) -> None:
        """Wait until all clients have taken the last events of their streams, which have ended by now; cut the rest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                while self._open:
                    self._left.clear()
                    await self._left.wait()
        for connection in list(self._open):
            # The handler waits until its client reads, which the client does not do; this ends the wait.
            connection.abort()


def make_app(feed: LiveFeed, hosts: Iterable[str]) -> web.Application:
    """An application that serves ``feed``, starts it at its own start, and closes it when it shuts down."""

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
    """Serve ``files`` of ``package``: (name, media type) by path, relative to ``below``. The files are read now."""
    for path, (name, kind) in files.items():
        text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
        router.add_get(f"{below}{path.removeprefix('/')}", partial(_file, text, kind))


class LiveHandlers:
    """The handlers that send the state of a run. ``find`` returns the feed that a request asks for, or raises."""

    def __init__(self, find: Callable[[web.Request], Awaitable[LiveFeed]]) -> None:
        self._find = find
        self._streams = EventStreams()

    async def close(self) -> None:
        """Wait until all pages have taken the last message of their feeds, which are closed by now; cut the rest."""
        await self._streams.close()

    async def state(self, request: web.Request) -> web.Response:
        """The newest state, once, as JSON."""
        message = await (await self._find(request)).newest()
        return web.Response(body=message.data, content_type="application/json")

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The newest state and every newer one, as server-sent events."""
        feed = await self._find(request)
        return await self._streams.send(request, feed.follow(request.headers.get("Last-Event-ID")))


async def _file(text: str, kind: str, _: web.Request) -> web.Response:
    return web.Response(text=text, content_type=kind)


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers to ``response``; a handler of an application's ``on_response_prepare``."""
    response.headers.update(HEADERS)


def _guard(hosts: frozenset[str]) -> Middleware:
    """A middleware that refuses requests whose ``Host`` is not this server."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if own_host(request, hosts):
            return await handler(request)
        name = host_name(request.headers.get("Host", ""))
        raise web.HTTPForbidden(text=f"This server is not known as {name[:100]!r}; ask for it by its address.\n")

    return guard
