"""Every attack of the tests (``tests/service/http/test_attacks.py``), on a real ``asyncpipe serve``: none gets in."""

from __future__ import annotations

import json
import socket
from collections import Counter
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.campaigns.service import Row
from tests.campaigns.service._served import TOKEN, ask, serve

__all__ = ["run"]


def run(folder: Path) -> list[Row]:
    """One row for requests, one for what is hardly HTTP."""
    from tests.service.http import test_attacks as tables

    theirs = tables.TOKEN
    with serve(folder) as service:
        requests = [(each.name, each.status, asked(service.place, each, theirs)) for each in tables.ATTACKS]
        below = [
            (name, int(status), said(service.place, make().replace(theirs.encode(), TOKEN.encode())))
            for name, status, make in tables.BELOW
        ]
        jobs = list(service.client.list())
        lives = ask(service.place, "/livez")[0] == 200
    return [
        row(f"{len(requests)} attacks by requests", requests, not jobs and lives),
        row(f"{len(below)} attacks by what is hardly HTTP", below, lives),
    ]


def row(what: str, attacks: list[tuple[str, int, int]], held: bool) -> Row:
    wrong = [f"{name}: {got} in place of {status}" for name, status, got in attacks if got != status]
    counts = Counter(got for _, _, got in attacks)
    seen = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
    return Row(what, f"refused with {seen}; let in: 0" if not wrong else "; ".join(wrong), held and not wrong)


def asked(place: tuple[str, int], attack: Any, theirs: str) -> int:
    """The status that ``attack`` is answered with."""
    body = attack.body if attack.body is None or isinstance(attack.body, bytes) else json.dumps(attack.body).encode()
    headers = ({} if body is None else {"Content-Type": "application/json"}) | attack.headers
    ours = {name: value.replace(theirs, TOKEN) for name, value in headers.items()}
    connection = HTTPConnection(*place, timeout=10)
    try:
        with suppress(ConnectionError):  # A body that is refused need not be taken to its end.
            connection.request(attack.method, attack.path.replace(theirs, TOKEN), body, ours)
        return connection.getresponse().status
    finally:
        connection.close()


def said(place: tuple[str, int], sent: bytes) -> int:
    """The status that these bytes are answered with."""
    with socket.create_connection(place, timeout=10) as connection:
        with suppress(ConnectionError):
            connection.sendall(sent)
        return int(connection.recv(64).split(b" ")[1])
