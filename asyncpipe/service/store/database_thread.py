"""The thread that owns a database connection. It commits many requests at once and answers each one on its own.

Syncing the disk costs the same for one request as for a hundred, so all requests that arrived during the previous
commit share the next one::

    coroutines   submit  pause  get  submit …          each awaits its own future
                    └──────┴─────┴─────┴─▶ queue
    the thread   BEGIN  [submit] [pause] [get] [submit]  COMMIT  ─▶ answers
                           each in a savepoint

A request that raises is rolled back alone. If SQLite itself fails (a full disk), the whole group is rolled back and
each request is tried once more in a transaction of its own, so that one large request does not fail the others.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from asyncpipe.runtime.thread_calls import call_for_future, wait_to_end
from asyncpipe.service.store.database import OwnConnection, StoreError, StoreProblem, explain, open_database

__all__ = ["DatabaseThread"]

NAME = "asyncpipe job store"
LARGEST_GROUP = 128
"""Requests in one commit; bounds how long the first of many requests waits for the last."""
PROBE_BYTES = 64 * 1024
"""More than a request writes."""

_T = TypeVar("_T")


class _Request(NamedTuple):
    function: Callable[[sqlite3.Connection], Any]
    future: Future[Any]


_Reply = tuple[Any, Exception | None]


class DatabaseThread:
    """Runs functions on the connection to the store at ``path``, in a thread of its own; requests from any loop.

    Opens once, waiting up to ``busy_seconds`` for another process, and closes once. Errors of SQLite are raised as
    ``StoreError``.
    """

    def __init__(self, path: Path, busy_seconds: float) -> None:
        self.commits = 0
        """Transactions since ``open`` that changed something."""
        self.trouble: StoreError | None = None
        """Why SQLite has failed, until ``probe`` finds that there is room."""
        self._path = path
        self._busy_seconds = busy_seconds
        self._executor = ThreadPoolExecutor(1, NAME)
        self._connection: OwnConnection | None = None
        self._waiting: deque[_Request] = deque()
        self._lock = Lock()
        self._is_opening = self._is_stopped = False

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests; from any thread."""
        return self._connection is not None and not self._is_stopped

    async def open(self) -> None:
        """Start the thread and connect. Raises as ``open_database``; no thread is left then."""
        if self._is_opening:
            raise self._closed()
        self._is_opening = True
        try:
            await wait_to_end(asyncio.wrap_future(self._executor.submit(self._open)))
        except BaseException:
            await self.close()
            raise

    async def run(self, function: Callable[[sqlite3.Connection], _T]) -> _T:
        """What ``function`` returns or raises in the thread, once its transaction is committed.

        A caller that is cancelled does not learn the result; the request is carried out nevertheless. ``function`` may
        be called a second time, after its first call was rolled back.
        """
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # A cancellation of the caller does not reach it.
        with self._lock:
            if not self.is_alive:
                raise self._closed()
            self._waiting.append(_Request(function, future))
            if len(self._waiting) == 1:
                self._executor.submit(self._serve)
        return await asyncio.wrap_future(future)

    async def probe(self) -> None:
        """Try whether there is room again, and end ``trouble`` then. Raises ``OSError`` or ``StoreError`` if not."""
        await asyncio.wrap_future(self._executor.submit(self._probe))

    def stop(self) -> None:
        """Take no more requests, and let the thread end after those that wait. From any thread, also again."""
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = True
                with suppress(RuntimeError):  # The interpreter exits.
                    self._executor.submit(self._disconnect)
                self._executor.shutdown(wait=False)

    async def close(self) -> None:
        """``stop``, and wait for the thread. May be called again; a cancellation is raised afterwards."""
        self.stop()
        await wait_to_end(asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown))

    def _closed(self) -> StoreError:
        advice = "use it inside 'async with', which opens once"
        return StoreError(self._path, StoreProblem.CLOSED, "is not open", advice)

    # In the thread

    def _open(self) -> None:
        self._connection = open_database(self._path, self._busy_seconds)
        self.trouble = self._connection.trouble

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()

    def _probe(self) -> None:
        assert self._connection is not None
        with TemporaryFile(dir=self._path.parent) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        if self._connection.trouble is None:
            self.trouble = None
        else:
            self._connection.close()
            self._open()

    def _serve(self) -> None:
        """Carry out the requests that wait; each gets an answer."""
        assert self._connection is not None
        while group := self._take():
            try:
                replies = self._write(self._connection, group)
            except Exception as bug:  # noqa: BLE001 - it must not leave the callers waiting
                replies = [(None, bug)] * len(group)
            for request, (value, error) in zip(group, replies, strict=True):
                if error is None:
                    request.future.set_result(value)
                else:
                    request.future.set_exception(error)

    def _take(self) -> list[_Request]:
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), LARGEST_GROUP))]

    def _write(self, connection: sqlite3.Connection, group: Sequence[_Request]) -> list[_Reply]:
        """The reply to each of ``group``: those that returned are on disk, those that raised changed nothing."""
        before = connection.total_changes
        try:
            connection.execute("BEGIN IMMEDIATE")
            replies = [_in_savepoint(connection, request.function) for request in group]
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:  # After some errors, such as a full disk, SQLite has rolled back already.
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
            if len(group) == 1:
                self.trouble = explain(self._path, error)
                return [(None, self.trouble)]
            return [reply for request in group for reply in self._write(connection, [request])]
        self.commits += connection.total_changes != before
        return replies


def _in_savepoint(connection: sqlite3.Connection, function: Callable[[sqlite3.Connection], Any]) -> _Reply:
    """The reply of ``function``, rolled back if it raised; raises errors of SQLite, which concern the whole group."""
    connection.execute("SAVEPOINT request")
    value, error = _attempt(lambda: function(connection))
    if isinstance(error, sqlite3.Error):
        raise error
    if error is not None:
        connection.execute("ROLLBACK TO request")
    connection.execute("RELEASE request")
    return value, error


def _attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call_for_future(function), None
    except Exception as error:  # noqa: BLE001 - raised in the coroutine that asked
        return None, error
