"""An ASGI application under uvicorn, on the loop that runs: what serves the live view and the API of a service.

The application's lifespan ends before the server does: uvicorn waits for open answers before it would end a lifespan,
and event streams are answers that only the application's end ends.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from uvicorn import Config, Server

from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["served"]

SHUTDOWN_SECONDS = 1
"""How long a server that ends waits for answers that are under way."""
MOST_HEAD = 64 * 2**10
"""The most bytes of a request's head."""


class _Server(Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the program, of which the server is a part."""
        yield


@asynccontextmanager
async def served(app: Starlette, address: str, port: int, what: str, **options: Any) -> AsyncIterator[int]:
    """Serve ``app`` on the running loop during the block; yields the port, of which 0 takes a free one.

    The application's lifespan is the block's. Signals are left to the program. ``options`` are further ones of
    ``uvicorn.Config``. Raises ``OptionError`` where it cannot listen, which says that ``what`` cannot be served.
    """
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if not 0 <= port < 2**16:
            raise OSError("ports end at 65535")
        listening = socket.create_server((address, port), family=family)
    except OSError as error:
        raise OptionError(f"cannot serve {what} on {address}:{port}: {error}") from error
    config = Config(
        app,
        http="h11",  # Of uvicorn's two, the one that limits a request's head.
        h11_max_incomplete_event_size=MOST_HEAD,
        ws="none",
        lifespan="off",
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        **{"proxy_headers": False, **options},
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listening]), name=f"asyncpipe: {what}")
    try:
        async with app.router.lifespan_context(app):
            yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait([serving])
        listening.close()
