"""Tokens: made and revoked beside a service that runs, which knows at once, and keeps hashes alone."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from asyncpipe import cli
from asyncpipe.errors import OptionError
from asyncpipe.service import known_tokens
from asyncpipe.service.known_tokens import KnownTokens
from asyncpipe.service.store.database import STORE, StoreError
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.store.token_changes import create_token, list_tokens, revoke_token
from asyncpipe.service.token_roles import TokenConflictError, TokenRole, UnknownTokenError

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
def test_names_that_no_token_has(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="name"):
        create_token(tmp_path / STORE, name, TokenRole.READ)
    assert not list(tmp_path.iterdir())


def test_the_store_has_no_token(tmp_path: Path) -> None:
    secret, record = create_token(tmp_path / STORE, "ci", TokenRole.SUBMIT)
    assert len(secret) > 40
    assert record.name == "ci"
    assert all(secret[-20:].encode() not in file.read_bytes() for file in tmp_path.iterdir())
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())


def test_a_name_is_given_once_until_it_is_revoked(tmp_path: Path) -> None:
    store = tmp_path / STORE
    first, _ = create_token(store, "ci", TokenRole.READ)
    with pytest.raises(TokenConflictError):
        create_token(store, "ci", TokenRole.READ)
    assert revoke_token(store, "ci").revoked is not None
    with pytest.raises(UnknownTokenError):
        revoke_token(store, "ci")
    second, _ = create_token(store, "ci", TokenRole.OPERATE)
    tokens = known(store)
    assert tokens.holder(first.encode()) is None
    holder = tokens.holder(second.encode())
    assert holder is not None
    assert holder.role is TokenRole.OPERATE
    assert [(token.role, token.revoked is None) for token in list_tokens(store)] == [("read", False), ("operate", True)]


async def test_a_service_that_runs_knows_at_once(tmp_path: Path) -> None:
    store = tmp_path / STORE
    async with JobStore(store):
        tokens = known(store)
        assert not tokens.is_required
        secret, _ = create_token(store, "ci", TokenRole.SUBMIT)
        assert tokens.is_required
        holder = tokens.holder(secret.encode())
        assert holder is not None
        assert tokens.holder(secret.encode()) is holder, "what is told about it is told to one"
        create_token(store, "other", TokenRole.READ)
        assert tokens.holder(secret.encode()) is holder
        told: list[str] = []
        with holder.told(lambda: told.append("during")):
            revoke_token(store, "ci")
            assert tokens.holder(secret.encode()) is None
            assert told == ["during"]
        with holder.told(lambda: told.append("late")):
            assert told == ["during", "late"]
        revoke_token(store, "other")
        assert tokens.is_required, "revoking the last one opens nothing"


async def test_open_streams_hear_of_it_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_tokens, "REFRESH_SECONDS", 0.01)
    store = tmp_path / STORE
    secret, _ = create_token(store, "ci", TokenRole.READ)
    async with JobStore(store) as opened:
        tokens = known(store)
        async with tokens.kept(opened):
            holder = tokens.holder(secret.encode())
            assert holder is not None
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            with holder.told(lambda: loop.call_soon_threadsafe(ended.set)):
                revoke_token(store, "ci")
                await ended.wait()
    used = [token.last_used for token in list_tokens(store)]
    assert used == [7.0], "uses are written at the end"


def test_the_token_of_the_settings_needs_no_store(tmp_path: Path) -> None:
    tokens = known(tmp_path / STORE, OWN)
    assert tokens.is_required
    holder = tokens.holder(OWN.encode())
    assert holder is not None
    assert (holder.name, holder.role) == ("service", TokenRole.OPERATE)
    with pytest.raises(StoreError):
        tokens.holder(b"another")


def test_tokens_that_cannot_be_read_let_nobody_in(tmp_path: Path) -> None:
    store = tmp_path / STORE
    secret, _ = create_token(store, "ci", TokenRole.READ)
    tokens = known(store)
    assert tokens.holder(secret.encode()) is not None
    create_token(store, "other", TokenRole.READ)
    store.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        tokens.holder(secret.encode())


def test_a_change_that_was_not_told_is_told_by_the_same_command_again(tmp_path: Path) -> None:
    store = tmp_path / STORE
    secret, _ = create_token(store, "ci", TokenRole.READ)
    tokens = known(store)
    assert tokens.holder(secret.encode()) is not None
    with closing(sqlite3.connect(store)) as killed:  # After its commit.
        killed.execute("UPDATE tokens SET revoked = 1")
        killed.commit()
    with pytest.raises(UnknownTokenError):
        revoke_token(store, "ci")
    assert tokens.holder(secret.encode()) is None


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in os.environ if name.startswith("ASYNCPIPE_")]:
        monkeypatch.delenv(name)
    folder = ["--folder", str(tmp_path / "new")]

    def run(*arguments: str) -> Any:
        status = cli.main(["service", "tokens", *arguments, *folder])
        return (status, *capsys.readouterr())

    status, secret, told = run("create", "ci", "--role", "submit")
    assert status == 0
    assert "ci may submit" in told
    holder = known(tmp_path / "new" / STORE).holder(secret.strip().encode())
    assert holder is not None
    assert holder.name == "ci"
    assert "ci" in run("list")[1]
    assert '"role": "submit"' in run("list", "--json")[1]
    assert secret.strip() not in run("list", "--json")[1]
    assert run("revoke", "ci")[:2] == (0, "revoked ci, which could submit\n")
    status, _, told = run("revoke", "ci")
    assert status == 2
    assert "no token 'ci'" in told
