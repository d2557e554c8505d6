"""The FastAPI application with all its parts, and a server for it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from asyncpipe import __version__
from asyncpipe.errors import AsyncpipeError, OptionError
from asyncpipe.observe.http_hosts import is_loopback, shown_address
from asyncpipe.observe.http_server import served
from asyncpipe.observe.live.handlers import SecurityHeaders
from asyncpipe.service.http.access_control import AccessControl, StreamPlaces
from asyncpipe.service.http.pages import Pages
from asyncpipe.service.http.problems import RESPONSES, answer
from asyncpipe.service.http.proxied_users import NotesPeer
from asyncpipe.service.http.routes import PROBES, ROUTERS
from asyncpipe.service.http.routes.common import changes_need
from asyncpipe.service.settings.service_settings import ServiceSettings, SettingsError
from asyncpipe.service.training_service import TrainingService

__all__ = ["make_api", "serve_api"]

BEARER = HTTPBearer(auto_error=False, description="Or the token as the password of any user")
"""Describes what ``AccessControl`` checks."""


def make_api(service: TrainingService, settings: ServiceSettings) -> FastAPI:
    """The FastAPI application; as ``asyncpipe.service.http.make_api``."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            closing.set()
            await pages.end()

    closing, pages = asyncio.Event(), Pages(service)
    app = FastAPI(
        title="asyncpipe",
        version=__version__,
        openapi_url="/v1/openapi.json",
        docs_url=None,  # Their scripts are on other servers, from which pages load nothing.
        redoc_url=None,
        redirect_slashes=False,
        max_body_size=settings.max_body,
        generate_unique_id_function=lambda route: route.name,
        lifespan=lifespan,
        middleware=[
            Middleware(SecurityHeaders),
            Middleware(AccessControl, settings=settings, tokens=service.tokens, probes=PROBES),
        ],
        responses=RESPONSES,
        exception_handlers=dict.fromkeys((AsyncpipeError, HTTPException, RequestValidationError), answer),
    )
    app.state.service, app.state.closing = service, closing
    app.state.places = StreamPlaces(settings.max_connections)
    for router, role in ROUTERS:
        app.include_router(router, dependencies=[Depends(BEARER), Depends(changes_need(role))])
    app.router.routes.extend(pages.routes())
    return app


@asynccontextmanager
async def serve_api(service: TrainingService, settings: ServiceSettings) -> AsyncIterator[str]:
    """Serves the application; as ``asyncpipe.service.http.serve_api``."""
    if settings.token is not None:
        if not settings.token.get_secret_value():
            raise OptionError("the token is empty: anybody could send it")
    elif settings.user_header is None and not is_loopback(settings.address):
        rule = "needs a token: give one, or listen on 127.0.0.1"
        raise OptionError(f"address {settings.address}, which others can reach, {rule}")
    app, scheme = make_api(service, settings), "http" if settings.certificate is None else "https"
    app.add_middleware(NotesPeer, proxies=settings.trusted_proxies)
    options = {"limit_concurrency": settings.max_connections, **_tls(service, settings)}
    async with served(app, settings.address, settings.port, "the API", **options) as port:
        yield f"{scheme}://{shown_address(settings.address)}:{port}/"


def _tls(service: TrainingService, settings: ServiceSettings) -> dict[str, Any]:
    """uvicorn's option for the certificate of ``settings``, if there is one; ``service.reload`` reads it again.

    A renewed one is that of new connections: at each handshake OpenSSL asks which context has it.
    """
    certificate, key = settings.certificate, settings.key
    if certificate is None:
        return {}

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key, password="")  # Nobody is there who could type one.
        except OSError as error:
            raise SettingsError(f"certificate: {certificate} and its key cannot be used: {error}") from error
        return context

    newest = [first := read()]
    first.sni_callback = lambda connection, *_: setattr(connection, "context", newest[0])
    service.reloading.append(lambda: partial(newest.__setitem__, 0, read()))
    return {"ssl_context_factory": lambda *_: first}
