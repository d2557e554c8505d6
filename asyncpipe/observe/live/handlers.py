"""The HTTP handlers of the live view. A file apart from ``server.py``, because it needs starlette to be imported.

No request changes anything, so the only danger is that foreign pages read a run's state; ``http_hosts.py`` says how
that is prevented.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncpipe.observe.http_hosts import host_name, own_host
from asyncpipe.observe.live.event_streams import EventStream, until
from asyncpipe.observe.live.feed import LiveFeed

__all__ = ["FILES", "HEADERS", "SecurityHeaders", "file_route", "file_routes", "file_text", "make_app"]

FILES = {
    "/": ("live.html", "text/html"),
    **{f"/{name}": (name, "text/css") for name in ("page.css", "live.css", "vendor/uPlot.min.css")},
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in ("live", "charts", "timeline", "text")},
    "/vendor/uPlot.iife.min.js": ("vendor/uPlot.iife.min.js", "text/javascript"),
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


class SecurityHeaders:
    """Middleware that adds ``HEADERS`` to each answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_more if scope["type"] == "http" else send)


class OwnHosts:
    """Middleware that refuses requests whose ``Host`` is not this server."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        request = HTTPConnection(scope) if scope["type"] in ("http", "websocket") else None
        if request is None or own_host(request, self._hosts):
            await self._app(scope, receive, send)
            return
        name = host_name(request.headers.get("Host", ""))
        text = f"This server is not known as {name[:100]!r}; ask for it by its address.\n"
        await PlainTextResponse(text, status_code=403)(scope, receive, send)


def make_app(feed: LiveFeed, hosts: Iterable[str]) -> Starlette:
    """An application that serves ``feed``; the first request starts it, and the end of its lifespan closes it."""

    # Not in the lifespan alone, since an application below another's path has none unless the other enters it.
    async def state(_: Request) -> Response:
        """The newest state, once, as JSON."""
        feed.start()
        return Response((await feed.newest()).data, media_type="application/json")

    async def events(request: Request) -> EventStream:
        """The newest state and every newer one, as server-sent events."""
        feed.start()
        # The end of the lifespan closes the feed, which sends a last message.
        return EventStream(until(asyncio.Event(), lambda: True, feed.follow(request.headers.get("Last-Event-ID"))))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        feed.start()
        try:
            yield
        finally:
            await feed.close()

    routes = [
        *file_routes("/", "asyncpipe.observe.live", FILES),
        Route("/state", state),
        Route("/events", events),
    ]
    names = frozenset(host.lower() for host in hosts)
    app = Starlette(
        routes=routes, lifespan=lifespan, middleware=[Middleware(SecurityHeaders), Middleware(OwnHosts, hosts=names)]
    )
    app.router.redirect_slashes = False
    return app


def file_routes(below: str, package: str, files: Mapping[str, tuple[str, str]]) -> list[BaseRoute]:
    """Routes of ``files`` of ``package``: (name, media type) by path, relative to ``below``. The files are read now."""
    routes: list[BaseRoute] = []
    for path, (name, kind) in files.items():
        routes.append(file_route(f"{below}{path.removeprefix('/')}", file_text(package, name), kind))
    return routes


def file_route(path: str, text: str, kind: str) -> BaseRoute:
    """The route of a file with this ``text`` and media type."""
    return Route(path, partial(_file, text, kind))


def file_text(package: str, name: str) -> str:
    """The text of a file of ``package``."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


async def _file(text: str, kind: str, _: Request) -> Response:
    return Response(text, media_type=kind)
