"""Who a service knows by their tokens: looked up with each request, and forgotten as soon as a token is revoked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from itertools import count
from pathlib import Path
from threading import Lock

from pydantic import SecretStr

from asyncpipe.observe.http_tokens import token_digest
from asyncpipe.service.store.database import StoreError
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.store.token_changes import read_tokens, stamp_of
from asyncpipe.service.store.token_queries import note_uses
from asyncpipe.service.token_roles import SETTINGS_HOLDER, TokenRecord, TokenRole
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["KnownTokens", "TokenHolder"]

REFRESH_SECONDS = 1
"""How soon what a revoked token's holder has open ends; new requests look for themselves."""
NOTE_SECONDS = 60

_logger = logging.getLogger("asyncpipe.service")


@dataclass(eq=False)
class TokenHolder:
    """Who sends a token that is in use; the same object for as long as it is."""

    name: str
    role: TokenRole
    number: int | None = None
    """``None`` for the token of the settings."""
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
    """The tokens of the store at ``path`` and that of the settings, ``own``. From any thread.

    A service whose store ever had a token asks for one, also when all are revoked: what an operator closed is not
    opened by taking somebody's token away.
    """

    def __init__(self, path: Path, own: SecretStr | None, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._own = None if own is None else token_digest(own.get_secret_value().encode())
        self._owner = TokenHolder(SETTINGS_HOLDER, TokenRole.OPERATE)
        self._clock = clock
        self._stamp: tuple[int, int] | None = None
        self._is_used = False
        self._holders: dict[bytes, TokenHolder] = {}
        self._uses: dict[int, float] = {}
        self._lock = Lock()

    @property
    def is_required(self) -> bool:
        """Whether requests need a token. Raises ``StoreError`` where only the store can tell, and cannot be read."""
        if self._own is not None:
            return True
        self.refresh()
        return self._is_used

    def holder(self, token: bytes) -> TokenHolder | None:
        """Who sends ``token``, which counts as a use of it; ``None`` for one that is wrong or revoked.

        Raises ``StoreError`` if tokens have been changed and cannot be read; not for the settings' own.
        """
        digest = token_digest(token)
        if self._own is not None and compare_digest(digest, self._own):
            return self._owner
        self.refresh()
        # By digest: how long the search takes tells nothing about tokens.
        holder = self._holders.get(digest)
        if holder is not None and holder.number is not None:
            self._uses[holder.number] = self._clock()
        return holder

    def refresh(self) -> None:
        """Read the tokens anew if they have been changed, which blocks for a millisecond; else costs microseconds.

        Raises ``StoreError``.
        """
        if not self._is_stale():
            return
        with self._lock:
            # The stamp from before reading: a change that comes meanwhile is found the next time.
            stamp = stamp_of(self._path)
            found = read_tokens(self._path)
            gone = self._take(found)
            self._stamp = stamp
        for holder in gone:
            holder.revoke()

    def _is_stale(self) -> bool:
        return stamp_of(self._path) != self._stamp

    def _take(self, found: dict[bytes, TokenRecord]) -> list[TokenHolder]:
        """Know these tokens from now on; returns who is not among them any more."""
        in_use = {digest: record for digest, record in found.items() if record.revoked is None}
        before = self._holders
        self._holders = {
            digest: before.get(digest) or TokenHolder(record.name, record.role, record.number)
            for digest, record in in_use.items()
        }
        self._is_used = bool(found)
        return [holder for digest, holder in before.items() if digest not in in_use]

    @asynccontextmanager
    async def kept(self, store: JobStore) -> AsyncIterator[None]:
        """Known during the block, in which a change is found within a second, and uses are written each minute.

        A process that is killed loses the uses of its last minute. Raises ``StoreError``.
        """
        await in_thread(self.refresh)
        watch = asyncio.create_task(self._watch(store), name="asyncpipe tokens")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait([watch])
            with suppress(StoreError):
                await self._note_uses(store)

    async def _watch(self, store: JobStore) -> None:
        complained = ""
        for second in count(1):
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                if self._is_stale():
                    await in_thread(self.refresh)
                if second % NOTE_SECONDS == 0:
                    await self._note_uses(store)
                complained = ""
            except StoreError as error:
                if str(error) != complained:
                    complained = str(error)
                    _logger.error("the tokens cannot be read or noted: %s", error)

    async def _note_uses(self, store: JobStore) -> None:
        uses, self._uses = self._uses, {}
        if uses:
            await store.thread.run(lambda db: note_uses(db, uses), writes=True)
