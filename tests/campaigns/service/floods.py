"""Floods of an nginx with ``docker/nginx/asyncpipe.conf`` in front of a service: clients are served meanwhile."""

from __future__ import annotations

import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

from nginx import NGINX, proxied

from tests.campaigns.service import Row
from tests.campaigns.service._served import JOB, TOKEN, ask, serve

FLOODER = "127.0.0.2"
"""The address that floods come from."""
SOCKETS = 2000
ASKED = 40
HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def run(folder: Path) -> list[Row]:
    """Sockets that stay, and that come again and again; heads and bodies that never end; a job trains meanwhile."""
    if NGINX is None:
        return [Row("floods", "no nginx: apt-get install nginx-light", held=False)]
    rows: list[Row] = []
    with serve(folder, "--trusted-proxies", "127.0.0.1") as service:
        job = service.client.submit(JOB)
        # Sockets that send nothing give way where there are fewer connections; those that send must find room.
        for what, sent, connections in (
            ("sockets that send nothing, at 1,024 connections", b"", 1024),
            ("heads that never end, at 8,192 connections", HEAD + b"X-Slow: ", 8192),
            ("bodies that never end, at 8,192 connections", HEAD + b"Content-Length: 100\r\n\r\n{", 8192),
        ):
            with (
                proxied(folder / "nginx", service.place[1], connections=connections) as place,
                _flood(lambda ended, place=place, sent=sent: _hold(place, sent, ended)),
            ):
                rows += _asked(f"{SOCKETS:,} {what}", place)
        counts = Counter[str]()
        with proxied(folder / "nginx", service.place[1]) as place:
            with _flood(lambda ended: _storm(place, counts, ended)):
                begun = monotonic()
                found = _asked("new sockets a second", place)
                rate = counts["opened"] / (monotonic() - begun)
            rows += [row._replace(what=f"{rate:,.0f} {row.what}") for row in found]
            rate_limited = Counter(ask(place, "/v1/jobs")[0] for _ in range(400))
        figure = ", ".join(f"{status}: {count}" for status, count in rate_limited.items())
        rows.append(Row("400 requests of one address without a token", figure, rate_limited[429] > 0))
        done = service.client.wait(job["id"], timeout=120)
        events = [event.kind for event in service.client.events(job["id"])]
    taken = events.count("snapshot")
    held = done["state"] == "finished" and taken == JOB["training"]["steps"] // JOB["snapshots"]["every"]
    return [*rows, Row("the job that trained meanwhile", f"{done['state']}, {taken} snapshots", held)]


def _asked(flood: str, place: tuple[str, int]) -> list[Row]:
    rows = []
    for path, token in (("/livez", None), ("/v1/jobs", TOKEN)):
        asked = [ask(place, path, token) for _ in range(ASKED)]
        good, longest = sum(status == 200 for status, _ in asked), max(seconds for _, seconds in asked)
        figure = f"{good} of {ASKED} answered, the slowest in {longest * 1e3:.0f} ms"
        rows.append(Row(f"{flood}; {ASKED} times GET {path}", figure, good == ASKED))
    return rows


@contextmanager
def _flood(run: Callable[[threading.Event], None]) -> Iterator[None]:
    """``run`` on a thread during the block."""
    ended = threading.Event()
    thread = threading.Thread(target=run, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _connected(place: tuple[str, int]) -> socket.socket | None:
    client = socket.socket()
    client.settimeout(2)
    try:
        client.bind((FLOODER, 0))
        client.connect(place)
    except OSError:
        client.close()
        return None
    return client


def _hold(place: tuple[str, int], sent: bytes, ended: threading.Event) -> None:
    """So many connections that have ``sent`` this, each opened again as soon as it is closed."""
    with selectors.DefaultSelector() as selector:
        held: set[socket.socket] = set()
        while not ended.is_set():
            while len(held) < SOCKETS and not ended.is_set() and (client := _connected(place)) is not None:
                with suppress(OSError):
                    client.sendall(sent)
                selector.register(client, selectors.EVENT_READ)
                held.add(client)
            for key, _ in selector.select(0.05):
                client = next(each for each in held if each.fileno() == key.fd)
                selector.unregister(client)
                held.discard(client)
                client.close()
        for client in held:
            client.close()


def _storm(place: tuple[str, int], counts: Counter[str], ended: threading.Event) -> None:
    """Connections that are opened and left as fast as can be."""
    while not ended.is_set():
        if (client := _connected(place)) is not None:
            counts["opened"] += 1
            client.close()
