"""Tokens: made and revoked beside a service that runs, which knows at once, in a file of hashes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from asyncpipe import cli
from asyncpipe.errors import OptionError
from asyncpipe.service.known_tokens import KnownTokens, TokenHolder
from asyncpipe.service.token_roles import (
    TOKENS,
    TokenFileError,
    TokenRole,
    create_token,
    read_tokens,
    revoke_token,
)

OWN = "correct-horse-battery-staple"


def known(path: Path, own: str | None = None) -> KnownTokens:
    return KnownTokens(path, None if own is None else SecretStr(own), clock=lambda: 7.0)


def test_roles_include_those_before() -> None:
    table = {(role, needed): role.may(needed) for role in TokenRole for needed in TokenRole}
    assert [table[role, needed] for role in TokenRole for needed in TokenRole] == [
        True, False, False,
        True, True, False,
        True, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["", " ", "a b", "../x", "-x", "n" * 65, "ä", "a\n", "service"])
def test_names_that_no_token_and_no_user_has(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="name"):
        create_token(tmp_path, name, TokenRole.READ)
    with pytest.raises(OptionError, match="name"):
        create_token(tmp_path, "ci", TokenRole.READ, user=name)
    if name != "service":
        with pytest.raises(OptionError, match="a team's name"):
            create_token(tmp_path, "ci", TokenRole.READ, teams=["vision", name])
    assert not list(tmp_path.iterdir())


def test_a_token_of_a_former_version_is_one_of_a_user_of_its_name(tmp_path: Path) -> None:
    secret, record = create_token(tmp_path, "ci", TokenRole.SUBMIT, user="alice", teams=["vision"])
    kept = {key: value for key, value in record._asdict().items() if key not in ("user", "teams")}
    (tmp_path / TOKENS).write_text(json.dumps([kept]))
    assert known(tmp_path).holder(secret.encode()) == TokenHolder("ci", TokenRole.SUBMIT, (), "ci")
    create_token(tmp_path, "cd", TokenRole.READ, user="ci", teams=["nlp"])
    assert [(each.user, each.teams) for each in read_tokens(tmp_path) or ()] == [("ci", ()), ("ci", ("nlp",))]


@pytest.mark.promise(
    "Security", "A revoked token is refused from the next request on; the service stores only hashes of tokens."
)
def test_the_file_has_no_token(tmp_path: Path) -> None:
    secret, record = create_token(tmp_path, "ci", TokenRole.SUBMIT)
    assert len(secret) > 40
    assert record.name == "ci"
    assert all(secret[-20:].encode() not in file.read_bytes() for file in tmp_path.iterdir())
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())


def test_a_name_is_given_once_until_it_is_revoked(tmp_path: Path) -> None:
    store = tmp_path
    first, _ = create_token(store, "ci", TokenRole.READ)
    with pytest.raises(OptionError, match="in use already"):
        create_token(store, "ci", TokenRole.READ)
    assert revoke_token(store, "ci").name == "ci"
    with pytest.raises(OptionError, match="there is no token"):
        revoke_token(store, "ci")
    second, _ = create_token(store, "ci", TokenRole.OPERATE)
    tokens = known(store)
    assert tokens.holder(first.encode()) is None
    holder = tokens.holder(second.encode())
    assert holder is not None
    assert holder.role is TokenRole.OPERATE
    assert [token.role for token in read_tokens(store) or ()] == ["operate"]


@pytest.mark.promise(
    "Security", "A revoked token is refused from the next request on; the service stores only hashes of tokens."
)
def test_a_service_that_runs_knows_at_once(tmp_path: Path) -> None:
    store = tmp_path
    tokens = known(store)
    assert not tokens.is_required
    secret, _ = create_token(store, "ci", TokenRole.SUBMIT)
    assert tokens.is_required
    holder = tokens.holder(secret.encode())
    assert holder is not None
    create_token(store, "other", TokenRole.READ)
    assert tokens.holder(secret.encode()) == holder
    revoke_token(store, "ci")
    assert tokens.holder(secret.encode()) is None
    revoke_token(store, "other")
    assert tokens.is_required, "revoking the last one opens nothing"


def test_a_token_is_valid_until_it_expires(tmp_path: Path) -> None:
    now = 5.0
    secret, record = create_token(tmp_path, "ci", TokenRole.READ, expires=9.0)
    tokens = KnownTokens(tmp_path, None, clock=lambda: now)
    assert tokens.holder(secret.encode()) is not None
    now = 9.0
    assert tokens.holder(secret.encode()) is None
    assert create_token(tmp_path, "ci", TokenRole.READ)[1] != record, "its name may be given again"


def test_the_token_of_the_settings_needs_no_file(tmp_path: Path) -> None:
    tokens = known(tmp_path, OWN)
    assert tokens.is_required
    holder = tokens.holder(OWN.encode())
    assert holder is not None
    assert (holder.user, holder.token, holder.role) == ("service", "service", TokenRole.OPERATE)
    assert tokens.holder(b"another") is None


@pytest.mark.promise(
    "Security", "A revoked token is refused from the next request on; the service stores only hashes of tokens."
)
@pytest.mark.parametrize("content", ["", "{", "[{}]", '[{"name": "ci", "role": "all"}]', "3"])
def test_tokens_that_cannot_be_read_let_nobody_in(tmp_path: Path, content: str) -> None:
    secret, _ = create_token(tmp_path, "ci", TokenRole.READ)
    tokens = known(tmp_path)
    assert tokens.holder(secret.encode()) is not None
    (tmp_path / TOKENS).write_text(content)
    for _ in range(2):
        with pytest.raises(TokenFileError, match="cannot be read"):
            tokens.holder(secret.encode())
    with pytest.raises(TokenFileError):
        create_token(tmp_path, "other", TokenRole.READ)


def test_two_commands_do_not_lose_each_others_tokens(tmp_path: Path) -> None:
    create_token(tmp_path, "ci", TokenRole.READ)
    (tmp_path / f"{TOKENS}.new").touch()  # Another command writes it.
    with pytest.raises(TokenFileError, match="another command writes it"):
        create_token(tmp_path, "other", TokenRole.READ)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in os.environ if name.startswith("ASYNCPIPE_")]:
        monkeypatch.delenv(name)
    folder = ["--folder", str(tmp_path / "new")]

    def run(*arguments: str) -> Any:
        status = cli.main(["service", "tokens", *arguments, *folder])
        return (status, *capsys.readouterr())

    status, secret, told = run(
        "create", "ci", "--role", "submit", "--user", "alice", "--team", "vision", "--team", "nlp"
    )
    assert status == 0
    assert told == "token ci of alice (vision, nlp) may submit; it is shown this once:\n"
    holder = known(tmp_path / "new").holder(secret.strip().encode())
    assert holder is not None
    assert (holder.user, holder.teams, holder.token) == ("alice", ("vision", "nlp"), "ci")
    head, row = run("list")[1].splitlines()[:2]
    assert head.split() == ["NAME", "USER", "TEAMS", "ROLE", "CREATED", "EXPIRES"]
    assert row.split()[:4] == ["ci", "alice", "vision,nlp", "submit"]
    assert '"role": "submit"' in run("list", "--json")[1]
    assert secret.strip() not in run("list", "--json")[1]
    assert run("revoke", "ci")[:2] == (0, "revoked ci, which could submit\n")
    status, _, told = run("revoke", "ci")
    assert status == 2
    assert "no token 'ci'" in told
    audit = [json.loads(line) for line in (tmp_path / "new" / "audit.jsonl").read_text().splitlines()]
    assert [(line["token"], line["what"]) for line in audit] == [
        ("ci", "token created of alice (vision, nlp), may submit"),
        ("ci", "token revoked, could submit"),
    ]
    assert {line["client"] for line in audit} == {f"user {os.getuid()}"}
    assert secret.strip() not in str(audit)
