"""Single sign-on: a user is whom a listed proxy names, and nobody else gets in by saying who he is."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from http_helpers import Api, make_settings, mounted, served, submission
from nginx import NGINX, proxied

from asyncpipe.service.settings.service_settings import SettingsError
from asyncpipe.service.token_roles import TokenRole, create_token

pytestmark = [pytest.mark.usefixtures("no_leaks")]

USER, GROUPS = "X-Forwarded-User", "X-Forwarded-Groups"
SIGN_ON: dict[str, Any] = {
    "user_header": USER,
    "groups_header": GROUPS,
    "user_proxies": ["127.0.0.1"],
    "operators": ["carol"],
}


async def said(api: Api, *headers: tuple[str, str], path: str = "/v1/me") -> tuple[int, str]:
    """The status, and the body without its head's end, of a request with these very headers."""
    host, port = api.base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = "".join(f"{name}: {value}\r\n" for name, value in (("Host", host), ("Connection", "close"), *headers))
    writer.write(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), answer.decode().partition("\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("headers", "user", "role", "teams"),
    [
        ({USER: "alice"}, "alice", "submit", []),
        ({USER: "a@example.org", GROUPS: "vision, /nlp,a:b,,vision"}, "a@example.org", "submit", ["vision", "nlp"]),
        ({USER: "carol", GROUPS: ""}, "carol", "operate", []),
        ({USER.lower(): "alice", "X-Forwarded-For": "6.6.6.6"}, "alice", "submit", []),
        ({USER: "alice", "Authorization": "Basic YWxpY2U6"}, "alice", "submit", []),
    ],
)  # fmt: skip
async def test_the_proxy_names_the_user(
    tmp_path: Path, headers: Mapping[str, str], user: str, role: str, teams: list[str]
) -> None:
    async with served(tmp_path, trusted_proxies=["127.0.0.1"], **SIGN_ON) as api:
        _, me, _ = await api.ask("GET", "/v1/me", **headers)
        assert (me["user"], me["role"], me["teams"]) == (user, role, teams)
        assert (await api.ask("GET", "/v1/me"))[0] == 401, "without the header a token is needed"
        _, job, _ = await api.ask("POST", "/v1/jobs", submission(), **headers)
        assert (job["owner"], job["teams"]) == (user, teams)


def password(user: str, text: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{text}".encode()).decode()}


ATTACKS = {
    "twice": [(USER, "alice"), (USER, "carol")],
    "twice, in other letters": [(USER, "alice"), (USER.upper(), "carol")],
    "with underscores": [("X_Forwarded_User", "carol")],
    "with underscores too": [(USER, "alice"), ("X_Forwarded_User", "carol")],
    "with one underscore": [(USER, "alice"), ("X-Forwarded_User", "carol")],
    "empty": [(USER, "")],
    "not ASCII": [(USER, "car\xf6l")],
    "two users": [(USER, "alice,carol")],
    "the token of the settings": [(USER, "service")],
    "too long": [(USER, "a" * 65)],
    "groups twice": [(USER, "alice"), (GROUPS, "vision"), (GROUPS, "nlp")],
    "groups with underscores": [(USER, "alice"), ("X_Forwarded_Groups", "nlp")],
}
"""Refused although they come from the proxy: it may have passed on what a client sent."""
FROM_ELSEWHERE = {
    "plain": [(USER, "carol")],
    "with underscores": [("X_Forwarded_User", "carol")],
    "groups alone": [(GROUPS, "vision")],
    "as if from the proxy": [(USER, "carol"), ("X-Forwarded-For", "10.0.0.7")],
    "as if from the proxy, twice": [(USER, "carol"), ("X-Forwarded-For", "10.0.0.7"), ("X-Forwarded-For", "10.0.0.7")],
    "as if from the proxy, otherwise": [(USER, "carol"), ("Forwarded", "for=10.0.0.7"), ("X-Real-IP", "10.0.0.7")],
}


async def test_what_the_proxy_may_have_passed_on_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, **SIGN_ON) as api:
        found = {name: (await said(api, *headers))[0] for name, headers in ATTACKS.items()}
        assert found == dict.fromkeys(ATTACKS, 403)


@pytest.mark.parametrize("trusted", [[], ["127.0.0.1"]])
async def test_nobody_else_is_believed(tmp_path: Path, trusted: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncpipe.audit")
    # The client's address, as X-Forwarded-For says it through a trusted proxy, is that of the proxy that names users.
    settings = {**SIGN_ON, "user_proxies": ["10.0.0.7"], "trusted_proxies": trusted}
    async with served(tmp_path, **settings) as api:
        secret, _ = create_token(tmp_path, "ci", TokenRole.READ)
        token = ("Authorization", f"Bearer {secret}")
        for name, headers in FROM_ELSEWHERE.items():
            assert (await said(api, *headers))[0] == 403, name
            status, text = await said(api, token, *headers)
            assert status == 403, f"{name}, with a token"
            assert "believed from the addresses in user_proxies alone" in text
        assert (await said(api, token))[0] == 200
        assert (await said(api, (USER, "carol"), path="/livez"))[0] == 200, "a probe is nobody's"
    refused = [each for each in caplog.records if each.name == "asyncpipe.audit.refused"]
    assert len(refused) == 2 * len(FROM_ELSEWHERE)


async def test_a_request_is_one_users(tmp_path: Path) -> None:
    async with served(tmp_path, **SIGN_ON) as api:
        secret, _ = create_token(tmp_path, "ci", TokenRole.OPERATE, user="bob")
        token = {"Authorization": f"Bearer {secret}"}
        status, answer, _ = await api.ask("GET", "/v1/me", **{USER: "alice"}, **token)
        detail = "the proxy names alice, and the token is one of bob: send one of them"
        assert (status, answer["detail"]) == (403, detail)
        assert (await api.ask("GET", "/v1/me", **token))[1]["user"] == "bob"


async def test_under_a_server_that_is_not_ours_no_header_is_believed(tmp_path: Path) -> None:
    async with mounted(tmp_path, **SIGN_ON) as api:
        assert (await api.ask("GET", "/v1/me", **{USER: "alice"}))[0] == 403


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"user_header": USER}, "user_proxies: missing"),
        ({"user_proxies": ["10.0.0.7"]}, "user_header: missing"),
        ({"operators": ["carol"]}, "user_header: missing"),
        ({"groups_header": GROUPS}, "user_header: missing"),
        ({"user_header": "X Forwarded", "user_proxies": ["10.0.0.7"]}, "must be the name of a header"),
        ({"user_header": USER, "user_proxies": ["0.0.0.0/0"]}, "user_proxies: .*everybody"),
        ({**SIGN_ON, "operators": ["car ol"]}, "operators: must be a list of users"),
        ({**SIGN_ON, "proxy_role": "operate"}, "proxy_role: .* read or submit"),
    ],
)  # fmt: skip
def test_settings_that_would_let_anybody_in_or_do_nothing(tmp_path: Path, wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        make_settings(tmp_path, **wrong)


def test_a_proxy_that_names_users_is_as_good_as_a_token(tmp_path: Path) -> None:
    assert make_settings(tmp_path, address="0.0.0.0", **SIGN_ON).token is None


@pytest.mark.skipif(NGINX is None, reason="no nginx: apt-get install nginx-light")
async def test_behind_a_real_proxy(tmp_path: Path) -> None:
    users = [f'"{password(user, f"of-{user}")["Authorization"]}" {user};' for user in ("alice", "carol")]
    replaced = {
        "upstream asyncpipe {": f"map $http_authorization $signed_in {{ {' '.join(users)} }}\nupstream asyncpipe {{",
        f'proxy_set_header {USER} "";': f'proxy_set_header {USER} $signed_in; if ($signed_in = "") {{ return 401; }}',
    }
    async with served(tmp_path / "service", trusted_proxies=["127.0.0.1"], **SIGN_ON) as api:
        port = int(api.base.rpartition(":")[2])
        with proxied(tmp_path / "nginx", port, replaced=replaced) as place:
            base = f"http://{place[0]}:{place[1]}"
            async with ClientSession(headers=password("alice", "of-alice")) as session:
                there = Api(session, base, api.service)
                for spoofed in ({}, {USER: "carol"}, {"X_Forwarded_User": "carol"}, {GROUPS: "vision"}):
                    async with session.get(f"{base}/v1/me", headers=spoofed) as answer:
                        me = await answer.json()
                    assert (me["user"], me["role"], me["teams"]) == ("alice", "submit", []), spoofed
                job = await there.submitted()
            async with ClientSession() as session:
                assert (await Api(session, base, api.service).ask("GET", "/v1/me", **{USER: "carol"}))[0] == 401
            async with ClientSession(headers=password("carol", "of-carol")) as session:
                there = Api(session, base, api.service)
                assert (await there.ask("POST", f"/v1/jobs/{job}/cancel", {}))[0] == 200
        # Beside the proxy, from its own machine: which is why only a machine that runs nothing else is to be listed.
        assert (await api.ask("GET", "/v1/me"))[0] == 401
