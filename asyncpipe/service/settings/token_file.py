"""The token that clients send: its form, and how it is read from a file that only its owner can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["check_token", "read_token"]

SHORTEST, LONGEST = 16, 1024
"""The number of characters of a token."""

RULE = (
    f"must be {SHORTEST} to {LONGEST} printable ASCII characters without spaces, as "
    "python -c 'import secrets; print(secrets.token_urlsafe(32))' prints them"
)


def check_token(token: str) -> str:
    """``token``, if it is long enough and fits in an HTTP header; raises a ``ValueError`` that does not contain it."""
    if SHORTEST <= len(token) <= LONGEST and token.isascii() and token.isprintable() and " " not in token:
        return token
    raise ValueError(RULE)


def read_token(path: Path) -> str:
    """The token in the file at ``path``, without the newline at its end.

    Raises ``ValueError`` unless this is a regular file of this user or root that no other user can access.
    """
    try:
        # The checks are made on the open file, so the path cannot be replaced in between. Do not block on a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            _check_file(path, os.fstat(file.fileno()))
            content = file.read(LONGEST + 3)
    except OSError as error:
        raise ValueError(f"must be a regular file that can be read; {path}: {error.strerror}") from None
    try:
        return check_token(content.decode("ascii").rstrip("\r\n"))
    except ValueError:
        raise ValueError(f"{path} must hold a token and nothing else; a token {RULE}") from None


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"must be a regular file, and {path} is not")
    if status.st_uid not in (os.getuid(), 0):
        raise ValueError(f"must be a file of this user or root; {path} is one of user {status.st_uid}: chown it")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(f"must be a file that no other user can access; {path} has the mode {mode:04o}: chmod 600 it")
