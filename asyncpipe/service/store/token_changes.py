"""What an operator does with tokens, on the service's machine: in the store itself, whether the service runs or not.

::

    asyncpipe service tokens revoke ci                     the service
        the store: UPDATE, COMMIT
        tokens.stamp is replaced  ────────────────▶  is looked at with each request, and each second
                                                     reads the tokens anew; what ci has open ends

So nobody can make a token over HTTP, with whatever token: who may is who may write the service's folder. The command
says that it has revoked a token once the stamp is replaced; from then on no request with it is begun.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from asyncpipe.observe.http_tokens import token_digest
from asyncpipe.service.store import token_queries
from asyncpipe.service.store.database import StoreError, StoreProblem, open_beside, open_database
from asyncpipe.service.token_roles import TokenRecord, TokenRole, UnknownTokenError, check_token_name, new_token

__all__ = ["create_token", "list_tokens", "read_tokens", "revoke_token", "stamp_of"]

STAMP = "tokens.stamp"

_T = TypeVar("_T")


def create_token(store: Path, name: str, role: TokenRole) -> tuple[str, TokenRecord]:
    """A new token in the file ``store``, which is made if it is not there, and what is kept of it. Blocks.

    The token itself is kept nowhere. Raises ``OptionError``, ``TokenConflictError``, ``StoreError``.
    """
    check_token_name(name)
    secret = new_token()
    digest = token_digest(secret.encode())
    record = _change(store, lambda connection: token_queries.add_token(connection, name, role, digest, time.time()))
    return secret, record


def revoke_token(store: Path, name: str) -> TokenRecord:
    """The token of this name, revoked for good; it may be in use by a service that runs. Blocks.

    Raises ``UnknownTokenError``, ``StoreError``.
    """
    try:
        return _change(store, lambda connection: token_queries.revoke_token(connection, name, time.time()))
    except UnknownTokenError:
        # Perhaps revoked by a command that was killed before it could tell the service.
        _replace_stamp(store)
        raise


def list_tokens(store: Path) -> tuple[TokenRecord, ...]:
    """Every token that there ever was, the newest last. Blocks. Raises ``StoreError``."""
    with _opened(store) as connection:
        return token_queries.all_tokens(connection)


def read_tokens(store: Path) -> dict[bytes, TokenRecord]:
    """Every token that there ever was, by its digest, from a store that this process may have open. Blocks."""
    with open_beside(store) as connection:
        return token_queries.tokens_by_hash(connection)


def stamp_of(store: Path) -> tuple[int, int]:
    """Something that is different after every change of tokens; from any thread, in microseconds."""
    try:
        found = os.stat(store.with_name(STAMP))
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _change(store: Path, change: Callable[[sqlite3.Connection], _T]) -> _T:
    with _opened(store) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            found = change(connection)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
    _replace_stamp(store)
    return found


@contextmanager
def _opened(store: Path) -> Iterator[sqlite3.Connection]:
    """The store as its owner has it, which brings an old one up to date; or beside the service that runs."""
    try:
        own = open_database(store, busy_seconds=0.1)
    except StoreError as error:
        if error.problem is not StoreProblem.LOCKED:
            raise
        with open_beside(store) as connection:
            yield connection
        return
    with closing(own):
        yield own


def _replace_stamp(store: Path) -> None:
    stamp = store.with_name(STAMP)
    beside = stamp.with_name(f"{STAMP}.{os.getpid()}")
    beside.touch(mode=0o600)
    now = time.time_ns()
    os.utime(beside, ns=(now, now))  # A file system's own clock is coarse: two changes might look like one.
    beside.replace(stamp)
