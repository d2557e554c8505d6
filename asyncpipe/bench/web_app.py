"""The web application of the ``embedded`` benchmark; ``python -m asyncpipe.bench.web_app`` serves it without training.

Served by another process, requests cost training only the CPU time that they take. The benchmark compares both.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from asyncpipe.runtime.portal import new_event_loop

__all__ = ["make_app", "served", "served_by_process"]


def make_app() -> web.Application:
    """An application with a trivial handler at ``/``."""

    async def trivial(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", trivial)
    return app


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[int]:
    """Serve ``app`` on the running loop during the block; yields the port on 127.0.0.1."""
    runner = web.AppRunner(app, handle_signals=False, access_log=None)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextmanager
def served_by_process() -> Iterator[int]:
    """Serve ``make_app()`` in another process during the block; yields the port on 127.0.0.1."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


async def _main() -> None:
    async with served(make_app()) as port:
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as _runner:
        _runner.run(_main())
