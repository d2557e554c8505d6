"""The HTTP API of a training service, made with FastAPI.

::

    app.py                          puts the application together, and serves it. Start here.
    access_control.py               what every request passes first: its host, its token, the page that sends it
      │                             proxied_users.py: the user whom a trusted proxy names
      └ problems.py                 every error in one form
          └ routes/                 the routes, each declared once; common.py has what they share
    models.py                       bodies of requests and answers
    audit.py                        a log line for each change and each refusal
    event_stream.py                 the events of a job as server-sent events
    pages.py                        a page with all jobs, and the page of each; their files are in web/

Floods, slow clients and rates are not its concern: where the network is not trusted, a reverse proxy stands in front of
it (``docker/nginx``). May import everything below it in the service. This module needs no FastAPI; the others do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from asyncpipe.errors import missing_package

if TYPE_CHECKING:
    from fastapi import FastAPI

    from asyncpipe.service.settings.service_settings import ServiceSettings
    from asyncpipe.service.training_service import TrainingService

__all__ = ["make_api", "serve_api"]


def make_api(service: TrainingService, settings: ServiceSettings) -> FastAPI:
    """The FastAPI application with the API and its pages, to be mounted below a path of any ASGI application.

    The host enters the application's lifespan in its own: ``async with app.router.lifespan_context(app)``. At its end
    open event streams end; a server that waits for them before it ends lifespans, as uvicorn does, is given a bound
    (``timeout_graceful_shutdown``). The header of ``user_header`` is refused, since the host's server
    may not tell who is connected: there the host knows its users. Raises ``OptionError`` without FastAPI.
    """
    _check_packages()
    from asyncpipe.service.http import app

    return app.make_api(service, settings)


@asynccontextmanager
async def serve_api(service: TrainingService, settings: ServiceSettings) -> AsyncIterator[str]:
    """Serves the API on ``settings.address`` and ``settings.port`` during the block; yields its URL.

    It uses the running loop and handles no signals; port 0 takes a free one. Raises ``OptionError`` if it cannot
    listen, for an address that others can reach if there is no token, and without FastAPI and uvicorn.
    """
    _check_packages()
    from asyncpipe.service.http import app

    async with app.serve_api(service, settings) as url:
        yield url


def _check_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise missing_package("the API needs FastAPI and uvicorn", "service") from error
