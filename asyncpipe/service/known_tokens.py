"""Who a service knows by their tokens: looked up with each request, and forgotten as soon as a token is revoked."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from threading import Lock

from pydantic import SecretStr

from asyncpipe.observe.http_tokens import token_digest
from asyncpipe.service.token_roles import (
    SETTINGS_HOLDER,
    TOKENS,
    TokenFileError,
    TokenRecord,
    TokenRole,
    read_tokens,
)
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["KnownTokens", "TokenHolder"]

REFRESH_SECONDS = 1
"""How soon what a revoked token's holder has open ends; new requests look for themselves."""

_logger = logging.getLogger("asyncpipe.service")


@dataclass(eq=False)
class TokenHolder:
    """Who sends a token that is in use; the same object for as long as it is."""

    name: str
    role: TokenRole
    is_revoked: bool = False
    _calls: dict[object, Callable[[], object]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @contextmanager
    def told(self, revoked: Callable[[], object]) -> Iterator[None]:
        """Calls ``revoked`` once if the token is revoked during the block, on the thread that finds out; or now."""
        key = object()
        with self._lock:
            self._calls[key] = revoked
            is_late = self.is_revoked
        try:
            if is_late:
                revoked()
            yield
        finally:
            with self._lock:
                self._calls.pop(key, None)

    def revoke(self) -> None:
        """End what the holder has open."""
        with self._lock:
            self.is_revoked = True
            calls = list(self._calls.values())
        for call in calls:
            call()


class KnownTokens:
    """The tokens in the file of the service's ``folder``, and that of the settings, ``own``. From any thread.

    A service that ever had a token asks for one, also when all are revoked: what an operator closed is not opened by
    taking somebody's token away.
    """

    def __init__(self, folder: Path, own: SecretStr | None, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._own = None if own is None else token_digest(own.get_secret_value().encode())
        self._owner = TokenHolder(SETTINGS_HOLDER, TokenRole.OPERATE)
        self._clock = clock
        self._stamp: object = None
        """What the file looked like when it was read last; ``None`` before."""
        self._is_used = False
        self._known: dict[bytes, tuple[TokenRecord, TokenHolder]] = {}
        self._lock = Lock()

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
            return self._owner
        self.refresh()
        # By digest: how long the search takes tells nothing about tokens.
        record, holder = self._known.get(digest, (None, None))
        return None if record is None or self._has_expired(record) else holder

    def refresh(self) -> None:
        """Read the file again if it has changed, and end what holders of revoked and expired tokens have open.

        Takes microseconds if nothing has changed. Raises ``TokenFileError``.
        """
        with self._lock:
            # The stamp from before reading: a change that comes meanwhile is found the next time.
            if (stamp := self._look()) != self._stamp:
                found = read_tokens(self._folder)
                before, self._is_used = self._known, found is not None
                self._known = {
                    bytes.fromhex(record.digest): (record, TokenHolder(record.name, record.role))
                    for record in found or ()
                }
                kept = before.keys() & self._known.keys()
                self._known |= {digest: before[digest] for digest in kept}
                self._stamp = stamp
                gone = [holder for digest, (_, holder) in before.items() if digest not in kept]
            else:
                gone = []
            gone += [holder for record, holder in self._known.values() if self._has_expired(record)]
        for holder in gone:
            if not holder.is_revoked:
                holder.revoke()

    def _has_expired(self, record: TokenRecord) -> bool:
        return record.expires is not None and record.expires <= self._clock()

    def _look(self) -> object:
        """Something that is different after every change of the file."""
        try:
            found = os.stat(self._folder / TOKENS)
        except FileNotFoundError:
            return "none"
        return found.st_ino, found.st_mtime_ns, found.st_size

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Watched during the block, in which a change is found within a second. Raises ``TokenFileError``."""
        await in_thread(self.refresh)
        watch = asyncio.create_task(self._watch(), name="asyncpipe tokens")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait([watch])

    async def _watch(self) -> None:
        complained = ""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await in_thread(self.refresh)
                complained = ""
            except TokenFileError as error:
                if str(error) != complained:
                    complained = str(error)
                    _logger.error("%s", error)
