"""Who a service knows by their tokens: looked up with each request, in a file that is read again when it changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from hmac import compare_digest
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from pydantic import SecretStr

from asyncpipe.service.token_roles import SETTINGS_HOLDER, TOKENS, TokenRecord, TokenRole, read_tokens, token_digest

__all__ = ["KnownTokens", "TokenHolder"]


class TokenHolder(NamedTuple):
    """Who sends a token that is in use, or whom a trusted proxy names."""

    user: str
    role: TokenRole
    teams: tuple[str, ...] = ()
    token: str | None = None
    """The name of the token."""


class KnownTokens:
    """The tokens in the file of the service's ``folder``, and that of the settings, ``own``. From any thread.

    A service that ever had a token asks for one, also when all are revoked: what an operator closed is not opened by
    taking somebody's token away.
    """

    def __init__(self, folder: Path, own: SecretStr | None, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self.use(own)
        self._clock = clock
        self._stamp: object = None
        """What the file looked like when it was read last; ``None`` before."""
        self._is_used = False
        self._known: dict[bytes, TokenRecord] = {}
        self._lock = Lock()

    def use(self, own: SecretStr | None) -> None:
        """Let in who sends ``own``, and no more who sends that of the settings before."""
        self._own = None if own is None else token_digest(own.get_secret_value().encode())

    @property
    def is_required(self) -> bool:
        """Whether requests need a token. Raises ``TokenFileError`` where only the file can tell, and cannot be read."""
        if self._own is not None:
            return True
        self.refresh()
        return self._is_used

    def holder(self, token: bytes) -> TokenHolder | None:
        """Who sends ``token``; ``None`` for one that is wrong, revoked or has expired.

        Raises ``TokenFileError`` if tokens have been changed and cannot be read; not for the settings' own.
        """
        digest = token_digest(token)
        if self._own is not None and compare_digest(digest, self._own):
            return TokenHolder(SETTINGS_HOLDER, TokenRole.OPERATE, token=SETTINGS_HOLDER)
        self.refresh()
        # By digest: how long the search takes tells nothing about tokens.
        record = self._known.get(digest)
        if record is None or (record.expires is not None and record.expires <= self._clock()):
            return None
        return TokenHolder(record.user, record.role, record.teams, record.name)

    def refresh(self) -> None:
        """Read the file again if it has changed. Takes microseconds if not. Raises ``TokenFileError``."""
        with self._lock:
            # The stamp from before reading: a change that comes meanwhile is found the next time.
            if (stamp := self._look()) != self._stamp:
                found = read_tokens(self._folder)
                self._is_used = found is not None
                self._known = {bytes.fromhex(record.digest): record for record in found or ()}
                self._stamp = stamp

    def _look(self) -> object:
        """Something that is different after every change of the file."""
        try:
            found = os.stat(self._folder / TOKENS)
        except FileNotFoundError:
            return "none"
        return found.st_ino, found.st_mtime_ns, found.st_size
