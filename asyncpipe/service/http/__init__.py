"""The HTTP API of a training service, safe by design: what it lets in is little, and stated in one place each.

::

    a connection        connection.py   how many, how slow a head may be, how long an answer may stay untaken
      └ a request       guard.py        whom it was sent to, from where, by whom, how often  (hosts.py, limits.py)
          └ a body      body.py         how large, how slow, which JSON
              └ a job   routes.py       the service decides; models.py says what is answered
    an error            problems.py     one form for all of them; redact.py keeps paths and secrets out of it
    what was changed    audit.py        a line for each, beside what was refused
    what happens        stream.py       server-sent events
    a person            pages.py        a page with all jobs, and the live page of each
    a program           openapi.py      the same, described

``app.py`` puts it together. This module needs no aiohttp; the others do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from aiohttp import web

    from asyncpipe.service.settings.service_settings import ServiceSettings
    from asyncpipe.service.training_service import TrainingService

__all__ = ["make_api", "serve_api"]


def make_api(service: TrainingService, settings: ServiceSettings) -> web.Application:
    """The aiohttp application with the API and its pages, to serve by itself or as a sub-application of a host's own.

    In a host's application the host bounds connections and slow request heads, and may hand lines of the logger
    ``asyncpipe.audit`` to a file; ``serve_api`` does both. Raises ``OptionError`` without aiohttp.
    """
    _check_aiohttp()
    from asyncpipe.service.http import app

    return app.make_api(service, settings)


def serve_api(service: TrainingService, settings: ServiceSettings) -> AbstractAsyncContextManager[str]:
    """Serves the API on ``settings.address`` and ``settings.port`` during the block, and gives its URL.

    It runs on the running loop; port 0 takes a free one; signals are left to the host program. Raises ``OptionError``
    where it cannot listen, for an address that others can reach without a token, and without aiohttp.
    """
    return _serve(service, settings)


@asynccontextmanager
async def _serve(service: TrainingService, settings: ServiceSettings) -> AsyncIterator[str]:
    _check_aiohttp()
    from asyncpipe.service.http import app

    async with app.serve_api(service, settings) as url:
        yield url


def _check_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise OptionError("the API needs aiohttp, which is not installed: pip install 'asyncpipe[service]'") from error
