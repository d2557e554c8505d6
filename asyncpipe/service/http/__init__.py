"""The HTTP API of a training service: the checks that a request passes, one module for each.

::

    app.py                  puts the application together, and serves it. Start here.
    connection.py           limits of a connection: how many, how slow its request head, how slowly it reads
      └ access_control.py   limits of a request: its host, its origin, its token, its rate (rate_limits.py)
          └ json_body.py    limits of a body: how large, how slow, which JSON
              └ routes.py   the handlers; openapi.py has the table of routes, models.py the responses
    problems.py             every error in one form; redact.py removes paths and secrets from texts
    audit.py                a log line for each change and each refusal
    event_stream.py         server-sent events
    pages.py                a page with all jobs, and the live page of each

May import everything below it in the service. This module needs no aiohttp; the others do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from asyncpipe.errors import missing_package

if TYPE_CHECKING:
    from aiohttp import web

    from asyncpipe.service.settings.service_settings import ServiceSettings
    from asyncpipe.service.training_service import TrainingService

__all__ = ["make_api", "serve_api"]


def make_api(service: TrainingService, settings: ServiceSettings) -> web.Application:
    """The aiohttp application with the API and its pages, to be served alone or mounted in a host's application.

    A host that mounts it limits connections and slow request heads itself, and writes the lines of the logger
    ``asyncpipe.audit`` where it wants them; ``serve_api`` does both. Raises ``OptionError`` without aiohttp.
    """
    _check_aiohttp()
    from asyncpipe.service.http import app

    return app.make_api(service, settings)


@asynccontextmanager
async def serve_api(service: TrainingService, settings: ServiceSettings) -> AsyncIterator[str]:
    """Serves the API on ``settings.address`` and ``settings.port`` during the block; yields its URL.

    It uses the running loop and handles no signals; port 0 takes a free one. Raises ``OptionError`` if it cannot
    listen, for an address that others can reach if there is no token, and without aiohttp.
    """
    _check_aiohttp()
    from asyncpipe.service.http import app

    async with app.serve_api(service, settings) as url:
        yield url


def _check_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise missing_package("the API needs aiohttp", "service") from error
