"""What must not get in: each attack is refused with its status, and no answer tells a secret, a path or much of it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from http_helpers import JSON, NOBODY, TOKEN, Api, make_settings, mounted, served, submission
from yarl import URL

from asyncpipe.errors import OptionError
from asyncpipe.service.http import serve_api

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
    Attack("plain text", 422, headers=BEARER | {"Content-Type": "text/plain"}),
    Attack("a form", 422, body=b"name=x", headers=BEARER | {"Content-Type": "application/x-www-form-urlencoded"}),
    Attack("no type", 422, headers=BEARER | {"Content-Type": ""}),
    Attack("no JSON", 400, body=b"{"),
    Attack("nothing", 422, body=b""),
    Attack("not UTF-8", 400, body=b'{"name": "\xff"}'),
    Attack("NUL bytes", 400, body=b"\x00" * 100),
    Attack("half a surrogate pair", 400, body=b'{"name": "\\ud800"}'),
    Attack("NaN", 400, body=b'{"weight": NaN}'),
    Attack("infinity", 400, body=b'{"weight": -Infinity}'),
    Attack("a number of 10,000 digits", 400, body=b'{"weight": ' + b"9" * 10_000 + b"}"),
    Attack("deep lists", 400, body=nested(8_000)),
    Attack("deep objects", 400, body=b'{"a":' * 2_600 + b"1" + b"}" * 2_600),
    Attack("only opening", 400, body=b"[" * 16_000),
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
    Attack("hundreds of problems", 422, body={str(number): None for number in range(900)}),
    Attack("a huge name", 422, body=changed(name="n" * 5000)),
    Attack("a name of two lines", 422, body=changed(name="a\nb")),
    Attack("an idempotency key of 1000", 422, headers=BEARER | {"Idempotency-Key": "k" * 1000}),
    Attack("an empty idempotency key", 422, headers=BEARER | {"Idempotency-Key": ""}),
    Attack("10 MB", 413, body=b'"' + b"x" * 10_000_000 + b'"'),
    Attack("unknown job", 404, path=f"/v1/jobs/{NOBODY}/cancel", body={}),
    Attack("a path as id", 404, method="GET", body=None, path="/v1/jobs/..%2f..%2fetc%2fpasswd"),
    Attack("a path as page", 404, method="GET", body=None, path="/jobs.js/..%2fapp.py"),
    Attack("wrong method", 405, method="DELETE", body=None),
    Attack("trace", 405, method="TRACE", body=None),
    Attack("preflight", 405, method="OPTIONS", body=None, headers=BEARER | {"Access-Control-Request-Method": "POST"}),
    Attack("an odd event id", 404, method="GET", body=None, path=f"/v1/jobs/{NOBODY}/events"),
]  # fmt: skip


async def test_each_attack_is_refused(tmp_path: Path) -> None:
    async with mounted(tmp_path, token=TOKEN) as api:
        for attack in ATTACKS:
            data = attack.body
            if data is not None and not isinstance(data, bytes):
                data = json.dumps(data).encode()
            headers = (JSON if data is not None else {}) | attack.headers
            place = URL(api.base + attack.path, encoded=True)
            async with api.session.request(
                attack.method, place, data=None if data is None else BytesIO(data), headers=headers
            ) as answer:
                text = await answer.text()
            assert answer.status == attack.status, (attack.name, text)
            assert answer.content_type == ("text/plain" if attack.status == 413 else "application/problem+json")
            check_answer(text, dict(answer.headers), tmp_path)
            assert ("WWW-Authenticate" in answer.headers) == (attack.status == 401), attack.name
            assert ("Allow" in answer.headers) == (attack.status == 405), attack.name
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


# Below HTTP


async def raw(api: Api, *parts: bytes) -> bytes:
    """What the server says to these bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.base.rpartition(":")[2]))
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


PIECE = b"1fff\r\n" + b"x" * 0x1FFF + b"\r\n"
BELOW: list[tuple[str, bytes, Callable[[], bytes]]] = [
    ("too much, in pieces", b"413",
     lambda: head("Transfer-Encoding: chunked", "Connection: close") + PIECE * 3 + b"0\r\n\r\n"),
    ("10 MB declared, not sent", b"413", lambda: head("Content-Length: 10000000", "Connection: close")),
    ("a huge header", b"400", lambda: head(f"X-Huge: {'h' * 100_000}")[:-4]),
    ("a huge path", b"400", lambda: head(path="/" + "p" * 100_000)[:-4]),
    ("NUL in a header", b"400", lambda: head("X-Nul: a\0b")),
    ("two lengths", b"400", lambda: head("Content-Length: 1", "Content-Length: 2")),
    ("two tokens", b"401",
     lambda: head(f"Authorization: Bearer {TOKEN}", "Content-Length: 2", "Connection: close") + b"{}"),
    ("no HTTP", b"400", lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    ("no host", b"421", lambda: b"GET /v1/jobs HTTP/1.0\r\n\r\n"),
    ("a foreign host in the path", b"421",
     lambda: b"GET http://evil.example/v1/jobs HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"),
]  # fmt: skip


async def test_what_is_hardly_http_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, token=TOKEN) as api:

        async def attack(name: str, status: bytes, make: Callable[[], bytes]) -> None:
            answer = await raw(api, make())
            assert answer.split(b" ")[1] == status, (name, answer[:300])
            check_answer(answer.decode(), {}, tmp_path)

        await asyncio.gather(*(attack(*each) for each in BELOW))
        assert (await api.ask("GET", "/v1/jobs", **BEARER))[0] == 200


async def test_connections_beyond_the_limit_are_told(tmp_path: Path) -> None:
    async with (
        served(tmp_path, max_connections=2) as api,
        api.session.get(f"{api.base}/v1/jobs/{await api.submitted()}/events"),
    ):
        assert (await raw(api, b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")).startswith(b"HTTP/1.1 503 ")


async def test_an_address_that_others_reach_needs_a_token(tmp_path: Path) -> None:
    settings = make_settings(tmp_path).model_copy(update={"address": "0.0.0.0"})
    with pytest.raises(OptionError, match="needs a token"):
        async with serve_api(object(), settings):  # type: ignore[arg-type]
            pass
