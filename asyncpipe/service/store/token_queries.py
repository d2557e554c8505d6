"""The SQL of tokens: each function is part of one transaction. The store has hashes, and no token."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from asyncpipe.service.token_roles import TokenConflictError, TokenRecord, TokenRole, UnknownTokenError

__all__ = ["add_token", "all_tokens", "note_uses", "revoke_token", "tokens_by_hash"]

_COLUMNS = "number, name, role, created, last_used, revoked"


def add_token(connection: sqlite3.Connection, name: str, role: TokenRole, digest: bytes, at: float) -> TokenRecord:
    """The new token. Raises ``TokenConflictError`` if one of that name is in use."""
    if _in_use(connection, name) is not None:
        raise TokenConflictError(name)
    connection.execute(
        "INSERT INTO tokens (name, role, hash, created) VALUES (?, ?, ?, ?)", (name, role, digest.hex(), at)
    )
    record = _in_use(connection, name)
    assert record is not None
    return record


def revoke_token(connection: sqlite3.Connection, name: str, at: float) -> TokenRecord:
    """The token of this name, revoked now. Raises ``UnknownTokenError``."""
    record = _in_use(connection, name)
    if record is None:
        raise UnknownTokenError(name)
    connection.execute("UPDATE tokens SET revoked = ? WHERE number = ?", (at, record.number))
    return record._replace(revoked=at)


def all_tokens(connection: sqlite3.Connection) -> tuple[TokenRecord, ...]:
    """Every token that there ever was, the newest last."""
    rows = connection.execute(f"SELECT {_COLUMNS} FROM tokens ORDER BY number")  # noqa: S608 - no input
    return tuple(map(_record, rows.fetchall()))


def tokens_by_hash(connection: sqlite3.Connection) -> dict[bytes, TokenRecord]:
    """Every token that there ever was, by what ``token_digest`` makes of it."""
    rows = connection.execute(f"SELECT {_COLUMNS}, hash FROM tokens")  # noqa: S608 - no input
    return {bytes.fromhex(digest): _record(tuple(row)) for *row, digest in rows.fetchall()}


def note_uses(connection: sqlite3.Connection, uses: Mapping[int, float]) -> None:
    """Record when tokens, by their numbers, were used last."""
    connection.executemany(
        "UPDATE tokens SET last_used = max(coalesce(last_used, 0), ?) WHERE number = ?",
        [(at, number) for number, at in uses.items()],
    )


def _in_use(connection: sqlite3.Connection, name: str) -> TokenRecord | None:
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM tokens WHERE name = ? AND revoked IS NULL",  # noqa: S608 - no input
        (name,),
    ).fetchone()
    return None if row is None else _record(row)


def _record(row: tuple[object, ...]) -> TokenRecord:
    number, name, role, created, last_used, revoked = row
    try:
        return TokenRecord(number, name, TokenRole(str(role)), created, last_used, revoked)  # type: ignore[arg-type]
    except ValueError as error:
        raise sqlite3.DataError(f"token {name}: {error}") from error
