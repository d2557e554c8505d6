"""The FastAPI application with all its parts, and a server for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Mount

from asyncpipe.errors import OptionError
from asyncpipe.observe.http_hosts import is_loopback, shown_address
from asyncpipe.observe.http_server import served
from asyncpipe.observe.live.event_streams import EventStreams
from asyncpipe.observe.live.handlers import SecurityHeaders
from asyncpipe.service.http.access_control import AccessControl
from asyncpipe.service.http.audit import Audit, audit_files
from asyncpipe.service.http.client_address import TrustedProxies
from asyncpipe.service.http.connection import connections
from asyncpipe.service.http.event_stream import JobEventStreams
from asyncpipe.service.http.pages import Pages
from asyncpipe.service.http.problems import CatchProblems
from asyncpipe.service.http.rate_limits import RateLimits, StreamLimit, TokenBuckets
from asyncpipe.service.http.redact import Redactor
from asyncpipe.service.http.routes import PROBES, ROUTES
from asyncpipe.service.http.routes.common import ApiParts
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.training_service import TrainingService

__all__ = ["make_api", "serve_api"]

STREAM_SHARE = 4
"""One in so many of the allowed connections may be an event stream."""
DOWNLOAD_SHARE = 8
"""One in so many may be a download, which has a file open."""


def make_api(service: TrainingService, settings: ServiceSettings) -> FastAPI:
    """The FastAPI application; as ``asyncpipe.service.http.make_api``."""
    redact, audit = _redactor(settings), Audit()
    limits = RateLimits(
        TokenBuckets(settings.requests_per_second, settings.burst),
        TokenBuckets(settings.token_requests_per_second, settings.token_burst),
    )
    downloads = StreamLimit(max(1, settings.max_connections // DOWNLOAD_SHARE), "downloads")
    stream_limit = StreamLimit(max(1, settings.max_connections // STREAM_SHARE))

    async def end() -> None:
        jobs.end()
        await pages.end()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await streams.close()

    streams = EventStreams(end)
    jobs, pages = JobEventStreams(streams, stream_limit, redact), Pages(service, streams, stream_limit)
    app = FastAPI(
        title="asyncpipe",
        openapi_url=None,  # A route describes the API, behind the same checks as the others.
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=[
            Middleware(SecurityHeaders),
            Middleware(CatchProblems, redact=redact),
            Middleware(
                AccessControl,
                hosts=settings.hosts,
                tokens=service.tokens,
                limits=limits,
                proxies=TrustedProxies(settings.trusted_proxies, settings.proxy_header),
                audit=audit,
                probes=PROBES,
            ),
        ],
        exception_handlers={HTTPException: _raise, RequestValidationError: _raise},
    )
    app.state.parts = ApiParts(service, settings, jobs, downloads, audit, redact)
    app.router.routes.extend([*ROUTES, *pages.routes()])
    return app


@asynccontextmanager
async def serve_api(service: TrainingService, settings: ServiceSettings) -> AsyncIterator[str]:
    """Serves the application; as ``asyncpipe.service.http.serve_api``."""
    _check_address(settings)
    app, redact = make_api(service, settings), _redactor(settings)
    connect = connections(settings.max_connections, PROBES, settings.header_seconds, redact)
    async with (
        audit_files(app.state.parts.audit, settings.folder),
        served(app, settings.address, settings.port, "the API", connect) as port,
        _probes_served(app, settings, redact),
    ):
        yield f"http://{shown_address(settings.address)}:{port}/"


@asynccontextmanager
async def _probes_served(app: FastAPI, settings: ServiceSettings, redact: Redactor) -> AsyncIterator[None]:
    """Serve probes alone on the port that is theirs, if there is one: no other connection ever has a place there."""
    if settings.probe_port is None:
        yield
        return
    connect = connections(0, PROBES, settings.header_seconds, redact)
    same = Starlette(routes=[Mount("", app)])  # Its lifespan is not the application's, which ends once.
    async with served(same, settings.address, settings.probe_port, "probes", connect):
        yield


async def _raise(_: Request, error: Exception) -> NoReturn:
    """Leave an error to ``CatchProblems``, which answers all of them."""
    raise error


def _redactor(settings: ServiceSettings) -> Redactor:
    folders = [settings.folder, settings.entry_path, settings.token_file, settings.config, Path.cwd(), Path.home()]
    secrets = [settings.token, settings.mlflow]
    return Redactor(folders, [None if secret is None else secret.get_secret_value() for secret in secrets])


def _check_address(settings: ServiceSettings) -> None:
    """Refuse to listen without a token where others can reach the service; ``ServiceSettings`` checks it too."""
    if settings.token is not None:
        if not settings.token.get_secret_value():
            raise OptionError("the token is empty: anybody could send it")
    elif not is_loopback(settings.address):
        rule = "needs a token: give one, or listen on 127.0.0.1"
        raise OptionError(f"address {settings.address}, which others can reach, {rule}")
