"""An aiohttp application with a trivial handler; ``python -m asyncpipe.bench.hello`` serves it without training.

So one sees what requests cost training by the cores that they need, wherever they are answered.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from asyncpipe.runtime.portal import new_event_loop

__all__ = ["hello", "served", "served_apart"]


def hello() -> web.Application:
    """An application that answers ``/``."""

    async def trivial(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", trivial)
    return app


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[int]:
    """The port of 127.0.0.1 at which the running loop serves the application, during the block."""
    runner = web.AppRunner(app, handle_signals=False, access_log=None)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextmanager
def served_apart() -> Iterator[int]:
    """The port at which a process of its own serves ``hello()``, during the block."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


async def _main() -> None:
    async with served(hello()) as port:
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as _runner:
        _runner.run(_main())
