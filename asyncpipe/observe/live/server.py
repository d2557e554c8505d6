"""The live view over HTTP: a page that shows a run while it runs, and the events that keep it up to date.

``feed.py`` has what is sent, ``handlers.py`` how requests are answered. The page is ``live.html``, its style
``live.css``, its scripts ``live.js`` and ``live_draw.js``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncpipe.errors import OptionError
from asyncpipe.observe.http_hosts import shown_address as _host
from asyncpipe.observe.live.feed import LiveFeed
from asyncpipe.observe.live.view import LiveView

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["LiveServer", "live_app", "serve_live"]

SHUTDOWN_SECONDS = 1.0
"""For requests that are still being answered when a server closes."""


@dataclass(frozen=True, slots=True)
class LiveServer:
    """Where a live view is served."""

    port: int
    url: str
    """Of the page; with a loopback address where the server listens on all."""


def live_app(view: LiveView, *, hosts: Iterable[str] = ()) -> web.Application:
    """An aiohttp application with the page at ``/``, its events at ``/events`` and its data, once, at ``/state``.

    Serve it by itself or as a sub-application; the page asks for everything relative to its own address, which
    ends with a slash. Requests must name a loopback host, the address that they came in on, or one of ``hosts`` (the
    name under which a proxy or another machine knows this one): others are refused, as they may come from a foreign
    page whose name was made to point here. There is no authentication. Raises ``OptionError`` without aiohttp.
    """
    _check_aiohttp()
    from asyncpipe.observe.live.handlers import make_app

    return make_app(LiveFeed(view), hosts)


@asynccontextmanager
async def serve_live(
    view: LiveView, port: int, address: str = "127.0.0.1", *, hosts: Iterable[str] = ()
) -> AsyncIterator[LiveServer]:
    """Serves ``view`` on the running loop during the block; port 0 takes a free one (``.port``, ``.url``).

    At the end every open page is told that the run has ended. ``hosts`` as for ``live_app``; ``address`` is one of
    them. Signals are left to the host program. Raises ``OptionError`` where the port cannot be listened on, and
    without aiohttp.
    """
    app = live_app(view, hosts=(address, *hosts))
    from aiohttp import web

    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, address, port).start()
        except (OSError, OverflowError) as error:
            raise OptionError(f"cannot serve the live view on {address}:{port}: {error}") from error
        bound: int = runner.addresses[0][1]
        yield LiveServer(bound, f"http://{_host(address)}:{bound}/")
    finally:
        await runner.cleanup()


def _check_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "the live view needs aiohttp, which is not installed: pip install 'asyncpipe[service]'"
        ) from error
