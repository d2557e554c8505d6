"""The live view over HTTP: an ASGI application for programs of one's own, and a server for the rest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncpipe.errors import missing_package
from asyncpipe.observe.http_hosts import shown_address
from asyncpipe.observe.live.feed import LiveFeed
from asyncpipe.observe.live.view import LiveView

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["LiveServer", "live_app", "serve_live"]


@dataclass(frozen=True, slots=True)
class LiveServer:
    """Where a live view is served."""

    port: int
    url: str
    """The page's; with a loopback address if the server listens on all addresses."""


def live_app(view: LiveView, *, hosts: Iterable[str] = ()) -> Starlette:
    """An ASGI application with the page at ``/``, its events at ``/events`` and its data, once, at ``/state``.

    Serve it alone or mounted below a path of another application; the page uses addresses relative to its own, which
    ends with a slash. An application that mounts it must enter this application's lifespan within its own, so that open
    pages show the end: ``async with app.router.lifespan_context(app)``. The ``Host`` of a request must be a loopback
    name, the address that the request was sent to, or one of ``hosts`` (the names by which proxies and other machines
    know this one). Others are refused, because they may come from a foreign page by DNS rebinding. There is no
    authentication. Raises ``OptionError`` if starlette is not installed.
    """
    try:
        from asyncpipe.observe.live.handlers import make_app
    except ImportError as error:
        raise missing_package("the live view needs starlette and uvicorn", "service") from error
    return make_app(LiveFeed(view), hosts)


@asynccontextmanager
async def serve_live(
    view: LiveView, port: int, address: str = "127.0.0.1", *, hosts: Iterable[str] = ()
) -> AsyncIterator[LiveServer]:
    """Serve ``view`` on the running loop during the block; port 0 takes a free one (``.port``, ``.url``).

    At the end every open page shows that the run has ended. ``hosts`` are as for ``live_app``, and include ``address``.
    Signals are left to the calling program. Raises ``OptionError`` if the server cannot listen on the port, or if
    starlette and uvicorn are not installed.
    """
    app = live_app(view, hosts=(address, *hosts))
    try:
        from asyncpipe.observe.http_server import served
    except ImportError as error:
        raise missing_package("the live view needs starlette and uvicorn", "service") from error
    async with served(app, address, port, "the live view") as bound:
        yield LiveServer(bound, f"http://{shown_address(address)}:{bound}/")
