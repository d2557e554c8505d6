"""A webhook: messages about jobs to an address of the operator's, signed, in order, until they arrive.

The store has every transition, with a number that goes up, so it is the queue::

    job ──▶ failed ──▶ store ──wake──▶ read behind "told" ──▶ POST ──2xx──▶ told = its number ──▶ webhook.json
                                             ▲                 │ anything else
                                             └──── 1, 2, 4 … s ┘

So nothing is lost when the service is killed, and what it missed while it was down is told when it starts. A message is
sent at least once; one that was sent when the service was killed comes again, with the same id. What the receiver
refuses as such (400, 413, 415, 422), what is older than ``give_up_seconds``, and the oldest of more than
``max_waiting`` messages is given up: that is in the log, in the metrics, and in the next message (``lost``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from asyncpipe.service.job_states import JobRecord, Transition
from asyncpipe.service.settings.webhook_settings import WebhookSettings, key_of
from asyncpipe.service.store.changes import newest_transition, transitions_after
from asyncpipe.service.store.job_store import JobStore, StoreError
from asyncpipe.service.telling.message import body_of, id_of, signed_headers
from asyncpipe.service.telling.post import PostAnswer, post
from asyncpipe.service.telling.told_file import ToldSoFar, read_told, write_told
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["Webhook", "WebhookFigures"]

NAME = "webhook.json"
FIRST_RETRY = 1.0
LONGEST_RETRY = 300.0
"""Seconds between two attempts at a message: twice as long each time, and never longer."""
LAST_WORDS = 2.0
"""Seconds in which messages are still delivered when the service ends; the rest is told at its next start."""
REFUSALS = frozenset({400, 413, 415, 422})
"""A receiver that answers so will not take the message the next time either."""
AT_ONCE = 100
"""Messages that are read from the store at a time."""
STORE_SECONDS = 30.0
"""Before a store that cannot be read is asked again."""

_logger = logging.getLogger("asyncpipe.service.webhook")


class SendPost(Protocol):
    """``post``, or a replacement in tests."""

    async def __call__(self, url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> PostAnswer:
        """As ``post``."""


@dataclass(slots=True)
class WebhookFigures:
    """What became of messages since the service started."""

    delivered: int = 0
    refused: int = 0
    lost: int = 0
    waiting_since: float | None = None
    """The Unix time of what the oldest waiting message tells of."""

    def waiting_seconds(self, now: float) -> float:
        """How long the oldest message waits; 0 if none does."""
        return 0.0 if self.waiting_since is None else max(0.0, now - self.waiting_since)


class Webhook:
    """Sends messages about transitions; an async context manager. Belongs to the service's loop."""

    def __init__(
        self,
        settings: WebhookSettings,
        store: JobStore,
        folder: Path,
        *,
        send: SendPost = post,
        clock: Callable[[], float] = time.time,
        first_retry: float = FIRST_RETRY,
    ) -> None:
        """``store`` is open. ``folder`` is the service's. The rest is for tests."""
        self.figures = WebhookFigures()
        self._settings = settings
        self._store = store
        self._path = folder / NAME
        self._send = send
        self._clock = clock
        self._first_retry = first_retry
        self._key = key_of(settings.secret.get_secret_value())
        self._name = urlsplit(settings.url.get_secret_value()).hostname
        """Of the receiver. The rest of the address may be a secret."""
        self._told = ToldSoFar(0, 0)
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._is_away = False
        """Whether the last attempt has failed."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Webhook:
        """Raises ``StoreError``. Begins where it was; the first time, with what happens from now on."""
        newest = await self._store.thread.run(newest_transition, writes=False)
        found: ToldSoFar | None = None
        try:
            found = await in_thread(lambda: read_told(self._path))
        except (OSError, ValueError) as error:
            _logger.error("%s cannot be read, so jobs that have ended badly before are not told: %s", NAME, error)
        if found is not None and found.sequence > newest:
            _logger.warning("the store is older than %s: what happens from now on is told", NAME)
            found = ToldSoFar(newest, found.lost)
        self._told = found or ToldSoFar(newest, 0)
        if found != self._told:
            await self._keep()
        self._task = asyncio.create_task(self._run(), name="asyncpipe webhook")
        self.wake()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        if not self._is_away:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    await self._idle.wait()
        if self.figures.waiting_since is not None:
            _logger.warning("the webhook at %s was not told all: the rest is at the next start", self._name)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait([self._task])

    def wake(self) -> None:
        """A job has changed its state."""
        self._idle.clear()
        self._news.set()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                while await self._tell_next():
                    pass
            except StoreError as error:
                _logger.error("what the webhook is to be told cannot be read, will try again: %s", error)
                await asyncio.sleep(STORE_SECONDS)
                self._news.set()
            if not self._news.is_set():
                self.figures.waiting_since = None
                self._idle.set()

    async def _tell_next(self) -> bool:
        """Deliver the oldest messages, or give them up; false if there are none."""
        after, states, most = self._told.sequence, self._settings.states, self._settings.max_waiting
        found = await self._store.thread.run(
            lambda db: transitions_after(db, after, states, AT_ONCE, most), writes=False
        )
        if not found.rows:
            self._told = ToldSoFar(max(found.newest, after), self._told.lost)
            return False
        if found.skipped:
            self.figures.lost += found.skipped
            self._told = ToldSoFar(found.rows[0][0].sequence - 1, self._told.lost + found.skipped)
            text = "the webhook at %s will not be told of %d changes of jobs: more than %d wait"
            _logger.error(text, self._name, found.skipped, most)
        for transition, record in found.rows:
            self.figures.waiting_since = transition.at
            await self._deliver(transition, record)
            await self._keep()
        return True

    async def _deliver(self, transition: Transition, record: JobRecord) -> None:
        """Try until the message has arrived or is given up."""
        body, message, wait = body_of(transition, record, self._told.lost), id_of(transition), self._first_retry
        while self._clock() - transition.at <= self._settings.give_up_seconds:
            status, why, asked = await self._attempt(message, body)
            self._is_away = not 200 <= status < 300
            if not self._is_away:
                self.figures.delivered += 1
                self._told = ToldSoFar(transition.sequence, 0)
                _logger.info("the webhook at %s was told that job %s is %s", self._name, record.id, transition.to_state)
                return
            if status in REFUSALS:
                self.figures.refused += 1
                self._give_up(transition, why)
                return
            seconds = min(max(wait, asked), LONGEST_RETRY)
            text = "the webhook at %s was not told that job %s is %s, next try in %g s: %s"
            _logger.warning(text, self._name, record.id, transition.to_state, seconds, why)
            await asyncio.sleep(seconds)
            wait = min(2 * wait, LONGEST_RETRY)
        self.figures.lost += 1
        self._give_up(transition, f"it is older than {self._settings.give_up_seconds:g} s")

    async def _attempt(self, message: str, body: bytes) -> tuple[int, str, float]:
        """The answer's status (0 for none), what is wrong with it, and in how many seconds the receiver wants more."""
        headers = signed_headers(self._key, message, body, self._clock())
        url, seconds = self._settings.url.get_secret_value(), self._settings.timeout_seconds
        try:
            answer = await self._send(url, body, headers, seconds)
        except TimeoutError:
            return 0, f"no answer within {seconds:g} s", 0.0
        except OSError as error:
            return 0, str(error) or type(error).__name__, 0.0
        return answer.status, f"the receiver answered {answer.status}", answer.retry_after or 0.0

    def _give_up(self, transition: Transition, why: str) -> None:
        self._told = ToldSoFar(transition.sequence, self._told.lost + 1)
        text = "the webhook at %s will not be told that job %s became %s: %s"
        _logger.error(text, self._name, transition.job, transition.to_state, why)

    async def _keep(self) -> None:
        """Note on disk how far it is. If that fails, messages may come twice after a restart."""
        told = self._told
        try:
            await in_thread(lambda: write_told(self._path, told))
        except OSError as error:
            _logger.error("%s cannot be written, so messages may come again: %s", NAME, error)
