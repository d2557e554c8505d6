"""Tokens with names: who holds one, what it lets do, and the file ``tokens.json`` that keeps their hashes.

::

    read       sees jobs, losses, logs, files, workers and metrics
    submit     also submits jobs, and changes its user's: pause, cancel, schedule, retry, delete …
    operate    also changes everybody's jobs, and what concerns the service: drains hosts

A role may do what those before it may. A token is one of a user, who may have several and be in teams; whose jobs he
may see and change, ``access.py`` says. The token of the settings (``token_file``) may do everything. Nobody can make a
token over HTTP, with whatever token: who may is who may write the service's folder. Each change replaces the file, so
that a service that runs sees the old or the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from secrets import token_urlsafe
from typing import NamedTuple

from asyncpipe.errors import AsyncpipeError, OptionError

__all__ = [
    "NAME_RULE",
    "PREFIX",
    "SETTINGS_HOLDER",
    "TOKENS",
    "TokenFileError",
    "TokenRecord",
    "TokenRole",
    "create_token",
    "is_name",
    "read_tokens",
    "revoke_token",
    "token_digest",
]

TOKENS = "tokens.json"
"""The file in a service's folder."""
SETTINGS_HOLDER = "service"
"""Who sends the token of the settings, in the audit; no other token has this name."""
PREFIX = "asyncpipe_"
"""Of every token, so that searches for secrets in code and logs find them."""
SECRET_BYTES = 32
NAME_RULE = "has 1 to 64 letters, digits or any of . _ @ + -, and begins with a letter or a digit"
"""What the name of a token, a user or a team is, for messages."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}", re.ASCII)


class TokenRole(StrEnum):
    """What the holder of a token may do."""

    READ = "read"
    SUBMIT = "submit"
    OPERATE = "operate"

    def may(self, needed: TokenRole) -> bool:
        """Whether who has this role may do what ``needed`` is asked for."""
        order = list(TokenRole)
        return order.index(self) >= order.index(needed)


class TokenRecord(NamedTuple):
    """A token without its secret; times are Unix times."""

    name: str
    role: TokenRole
    created: float
    expires: float | None
    """``None``: it does not."""
    digest: str
    """What ``token_digest`` makes of the secret, in hexadecimal."""
    user: str
    """Whose it is."""
    teams: tuple[str, ...] = ()
    """Those of its user."""


class TokenFileError(AsyncpipeError, RuntimeError):
    """The file of tokens cannot be read or written; the message says why."""


def token_digest(token: bytes) -> bytes:
    """What is kept and compared in place of ``token``: 32 bytes.

    Digests have equal lengths, so comparing them tells nothing of a token's length. A fast hash is enough, since tokens
    are random and long: nobody guesses one by trying.
    """
    return hashlib.sha256(token).digest()


def read_tokens(folder: Path) -> tuple[TokenRecord, ...] | None:
    """All tokens of the service in ``folder``; ``None`` if it never had one. Blocks. Raises ``TokenFileError``."""
    path = folder / TOKENS
    try:
        listed = json.loads(path.read_bytes())
        # Tokens of former versions have no user: each is one by its name.
        known = [TokenRecord(**{"user": each["name"], **each}) for each in listed]
        return tuple(each._replace(role=TokenRole(each.role), teams=tuple(each.teams)) for each in known)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TokenFileError(f"{path} cannot be read: {error}; restore it, or create its tokens anew") from error


def is_name(text: str) -> bool:
    """Whether ``text`` can be the name of a token, a user or a team."""
    return _NAME.fullmatch(text) is not None


def create_token(
    folder: Path,
    name: str,
    role: TokenRole,
    expires: float | None = None,
    *,
    user: str | None = None,
    teams: Collection[str] = (),
) -> tuple[str, TokenRecord]:
    """A new token of the service in ``folder``, valid until the Unix time ``expires``; and what is kept of it. Blocks.

    It is ``user``'s, by default one of the token's name, who is in ``teams``. The token itself is kept nowhere. Raises
    ``OptionError``, ``TokenFileError``.
    """
    user = name if user is None else user
    for what, text in (("token", name), ("user", user), *(("team", team) for team in teams)):
        if not is_name(text):
            raise OptionError(f"a {what}'s name {NAME_RULE}, not {text!r:.100}")
        if text == SETTINGS_HOLDER and what != "team":
            raise OptionError(f"{text!r} is the name of the token in the settings; give another one")
    there, now = read_tokens(folder) or (), time.time()
    left = tuple(each for each in there if each.name != name or each.expires is None or each.expires > now)
    if name in {each.name for each in left}:
        raise OptionError(f"a token {name!r} is in use already; revoke it first, or give another name")
    secret = PREFIX + token_urlsafe(SECRET_BYTES)
    digest = token_digest(secret.encode()).hex()
    record = TokenRecord(name, role, now, expires, digest, user, tuple(dict.fromkeys(teams)))
    _write(folder, (*left, record))
    return secret, record


def revoke_token(folder: Path, name: str) -> TokenRecord:
    """Revoke the token of this name for good; it may be in use by a service that runs. Blocks.

    Raises ``OptionError`` where there is none, ``TokenFileError``.
    """
    there = read_tokens(folder) or ()
    for record in there:
        if record.name == name:
            _write(folder, tuple(each for each in there if each is not record))
            return record
    raise OptionError(f"there is no token {name!r:.100} that is in use; `asyncpipe service tokens list` shows all")


def _write(folder: Path, tokens: tuple[TokenRecord, ...]) -> None:
    beside = folder / f"{TOKENS}.new"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump([each._asdict() for each in tokens], file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(folder / TOKENS)
    except FileExistsError as error:
        raise TokenFileError(f"{beside} is there: another command writes it; remove it if none does") from error
    except OSError as error:
        raise TokenFileError(f"{folder / TOKENS} cannot be written: {error.strerror}") from error
