"""Who may do what over HTTP: tokens with roles, rates by token and by address, and the audit, which says who."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_helpers import NOBODY, TOKEN, Api, mounted, served, submission

from asyncpipe.service import known_tokens
from asyncpipe.service.http.places import Places
from asyncpipe.service.http.routes import ROUTES
from asyncpipe.service.token_roles import TokenRole, create_token, revoke_token

pytestmark = [pytest.mark.usefixtures("no_leaks")]


def token(api: Api, name: str, role: str) -> dict[str, str]:
    """Headers with a new token."""
    secret, _ = create_token(api.service.settings.folder, name, TokenRole(role))
    return {"Authorization": f"Bearer {secret}"}


async def status(api: Api, method: str, path: str, body: Any = None, **headers: str) -> int:
    return (await api.ask(method, path, body, **headers))[0]


async def test_each_role_may_what_it_says(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        assert await status(api, "GET", "/v1/jobs") == 200
        roles = {role: token(api, f"my-{role}", role) for role in ("read", "submit", "operate")}
        assert await status(api, "GET", "/v1/jobs") == 401, "from the first token on, one is needed"
        for role, asked in roles.items():
            for path in ("/v1/jobs", "/", "/v1/workers", "/v1/openapi.json"):
                assert await status(api, "GET", path, **asked) == 200
            may_submit, may_operate = role != "read", role == "operate"
            for path, body, may, done in (
                ("/v1/jobs", submission(), may_submit, 201),
                (f"/v1/jobs/{NOBODY}/cancel", {}, may_submit, 404),
                ("/v1/workers/a/drain", {}, may_operate, 200),
            ):
                found, answer, _ = await api.ask("POST", path, body, **asked)
                assert found == (done if may else 403), (role, path)
                if not may:
                    assert answer["detail"].startswith(f"the token 'my-{role}' may {role}; this needs one that may ")
        document = (await api.ask("GET", "/v1/openapi.json", **roles["read"]))[1]
        assert document["paths"]["/v1/jobs"]["post"]["x-role"] == "submit"
        assert document["paths"]["/v1/jobs"]["post"]["security"]


def test_a_change_that_says_nothing_else_is_the_operators() -> None:
    roles = {(method, route.path): route.role for route in ROUTES if route.guarded for method in route.methods or ()}
    asked_for_less = {path for (method, path), role in roles.items() if method != "GET" and role != TokenRole.OPERATE}
    assert all(path.startswith("/v1/jobs") for path in asked_for_less)
    assert {f"/v1/jobs/{{id}}/{what}" for what in ("pause", "cancel", "retry", "fork")} <= asked_for_less
    assert all(role is TokenRole.READ for (method, _), role in roles.items() if method == "GET")
    assert all(role is TokenRole.OPERATE for (method, _), role in roles.items() if method == "DELETE")


async def test_the_audit_says_who(tmp_path: Path) -> None:
    async with served(tmp_path, token=TOKEN) as api:
        ci, reader = token(api, "ci", "submit"), token(api, "ada", "read")
        for asked in (ci, {"Authorization": f"Bearer {TOKEN}"}, reader, {}):
            await api.ask("POST", "/v1/jobs", submission(), **asked)
    told = [
        (line["token"], line.get("status"))
        for name in ("audit.jsonl", "refused.jsonl")
        for line in map(json.loads, (tmp_path / name).read_text().splitlines())
    ]
    assert told == [("ci", None), ("service", None), ("ada", 403), (None, 401)]


async def test_a_revoked_token_ends_at_once_and_so_does_what_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_tokens, "REFRESH_SECONDS", 0.01)
    async with served(tmp_path) as api:
        ci, other = token(api, "ci", "submit"), token(api, "other", "read")
        _, job, _ = await api.ask("POST", "/v1/jobs", submission(), **ci)
        async with (
            api.service.tokens.kept(),
            api.session.get(f"{api.base}/v1/jobs/{job['id']}/events", headers=ci) as stream,
            api.session.get(f"{api.base}/v1/jobs/{job['id']}/events", headers=other) as kept,
        ):
            await stream.content.readline()
            revoke_token(api.service.settings.folder, "ci")
            assert await status(api, "GET", "/v1/jobs", **ci) == 401
            await stream.content.read()  # It ends.
            assert await status(api, "GET", "/v1/jobs", **other) == 200
            api.service.tell(job["id"], "note", level=20, text="goes on")
            assert b"goes on" in await kept.content.readuntil(b"goes on")


async def test_rates_are_by_token_once_it_is_known_and_by_address_before(tmp_path: Path) -> None:
    few = {"requests_per_second": 0.01, "burst": 2, "token_requests_per_second": 0.01, "token_burst": 3}
    async with mounted(tmp_path, **few) as api:
        first, second = token(api, "first", "read"), token(api, "second", "read")

        async def asked(**headers: str) -> int:
            return await status(api, "GET", "/v1/jobs", **headers)

        assert [await asked(**first) for _ in range(4)] == [200, 200, 200, 429]
        assert [await asked(**second) for _ in range(2)] == [200, 200], "nobody waits for another"
        assert [await asked() for _ in range(3)] == [401, 401, 429]
        assert await asked(**second) == 429, "who guesses is not told which guess was right"


async def test_behind_a_proxy_each_client_is_one(tmp_path: Path) -> None:
    few = {"requests_per_second": 0.01, "burst": 1}

    async def asked(api: Api, *clients: str) -> list[int]:
        return [await status(api, "GET", "/v1/jobs", Forwarded=f"for={client}") for client in clients]

    async with mounted(tmp_path / "trusted", trusted_proxies=["127.0.0.0/8"], **few) as api:
        assert await asked(api, "192.0.2.1", "192.0.2.2", "192.0.2.1") == [200, 200, 429]
    async with mounted(tmp_path / "not", **few) as api:
        assert await asked(api, "192.0.2.1", "192.0.2.2") == [200, 429]
    async with served(tmp_path / "audit", trusted_proxies=["127.0.0.1"]) as api:
        await api.ask("POST", "/v1/jobs", submission(), Forwarded="for=6.6.6.6, for=192.0.2.1")
    line = json.loads((tmp_path / "audit" / "audit.jsonl").read_text())
    assert line["client"] == "192.0.2.1"


class Held:
    """A connection."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name = name
        self.told = told

    def give_way(self) -> None:
        self.told.append(f"{self.name} gives way")

    def turn_away(self) -> None:
        self.told.append(f"{self.name} is turned away")


def test_who_gives_way() -> None:
    told: list[str] = []
    places = Places(3, probes=2)
    a, b, c, d, e, f, g, h = (Held(name, told) for name in "abcdefgh")
    assert all(places.came(each) for each in (a, b, c))
    places.asks(a)
    places.rests(a)
    places.asks(b)
    assert places.came(d)
    assert told == ["c gives way"], "who never asked, before who was answered"
    places.asks(d)
    assert places.came(e)
    assert told[1:] == ["a gives way"]
    places.asks(e)
    assert not any(places.came(each) for each in (f, g, h))
    assert told[2:] == ["f is turned away"]
    places.left(b)
    assert places.came(a)
    places.asks(f)  # Its request had come before it was told.
    places.left(f)
    assert told[3:] == []
