"""An ASGI application under uvicorn, on the loop that runs: what serves the live view and the API of a service.

uvicorn's own ``Server`` handles signals, ends the process where it cannot listen, polls, and waits for open event
streams before it tells the application to end them. A server that is a part of a program can do none of that, so
uvicorn's parts are put together here: its configuration, its connections and their state. The end has this order::

    no new connections ──▶ the application's lifespan ends, which ends its streams ──▶ the answers that are under way
    are waited for (SHUTDOWN_SECONDS) ──▶ the connections that are left are cut
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from email.utils import formatdate
from typing import TYPE_CHECKING, TypeAlias

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["Connect", "served"]

SHUTDOWN_SECONDS = 1.0
"""How long a server that ends waits for answers that are under way."""
BACKLOG = 1024
"""Connections that the kernel has ready. It drops further ones, whose clients try again after a second."""

Connect: TypeAlias = Callable[[Config, ServerState], HttpToolsProtocol]
"""Makes the protocol of a new connection."""


def _plain(config: Config, state: ServerState) -> HttpToolsProtocol:
    return HttpToolsProtocol(config, state, {})


@asynccontextmanager
async def served(app: Starlette, address: str, port: int, what: str, connect: Connect = _plain) -> AsyncIterator[int]:
    """Serve ``app`` on the running loop during the block; yields the port, of which 0 takes a free one.

    The application's lifespan is the block's. Signals are left to the program. Raises ``OptionError`` where it cannot
    listen, which says that ``what`` cannot be served.
    """
    config = Config(
        app, interface="asgi3", loop="none", ws="none", lifespan="off", log_config=None, proxy_headers=False,
        server_header=False,
    )  # fmt: skip
    config.load()
    state = ServerState()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_dated(state))
        stack.push_async_callback(_end, state)
        await stack.enter_async_context(app.router.lifespan_context(app))

        def make() -> HttpToolsProtocol:
            connection = connect(config, state)
            # The option of the configuration would disable the logger of another uvicorn in this process as well.
            connection.access_log = False
            return connection

        try:
            listening = await asyncio.get_running_loop().create_server(make, address, port, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            raise OptionError(f"cannot serve {what} on {address}:{port}: {error}") from error
        stack.callback(listening.close)
        yield listening.sockets[0].getsockname()[1]


async def _end(state: ServerState) -> None:
    """Wait for answers that are under way, and cut the connections of those that take too long."""
    for connection in list(state.connections):
        connection.shutdown()
    if state.tasks:
        await asyncio.wait(state.tasks, timeout=SHUTDOWN_SECONDS)
    for connection in list(state.connections):
        connection.transport.abort()
    while state.connections:  # noqa: ASYNC110 - transports tell it in a callback of the loop
        await asyncio.sleep(0)
    if state.tasks:  # What waited for a client has been told that it is gone.
        await asyncio.wait(state.tasks, timeout=SHUTDOWN_SECONDS)
    for task in list(state.tasks):
        task.cancel()


@asynccontextmanager
async def _dated(state: ServerState) -> AsyncIterator[None]:
    """Have answers say the date, during the block."""

    async def tell() -> None:
        while True:
            state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            await asyncio.sleep(1)

    telling = asyncio.create_task(tell(), name="asyncpipe-date")
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.wait([telling])
