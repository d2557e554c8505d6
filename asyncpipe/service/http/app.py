"""The aiohttp application with all its parts, and a server for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from asyncpipe.errors import OptionError
from asyncpipe.observe.http_hosts import is_loopback, shown_address
from asyncpipe.observe.live.handlers import add_headers
from asyncpipe.service.http.access_control import AccessControl
from asyncpipe.service.http.audit import Audit, audit_files
from asyncpipe.service.http.connection import connections
from asyncpipe.service.http.event_stream import JobEventStreams
from asyncpipe.service.http.pages import Pages
from asyncpipe.service.http.problems import Problem, catch_problems
from asyncpipe.service.http.rate_limits import StreamLimit, TokenBuckets
from asyncpipe.service.http.redact import Redactor
from asyncpipe.service.http.routes import Routes
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.training_service import TrainingService

__all__ = ["make_api", "serve_api"]

SHUTDOWN_SECONDS = 1.0
"""How long a server that closes waits for requests that are being answered."""
BACKLOG = 128
STREAM_SHARE = 4
"""One in so many of the allowed connections may be an event stream."""

_AUDIT = web.AppKey("audit", Audit)


def make_api(service: TrainingService, settings: ServiceSettings) -> web.Application:
    """The aiohttp application; as ``asyncpipe.service.http.make_api``."""
    redact, audit = _redactor(settings), Audit()
    buckets = TokenBuckets(settings.requests_per_second, settings.burst)
    access = AccessControl(settings.hosts, settings.token, buckets, audit)
    stream_limit = StreamLimit(max(1, settings.max_connections // STREAM_SHARE))
    streams, pages = JobEventStreams(stream_limit, redact), Pages(service, stream_limit)
    routes = Routes(service, settings, streams, audit, redact)
    app = web.Application(middlewares=[catch_problems(redact), access.middleware])
    app[_AUDIT] = audit
    access.free(*routes.add_to(app.router))
    pages.add_to(app.router)
    app.on_response_prepare.append(add_headers)
    app.on_shutdown.append(streams.close)
    app.on_shutdown.append(pages.close)
    return app


@asynccontextmanager
async def serve_api(service: TrainingService, settings: ServiceSettings) -> AsyncIterator[str]:
    """Serves the application; as ``asyncpipe.service.http.serve_api``."""
    _check_address(settings)
    app, redact = make_api(service, settings), _redactor(settings)
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    async with audit_files(app[_AUDIT], settings.folder):
        try:
            await runner.setup()
            assert runner.server is not None
            _answer_refusals(runner.server, redact)
            make = connections(runner.server, settings.max_connections, settings.header_seconds, redact)
            listening = await _listen(make, settings)
            try:
                port = listening.sockets[0].getsockname()[1]
                yield f"http://{shown_address(settings.address)}:{port}/"
            finally:
                listening.close()
        finally:
            await runner.cleanup()


def _redactor(settings: ServiceSettings) -> Redactor:
    folders = [settings.folder, settings.entry_path, settings.token_file, settings.config, Path.cwd(), Path.home()]
    return Redactor(folders, [None if settings.token is None else settings.token.get_secret_value()])


def _answer_refusals(server: web.Server, redact: Redactor) -> None:
    """Make problems of what aiohttp refuses before any middleware runs (``Expect`` headers, which it would quote)."""
    handle = server.request_handler

    async def handle_or_refuse(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handle(request)
        except web.HTTPException as error:
            return Problem(error.status, "refused", error.reason, close=True).answer(redact)

    server.request_handler = handle_or_refuse


def _check_address(settings: ServiceSettings) -> None:
    """Refuse to listen without a token where others can reach the service; ``ServiceSettings`` checks it too."""
    if settings.token is not None:
        if not settings.token.get_secret_value():
            raise OptionError("the token is empty: anybody could send it")
    elif not is_loopback(settings.address):
        rule = "needs a token: give one, or listen on 127.0.0.1"
        raise OptionError(f"address {settings.address}, which others can reach, {rule}")


async def _listen(make: Callable[[], asyncio.Protocol], settings: ServiceSettings) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(make, settings.address, settings.port, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise OptionError(f"cannot serve the API on {settings.address}:{settings.port}: {error}") from error
