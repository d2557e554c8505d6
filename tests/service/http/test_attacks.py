"""What must not get in: each attack is refused with its status, and no answer tells a secret, a path or much of it."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from http_helpers import JSON, NOBODY, TOKEN, Api, make_settings, mounted, served, submission
from yarl import URL

from asyncpipe.errors import OptionError
from asyncpipe.service.http import connection, problems, serve_api

pytestmark = [pytest.mark.usefixtures("no_leaks")]

BEARER = {"Authorization": f"Bearer {TOKEN}"}
MARK = "Z" * 101
"""More of the input than an answer may show."""


def basic(text: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}


@dataclass
class Attack:
    name: str
    status: int
    body: Any = field(default_factory=submission)
    """Sent as it is if bytes, as JSON otherwise."""
    headers: dict[str, str] = field(default_factory=lambda: dict(BEARER))
    method: str = "POST"
    path: str = "/v1/jobs"


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * depth + closing * depth).encode()


def changed(**more: Any) -> dict[str, Any]:
    return submission(**more)


def training(**more: Any) -> dict[str, Any]:
    return submission(training={"steps": 10, "batch_size": 8, "learning_rate": 0.1} | more)


def pipeline(**more: Any) -> dict[str, Any]:
    return submission(pipeline={"devices": ["cpu:0"]} | more)


ATTACKS = [
    Attack("no token", 401, headers={}),
    Attack("no token, for reading", 401, method="GET", body=None, headers={}),
    Attack("no token, for a page", 401, method="GET", body=None, headers={}, path="/"),
    Attack("no token, for what is not there", 401, method="GET", body=None, headers={}, path="/nothing"),
    Attack("wrong token", 401, headers={"Authorization": "Bearer " + TOKEN[:-1] + "x"}),
    Attack("a shorter token", 401, headers={"Authorization": "Bearer " + TOKEN[:-1]}),
    Attack("a longer token", 401, headers={"Authorization": "Bearer " + TOKEN + "x"}),
    Attack("an empty token", 401, headers={"Authorization": "Bearer "}),
    Attack("another scheme", 401, headers={"Authorization": f"Digest {TOKEN}"}),
    Attack("the token as user", 401, headers=basic(f"{TOKEN}:x")),
    Attack("wrong password", 401, headers=basic("me:no")),
    Attack("no base64", 401, headers={"Authorization": "Basic ****"}),
    Attack("the token in the query", 401, method="GET", body=None, headers={}, path=f"/v1/jobs?token={TOKEN}"),
    Attack("foreign host", 421, headers=BEARER | {"Host": "evil.example"}),
    Attack("foreign host like ours", 421, headers=BEARER | {"Host": "127.0.0.1.evil.example"}),
    Attack("foreign host of a probe", 421, method="GET", body=None, headers={"Host": "evil.example"}, path="/livez"),
    Attack("foreign origin", 403, headers=BEARER | {"Origin": "http://evil.example"}),
    Attack("another port's origin", 403, headers=BEARER | {"Origin": "http://127.0.0.1:1"}),
    Attack("origin null", 403, headers=BEARER | {"Origin": "null"}),
    Attack("odd origin", 403, headers=BEARER | {"Origin": "http://[::1"}),
    Attack("foreign origin, reading", 403, method="GET", body=None, headers=BEARER | {"Origin": "https://evil.example"}),
    Attack("cross-site fetch", 403, headers=BEARER | {"Sec-Fetch-Site": "cross-site"}),
    Attack("same-site fetch", 403, headers=BEARER | {"Sec-Fetch-Site": "same-site"}),
    Attack("plain text", 415, headers=BEARER | {"Content-Type": "text/plain"}),
    Attack("a form", 415, body=b"name=x", headers=BEARER | {"Content-Type": "application/x-www-form-urlencoded"}),
    Attack("no type", 415, headers=BEARER | {"Content-Type": ""}),
    Attack("another charset", 415, headers=BEARER | {"Content-Type": "application/json; charset=utf-16"}),
    Attack("compressed", 415, headers=BEARER | {"Content-Encoding": "gzip"}),
    Attack("an action with another type", 415, path=f"/v1/jobs/{NOBODY}/pause", body=b"",
           headers=BEARER | {"Content-Type": "text/plain"}),
    Attack("no JSON", 400, body=b"{"),
    Attack("nothing", 400, body=b""),
    Attack("not UTF-8", 400, body=b'{"name": "\xff"}'),
    Attack("NUL bytes", 400, body=b"\x00" * 100),
    Attack("NUL in a text", 400, body=json.dumps(submission(name="a\0b")).encode()),
    Attack("half a surrogate pair", 400, body=b'{"name": "\\ud800"}'),
    Attack("duplicate keys", 400, body=b'{"name": "a", "name": "b"}'),
    Attack("a long duplicate key", 400, body=f'{{"{MARK}": 1, "{MARK}": 2}}'.encode()),
    Attack("NaN", 400, body=b'{"weight": NaN}'),
    Attack("infinity", 400, body=b'{"weight": -Infinity}'),
    Attack("a number that overflows", 400, body=b'{"weight": 1e999}'),
    Attack("a number of 10,000 digits", 400, body=b'{"weight": ' + b"9" * 10_000 + b"}"),
    Attack("deep lists", 400, body=nested(50_000)),
    Attack("deeper than allowed by one", 400, body=nested(33)),
    Attack("deep objects", 400, body=b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    Attack("only opening", 400, body=b"[" * 100_000),
    Attack("no object", 422, body=[submission()]),
    Attack("a text", 422, body=MARK),
    Attack("unknown key", 422, body=changed(shell="rm -rf /")),
    Attack("a long unknown key", 422, body=changed(**{MARK: 1})),
    Attack("unregistered entry", 422, body=changed(entry="os:system")),
    Attack("a long entry", 422, body=changed(entry=MARK * 2)),
    Attack("unknown parameter", 422, body=changed(parameters={"path": "/etc/passwd"})),
    Attack("a path in a parameter", 422, body=changed(parameters={"width": "/etc/passwd"})),
    Attack("a path as snapshots' folder", 422, body=changed(snapshots={"folder": "/etc"})),
    Attack("a module as schedule", 422, body=pipeline(schedule="os:system")),
    Attack("a file as schedule", 422, body=pipeline(schedule="csv:/etc/passwd")),
    Attack("a device that is not ours", 422, body=pipeline(devices=["cuda:7"])),
    Attack("a negative weight", 422, body=changed(weight=-1)),
    Attack("no weight", 422, body=changed(weight=0)),
    Attack("a huge weight", 422, body=changed(weight=1e300)),
    Attack("a text as number", 422, body=training(steps="10")),
    Attack("true as number", 422, body=training(steps=True)),
    Attack("negative steps", 422, body=training(steps=-1)),
    Attack("too many steps", 422, body=training(steps=10**30)),
    Attack("a million problems", 422, body={str(number): None for number in range(5000)}),
    Attack("a huge name", 422, body=changed(name="n" * 5000)),
    Attack("a name of two lines", 422, body=changed(name="a\nb")),
    Attack("an idempotency key of 1000", 422, headers=BEARER | {"Idempotency-Key": "k" * 1000}),
    Attack("an empty idempotency key", 422, headers=BEARER | {"Idempotency-Key": ""}),
    Attack("10 MB", 413, body=b'"' + b"x" * 10_000_000 + b'"'),
    Attack("unknown job", 404, path=f"/v1/jobs/{NOBODY}/cancel", body={}),
    Attack("a body for an action", 422, path=f"/v1/jobs/{NOBODY}/cancel", body={"force": True}),
    Attack("a path as id", 404, method="GET", body=None, path="/v1/jobs/..%2f..%2fetc%2fpasswd"),
    Attack("a path as page", 404, method="GET", body=None, path="/jobs.js/..%2fapp.py"),
    Attack("wrong method", 405, method="DELETE", body=None),
    Attack("trace", 405, method="TRACE", body=None),
    Attack("preflight", 405, method="OPTIONS", body=None, headers=BEARER | {"Access-Control-Request-Method": "POST"}),
    Attack("an odd event id", 404, method="GET", body=None, path=f"/v1/jobs/{NOBODY}/events"),
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_each_attack_is_refused(tmp_path: Path, attack: Attack) -> None:
    async with mounted(tmp_path, token=TOKEN) as api:
        data = attack.body
        if data is not None and not isinstance(data, bytes):
            data = json.dumps(data).encode()
        headers = (JSON if data is not None else {}) | attack.headers
        place = URL(api.base + attack.path, encoded=True)
        async with api.session.request(
            attack.method, place, data=None if data is None else BytesIO(data), headers=headers
        ) as answer:
            text = await answer.text()
            assert answer.status == attack.status, text
            assert answer.content_type == "application/problem+json"
        check_answer(text, dict(answer.headers), tmp_path)
        assert json.loads(text)["status"] == attack.status
        assert ("WWW-Authenticate" in answer.headers) == (attack.status == 401)
        assert ("Allow" in answer.headers) == (attack.status == 405)
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        assert await api.service.store.list() == ()


def check_answer(text: str, headers: dict[str, str], folder: Path) -> None:
    """Nothing of it is a secret or a path, and little of it is what was sent."""
    everything = text + str(headers)
    for hidden in (
        TOKEN,
        str(folder),
        folder.name,
        str(Path.cwd()),
        "site-packages",
        "Traceback",
        'File "',
        "/etc/passwd",
    ):
        assert hidden not in everything, hidden
    for mark in ("Z", "n", "k", "x", "[", "9"):
        assert mark * 101 not in everything
    assert len(text) < 8000


async def test_who_has_the_token_gets_in(tmp_path: Path) -> None:
    async with mounted(tmp_path, token=TOKEN) as api:
        for headers in (BEARER, basic(f"anyone:{TOKEN}"), basic(f":{TOKEN}"), {"Authorization": f"bearer  {TOKEN}"}):
            assert (await api.ask("GET", "/v1/jobs", **headers))[0] == 200
        assert (await api.ask("GET", "/livez"))[0] == (await api.ask("GET", "/readyz"))[0] == 200
        status, _, headers = await api.ask("GET", "/v1/jobs")
        assert status == 401
        assert {challenge.split()[0] for challenge in headers.getall("WWW-Authenticate")} == {"Bearer", "Basic"}  # type: ignore[attr-defined]
        own = api.base
        more = BEARER | {"Origin": own, "Sec-Fetch-Site": "same-origin"}
        assert (await api.ask("POST", "/v1/jobs", submission(), **more))[0] == 201


async def test_names_that_the_operator_has_given_are_ours(tmp_path: Path) -> None:
    async with mounted(tmp_path, hosts=("train.example",)) as api:
        for origin in ("https://train.example", "https://train.example:8443"):
            headers = {"Host": "train.example", "Origin": origin}
            assert (await api.ask("POST", "/v1/jobs", submission(), **headers))[0] == 201
        assert (await api.ask("GET", "/v1/jobs", Host="example"))[0] == 421


async def test_a_client_that_asks_too_often_waits(tmp_path: Path) -> None:
    async with mounted(tmp_path, requests_per_second=0.5, burst=3, token=TOKEN) as api:
        answers = [await api.ask("GET", "/v1/jobs") for _ in range(5)]
        assert [status for status, _, _ in answers] == [401, 401, 401, 429, 429]
        assert 1 <= int(answers[-1][2]["Retry-After"]) <= 2
        # Probes are not a client's to exhaust.
        assert (await api.ask("GET", "/livez"))[0] == 200
        assert (await api.ask("GET", "/livez", Host="evil.example"))[0] == 429


@pytest.mark.parametrize("path", ["/v1/jobs", "/livez"])
async def test_foreign_names_cannot_fill_the_disk(tmp_path: Path, path: str) -> None:
    async with served(tmp_path, requests_per_second=0.01, burst=3) as api:
        answers = [await api.ask("GET", path, Host="evil.example") for _ in range(5)]
        assert [status for status, _, _ in answers] == [421, 421, 421, 429, 429]
    assert len((tmp_path / "refused.jsonl").read_text().splitlines()) == 3


# Below HTTP


async def raw(api: Api, *parts: bytes, wait: float = 0) -> bytes:
    """What the server says to these bytes until it closes the connection."""
    port = int(api.base.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def head(*lines: str, path: str = "/v1/jobs", method: str = "POST") -> bytes:
    ours = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {TOKEN}"]
    return "\r\n".join([*ours, "Content-Type: application/json", *lines, "", ""]).encode()


CHUNKED = head("Transfer-Encoding: chunked", "Connection: close")
PIECE = b"ffff\r\n" + b"x" * 65535 + b"\r\n"
BELOW: list[tuple[str, bytes, Callable[[], bytes]]] = [
    ("too much, in pieces", b"413", lambda: CHUNKED + PIECE * 3 + b"0\r\n\r\n"),
    ("10 MB declared, not sent", b"413", lambda: head("Content-Length: 10000000", "Connection: close")),
    ("a huge header", b"431", lambda: head(f"X-Huge: {'h' * 20_000}")),
    ("a huge path", b"431", lambda: head(path="/" + "p" * 20_000)),
    ("a thousand headers", b"431", lambda: head(*(f"X-{number}: 1" for number in range(2000)))),
    ("NUL in a header", b"400", lambda: head("X-Nul: a\0b")),
    ("NUL in the path", b"400", lambda: head(path="/\0")),
    ("two lengths", b"400", lambda: head("Content-Length: 1", "Content-Length: 2")),
    ("length and pieces", b"400", lambda: head("Content-Length: 4", "Transfer-Encoding: chunked") + b"0\r\n\r\n"),
    ("a wrong size of a piece", b"400", lambda: head("Transfer-Encoding: chunked", "Connection: close") + b"zz\r\n"),
    ("no HTTP", b"400", lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    ("no host", b"421", lambda: b"GET /v1/jobs HTTP/1.0\r\n\r\n"),
    ("an odd expectation", b"417", lambda: head(f"Expect: {MARK}", "Content-Length: 0", "Connection: close")),
    ("an odd expectation nowhere", b"417",
     lambda: head(f"Expect: {MARK}", "Content-Length: 0", "Connection: close", path="/x")),
    ("a slow body", b"408", lambda: head("Content-Length: 100", "Connection: close") + b"{"),
    ("a slow body in pieces", b"408", lambda: head("Transfer-Encoding: chunked", "Connection: close") + b"1\r\n{\r\n"),
]  # fmt: skip


async def test_what_is_hardly_http_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connection, problems):
        monkeypatch.setattr(module, "LINGER_SECONDS", 0.05)
    async with served(tmp_path, token=TOKEN, body_seconds=0.2) as api:

        async def attack(name: str, status: bytes, make: Callable[[], bytes]) -> None:
            answer = await raw(api, make())
            assert answer.split(b" ")[1] == status, (name, answer[:300])
            assert b"application/problem+json" in answer
            check_answer(answer.decode(), {}, tmp_path)
            assert b"h" * 101 not in answer
            assert b"p" * 101 not in answer

        await asyncio.gather(*(attack(*each) for each in BELOW))
        assert (await api.ask("GET", "/v1/jobs", **BEARER))[0] == 200


async def test_a_head_that_comes_slowly_ends_the_connection(tmp_path: Path) -> None:
    async with served(tmp_path, header_seconds=0.2) as api:
        assert await raw(api) == b""
        assert await raw(api, b"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ") == b""
        # Also the second one on a connection.
        whole = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        assert (await raw(api, whole + b"GET /livez HT")).startswith(b"HTTP/1.1 200")


async def test_a_head_may_not_come_drop_by_drop_either(tmp_path: Path) -> None:
    async with served(tmp_path, header_seconds=0.3) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(api.base.rpartition(":")[2]))
        dropping = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(5):
            writer.write(b"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Drops: ")
            while not dropping.done():
                if not writer.is_closing():
                    writer.write(b"x")
                await asyncio.wait([dropping], timeout=0.02)
        assert dropping.exception() is not None or dropping.result() == b""
        writer.close()


WHOLE = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (WHOLE + b"\r\n\0\r\n\r\n", [200]),  # What is malformed comes behind a request, whose answer is the last.
        (WHOLE + b"\r\n" + WHOLE + b"\r\n" + WHOLE + b"Connection: close\r\n\r\n", [200, 200, 200]),
        (WHOLE + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n" + WHOLE + b"\r\n", [200]),
        (WHOLE + b"Connection: upgrade, http2-settings\r\nUpgrade: h2c\r\n\r\nPRI * HTTP/2.0\r\n\r\n", [200]),
        (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n", [400]),
        (b"GET http://evil.example/v1/jobs HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", [421]),
        (b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", [404]),
    ],
    ids=["malformed behind", "pipelined", "websocket", "http2", "connect", "absolute", "asterisk"],
)
async def test_what_is_unusual_but_http_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, answers: list[int]
) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.05)
    async with served(tmp_path) as api:
        said = await raw(api, sent)
        assert [int(each[:3]) for each in said.split(b"HTTP/1.1 ")[1:]] == answers, said


async def test_a_header_without_an_end_is_refused_long_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.05)
    async with served(tmp_path) as api:
        pieces = [b"h" * 16_384] * (connection.MOST_HEAD // 16_384 + 1)
        said = await raw(api, b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Endless: ", *pieces)
        assert said.startswith(b"HTTP/1.1 431 "), said


async def test_the_log_of_another_uvicorn_in_the_process_goes_on(tmp_path: Path) -> None:
    logger, handler = logging.getLogger("uvicorn.access"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        async with served(tmp_path):
            assert (logger.handlers, logger.propagate) == ([handler], True)
    finally:
        logger.removeHandler(handler)


async def test_who_is_answered_keeps_the_place(tmp_path: Path) -> None:
    async with served(tmp_path, max_connections=1) as api, AsyncExitStack() as stack:
        place = f"/v1/jobs/{await api.submitted()}/events"
        stream = await stack.enter_async_context(api.session.get(api.base + place))
        answer = await raw(api, b"GET /v1/jobs HTTP/1.1\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        for path in (b"/livezz", b"//livez", b"http://127.0.0.1/livez", b"*", b"\xff" * 80):
            assert (await raw(api, b"GET " + path + b" HTTP/1.1\r\n")).startswith(b"HTTP/1.1 503 "), path
        # Probes are answered beyond that, once on each connection, and with all other checks.
        ask = b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n"
        answer = await raw(
            api, b"GET /li", b"vez HTTP/1.1\r\nHost: localhost\r\n", b"\r\n" + ask % (b"/v1/jobs", b"::1")
        )
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert (await raw(api, ask % (b"/readyz?full", b"127.0.0.1"))).startswith(b"HTTP/1.1 200 ")
        assert (await raw(api, ask % (b"/livez", b"evil.example"))).startswith(b"HTTP/1.1 421 ")
        api.service.tell(place.split("/")[3], "note", level=20, text="still there")
        assert b"still there" in await stream.content.readuntil(b"there")


async def test_a_port_of_their_own_answers_probes_alone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with served(tmp_path, probe_port=port) as api:
        for path, status in (("/livez", 200), ("/readyz", 200), ("/v1/jobs", 503), ("/", 503)):
            async with api.session.get(f"http://127.0.0.1:{port}{path}") as answer:
                assert answer.status == status, path
        assert (await api.ask("GET", "/v1/jobs"))[0] == 200
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_place_is_held_by_asking_and_not_by_being_connected(tmp_path: Path) -> None:
    async with served(tmp_path, max_connections=2) as api:
        port = int(api.base.rpartition(":")[2])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _ in range(2):  # The second time on a connection that was idle, or on another one.
            assert (await api.ask("GET", "/v1/jobs"))[0] == 200
        for reader, writer in held[:18]:
            assert await reader.read() == b""
            writer.close()
        held[19][1].close()
        held[18][1].close()


async def test_who_has_no_token_keeps_no_place_whatever_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "LINGER_SECONDS", 60)
    async with served(tmp_path, token=TOKEN, max_connections=1) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(api.base.rpartition(":")[2]))
        # An answer that is followed by waiting for a body.
        writer.write(b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: nothing\r\nContent-Length: 9\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 417 Expectation Failed\r\n"
        assert (await api.ask("GET", "/v1/jobs", **BEARER))[0] == 200
        await reader.read()
        writer.close()


async def test_who_has_no_place_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROBE_SECONDS", 0.1)
    async with (
        served(tmp_path, max_connections=1) as api,
        api.session.get(f"{api.base}/v1/jobs/{await api.submitted()}/events"),
    ):
        assert (await raw(api)).startswith(b"HTTP/1.1 503 ")
        assert (await raw(api, b"GET /livez HTTP/1.1\r\n")) == b"", "a probe whose head does not end"


async def test_a_client_that_takes_nothing_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 0.2)
    async with served(tmp_path) as api:
        job = await api.submitted()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # Soon full, so that little has to be sent.
        client.connect(("127.0.0.1", int(api.base.rpartition(":")[2])))
        client.setblocking(False)
        _reader, writer = await asyncio.open_connection(sock=client)
        writer.write(f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        await _reader.readline()
        writer.transport.pause_reading()
        async with asyncio.timeout(40):
            while api.service.followers:
                for _ in range(100):
                    api.service.tell(job, "note", level=20, text="x" * 2000)
                await asyncio.sleep(0)
        writer.close()


async def test_an_address_that_others_reach_needs_a_token(tmp_path: Path) -> None:
    settings = make_settings(tmp_path).model_copy(update={"address": "0.0.0.0"})
    with pytest.raises(OptionError, match="needs a token"):
        async with serve_api(object(), settings):  # type: ignore[arg-type]
            pass
    assert not (tmp_path / "audit.jsonl").exists()
