"""Tokens with names: who holds one, what it lets do, and what it looks like.

::

    read       sees jobs, losses, logs, files, workers and metrics
    submit     also submits jobs and changes them: pause, cancel, schedule, retry …
    operate    also what concerns the service: drains hosts, deletes what is kept

A role may do what those before it may. The token of the settings (``token_file``) may do everything.
"""

from __future__ import annotations

import re
from enum import StrEnum
from secrets import token_urlsafe
from typing import NamedTuple

from asyncpipe.errors import AsyncpipeError, OptionError

__all__ = [
    "PREFIX",
    "SETTINGS_HOLDER",
    "TokenRole",
    "TokenConflictError",
    "TokenRecord",
    "UnknownTokenError",
    "check_token_name",
    "new_token",
]

SETTINGS_HOLDER = "service"
"""Who sends the token of the settings, in the audit; no other token has this name."""
PREFIX = "asyncpipe_"
"""Of every token, so that searches for secrets in code and logs find them."""
SECRET_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)


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
    """A token as the store knows it, without its secret; times are Unix times."""

    number: int
    """Its identity: a name may be given again once the token of that name is revoked."""
    name: str
    role: TokenRole
    created: float
    last_used: float | None
    revoked: float | None


class UnknownTokenError(AsyncpipeError, LookupError):
    """No token of this name is in use."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no token {name!r:.100} that is in use; `asyncpipe service tokens list` shows all")
        self.name = name

    def __reduce__(self) -> tuple[type[UnknownTokenError], tuple[str]]:
        return type(self), (self.name,)


class TokenConflictError(AsyncpipeError, ValueError):
    """A token of this name is in use."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a token {name!r:.100} is in use already; revoke it first, or give another name")
        self.name = name

    def __reduce__(self) -> tuple[type[TokenConflictError], tuple[str]]:
        return type(self), (self.name,)


def new_token() -> str:
    """A new secret of 256 random bits, as clients send it."""
    return PREFIX + token_urlsafe(SECRET_BYTES)


def check_token_name(name: str) -> str:
    """``name``, if a token may have it. Raises ``OptionError``."""
    if not _NAME.fullmatch(name):
        rule = "has 1 to 64 letters, digits or any of . _ @ -, and begins with a letter or a digit"
        raise OptionError(f"a token's name {rule}, not {name!r:.100}")
    if name == SETTINGS_HOLDER:
        raise OptionError(f"{name!r} is the name of the token in the settings; give another one")
    return name
