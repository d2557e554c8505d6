"""The thread that owns a database connection: it commits many requests at once and answers each one on its own.

Syncing the disk costs the same for one request as for a hundred, so all requests that arrived during the previous
commit are committed together::

    coroutines   submit  pause  get  submit …          each awaits its own future
                    └──────┴─────┴─────┴─▶ queue
    the thread   BEGIN  [submit] [pause] [submit]  COMMIT  [get]  ─▶ one call_soon_threadsafe per loop
                           each in a savepoint              reads see only committed data

A request that raises is rolled back alone. If SQLite itself fails (a full disk), the whole group is rolled back and
each request is tried once more in a transaction of its own, so that one large request does not fail the others.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

from asyncpipe.runtime.thread_calls import call_for_future, wait_to_end
from asyncpipe.service.store.database import StoreError, StoreProblem, explain, open_database

__all__ = ["DatabaseThread"]

NAME = "asyncpipe job store"
LARGEST_GROUP = 128
"""Requests in one commit; bounds how long the first of many requests waits for the last."""

_T = TypeVar("_T")
_StoreFunction: TypeAlias = Callable[[sqlite3.Connection], Any]


class _Reply(NamedTuple):
    value: Any = None
    error: Exception | None = None


class _Request(NamedTuple):
    function: _StoreFunction
    writes: bool
    future: asyncio.Future[Any]


class DatabaseThread:
    """Runs functions on the connection to the store at ``path``, in a thread of its own; requests from any loop.

    Opens once, waiting up to ``busy_seconds`` for another process, and closes once. The thread refers to this object,
    so it ends only when somebody calls ``stop``. Errors of SQLite are raised as ``StoreError``.
    """

    def __init__(self, path: Path, busy_seconds: float) -> None:
        self.commits = 0
        """Transactions that were committed since ``open``; requests that wait at the same time share one."""
        self._path = path
        self._busy_seconds = busy_seconds
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        """``None`` follows the last request."""
        self._lock = threading.Lock()
        self._is_stopped = False

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; from any thread."""
        return self._thread is not None and self._thread.is_alive()

    async def open(self) -> None:
        """Start the thread and connect. Raises as ``open_database``; no thread is left then."""
        if self._thread is not None:
            raise self._closed()
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        self._ended = loop.create_future()
        arguments = (opened, self._ended)
        self._thread = threading.Thread(target=self._serve_all, args=arguments, name=NAME, daemon=True)
        self._thread.start()
        try:
            await wait_to_end(opened)
        except BaseException:
            await self.close()
            raise

    async def run(self, function: Callable[[sqlite3.Connection], _T], *, writes: bool) -> _T:
        """What ``function`` returns or raises in the thread, once its transaction is committed.

        A caller that is cancelled does not learn the result; the request is carried out nevertheless. ``function`` may
        be called a second time, after its first call was rolled back.
        """
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._thread is None or self._is_stopped:
                raise self._closed()
            self._queue.put(_Request(function, writes, future))
        return await future

    def stop(self) -> None:
        """Take no more requests, and let the thread end after the queued ones. From any thread, also again."""
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = True
                self._queue.put(None)

    async def close(self) -> None:
        """``stop``, and wait for the thread. May be called again; a cancellation is raised afterwards."""
        self.stop()
        if self._thread is not None and self._ended is not None:
            try:
                await wait_to_end(self._ended)
            finally:
                self._thread.join()

    # In the thread

    def _serve_all(self, opened: asyncio.Future[None], done: asyncio.Future[None]) -> None:
        """Serve requests until the queue is closed and empty; every future gets an answer, however this ends."""
        connection: sqlite3.Connection | None = None
        try:
            reply = _attempt(lambda: open_database(self._path, self._busy_seconds))
            connection = reply.value
            _answer([(opened, _Reply(error=reply.error))])
            while connection is not None and (group := self._take()):
                _answer(self._serve(connection, group))
                # An idle thread must not keep the last requests alive.
                del group
        finally:
            self.stop()
            if connection is not None:
                with suppress(sqlite3.Error):
                    connection.close()
            while group := self._take():
                _answer([(request.future, _Reply(error=self._closed())) for request in group])
            _answer([(done, _Reply())])

    def _closed(self) -> StoreError:
        advice = "use it inside 'async with', which opens once"
        return StoreError(self._path, StoreProblem.CLOSED, "is not open", advice)

    def _take(self) -> list[_Request]:
        """The requests that wait, at least one; blocks. Empty once the queue is closed and empty."""
        group: list[_Request] = []
        while not group or (len(group) < LARGEST_GROUP and not self._queue.empty()):
            request = self._queue.get()
            if request is None:
                self._queue.put(None)
                break
            group.append(request)
        return group

    def _serve(
        self, connection: sqlite3.Connection, group: Sequence[_Request]
    ) -> list[tuple[asyncio.Future[Any], _Reply]]:
        """The reply to each of ``group``; raises nothing."""
        writing = [request for request in group if request.writes]
        reading = [request for request in group if not request.writes]

        def replies() -> list[_Reply]:
            written = self._write(connection, [request.function for request in writing]) if writing else []
            found = written + [_read(connection, request.function) for request in reading]
            return [
                _Reply(error=explain(self._path, reply.error)) if isinstance(reply.error, sqlite3.Error) else reply
                for reply in found
            ]

        outcome = _attempt(replies)
        if outcome.error is not None:
            _roll_back(connection)
        all_replies = outcome.value if outcome.error is None else [outcome] * len(group)
        return [(request.future, reply) for request, reply in zip(writing + reading, all_replies, strict=True)]

    def _write(self, connection: sqlite3.Connection, functions: Sequence[_StoreFunction]) -> list[_Reply]:
        """The reply to each of ``functions``: those that returned are on disk, those that raised changed nothing."""
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            return [_Reply(error=error)] * len(functions)
        try:
            replies = [_in_savepoint(connection, function) for function in functions]
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            _roll_back(connection)
            if len(functions) == 1:
                return [_Reply(error=error)]
            return [reply for function in functions for reply in self._write(connection, [function])]
        self.commits += 1
        return replies


def _in_savepoint(connection: sqlite3.Connection, function: _StoreFunction) -> _Reply:
    """The reply of ``function``, rolled back if it raised; raises errors of SQLite, which concern the whole group."""
    connection.execute("SAVEPOINT request")
    reply = _attempt(lambda: function(connection))
    if isinstance(reply.error, sqlite3.Error):
        raise reply.error
    if reply.error is not None:
        connection.execute("ROLLBACK TO request")
    connection.execute("RELEASE request")
    return reply


def _read(connection: sqlite3.Connection, function: _StoreFunction) -> _Reply:
    """The reply of ``function``, which sees one consistent state of the database."""
    try:
        connection.execute("BEGIN")
    except sqlite3.Error as error:
        return _Reply(error=error)
    reply = _attempt(lambda: function(connection))
    _roll_back(connection)
    return reply


def _roll_back(connection: sqlite3.Connection) -> None:
    # After some errors, such as a full disk, SQLite has rolled back already.
    if connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def _attempt(function: Callable[[], Any]) -> _Reply:
    try:
        return _Reply(call_for_future(function))
    except Exception as error:  # noqa: BLE001 - raised in the coroutine that asked
        return _Reply(error=error)


def _answer(replies: Sequence[tuple[asyncio.Future[Any], _Reply]]) -> None:
    """Resolve each future with its reply; wakes each loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], _Reply]]] = {}
    for future, reply in replies:
        by_loop.setdefault(future.get_loop(), []).append((future, reply))
    for loop, pairs in by_loop.items():
        with suppress(RuntimeError):  # A loop that is closed has no coroutine that waits.
            loop.call_soon_threadsafe(_resolve, pairs)


def _resolve(replies: Sequence[tuple[asyncio.Future[Any], _Reply]]) -> None:
    for future, (value, error) in replies:
        if future.done():
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
