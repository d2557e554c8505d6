"""The HTTP API of a training service: the checks that a request passes, one module for each.

::

    app.py                          puts the application together, and serves it. Start here.
    connection.py                   limits of a connection: how many, how slow its request head, how slowly it reads
      └ problems.py                 every error in one form; redact.py removes paths and secrets from texts
          └ access_control.py       limits of a request: its host, its origin, its token, its rate (rate_limits.py)
              └ routes/             the routes, each declared once; common.py has what they share
                  └ json_body.py    limits of a body: how large, how slow, which JSON
    models.py                       bodies of requests and answers
    openapi.py                      the document that FastAPI makes of the routes, and what this service adds
    audit.py                        a log line for each change and each refusal
    event_stream.py                 server-sent events
    download.py                     artifacts as a whole or by ranges (ranges.py)
    pages.py                        a page with all jobs, and the page of each; their files are in web/

May import everything below it in the service. This module needs no FastAPI; the others do.
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

    The host enters the application's lifespan in its own, so that open streams end with it:
    ``async with app.router.lifespan_context(app)``. It limits connections and slow request heads itself, and writes the
    lines of the logger ``asyncpipe.audit`` where it wants them; ``serve_api`` does all of this. Raises ``OptionError``
    without FastAPI.
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
