"""The API behind a real nginx with the configuration that we ship: floods end there, and clients are served."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import ClientSession
from http_helpers import TOKEN, Api, served, submission
from nginx import NGINX, proxied

pytestmark = [pytest.mark.skipif(NGINX is None, reason="no nginx: apt-get install nginx-light")]

BEARER = {"Authorization": f"Bearer {TOKEN}"}


async def said(place: tuple[str, int], sent: bytes) -> bytes:
    """What is answered to these bytes, until the connection is closed."""
    reader, writer = await asyncio.open_connection(*place)
    writer.write(sent)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.promise("Security", "Behind the given nginx configuration, idle sockets and floods keep nobody out.")
async def test_clients_are_served_and_floods_end_at_the_proxy(tmp_path: Path) -> None:
    async with served(tmp_path / "service", token=TOKEN, trusted_proxies=["127.0.0.1"]) as api:
        port = int(api.base.rpartition(":")[2])
        with proxied(tmp_path / "nginx", port, client_header_timeout="1s", client_body_timeout="1s") as place:
            async with ClientSession() as session:
                there = Api(session, f"http://{place[0]}:{place[1]}", api.service)
                status, job, _ = await there.ask("POST", "/v1/jobs", submission(), **BEARER)
                assert status == 201
                # Events come as they happen.
                path = f"{there.base}/v1/jobs/{job['id']}/events"
                async with session.get(path, headers=BEARER) as stream, asyncio.timeout(20):
                    assert await stream.content.readline() == b"retry: 1000\n"
                    api.service.tell(job["id"], "note", level=20, text="at once")
                    assert b"at once" in await stream.content.readuntil(b"at once")
                # A rate, and bodies.
                asked = [there.ask("GET", "/v1/jobs") for _ in range(300)]
                assert Counter(status for status, _, _ in await asyncio.gather(*asked)).keys() == {401, 429}
                assert (await there.ask("GET", "/livez"))[0] == 200
                assert (await there.ask("POST", "/livez", b"x" * 200_000))[0] == 413
            # Slow heads and bodies.
            assert await said(place, b"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ") == b""
            slow = b"POST /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
            assert b"200 OK" not in await said(place, slow)


@pytest.mark.promise("Security", "Behind the given nginx configuration, idle sockets and floods keep nobody out.")
async def test_sockets_that_ask_nothing_keep_nobody_out(tmp_path: Path) -> None:
    async with served(tmp_path / "service", token=TOKEN) as api:
        port = int(api.base.rpartition(":")[2])
        with proxied(tmp_path / "nginx", port, connections=64) as place:
            held = [await asyncio.open_connection(*place) for _ in range(200)]
            for _ in range(5):
                answer = await said(place, b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200 ")
            for _, writer in held:
                writer.close()
