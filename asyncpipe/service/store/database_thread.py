"""The thread that owns a store's connection: it does what waits, many requests in one commit, each with its own answer.

A sync of the disk costs the same for one request as for a hundred, so whatever has come while the last one was under
way is committed together::

    coroutines   submit  pause  get  submit …          each waits for its own future
                    └──────┴─────┴─────┴─▶ queue
    the thread   BEGIN  [submit] [pause] [submit]  COMMIT  [get]  ─▶ one wake-up of the loop
                           each in a savepoint              reads see only what is committed

A request that raises is undone alone. Where SQLite itself fails (a full disk), nothing of the group was kept, and each
of its requests is tried once more by itself: what is too large for the disk does not fail its neighbours.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from asyncpipe.train.blocking_calls import call_for_future, wait_to_end

__all__ = ["DatabaseThread"]

LARGEST_GROUP = 128
"""Requests in one commit, so that the first of a flood does not wait for the last."""

_T = TypeVar("_T")
_Work = Callable[[sqlite3.Connection], Any]


class _Reply(NamedTuple):
    value: Any = None
    error: Exception | None = None


class _Request(NamedTuple):
    work: _Work
    writes: bool
    future: asyncio.Future[Any]


class _RequestQueue:
    """Requests on their way to the thread; once closed it takes no more, and what is in it still gets there."""

    def __init__(self) -> None:
        self.commits = 0
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def put(self, request: _Request) -> bool:
        """Whether it was taken."""
        with self._lock:
            if not self._closed:
                self._queue.put(request)
            return not self._closed

    def close(self) -> None:
        """May be called again, from any thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def take(self) -> list[_Request]:
        """What waits, one request at least; blocks. None once it is closed and all were taken."""
        group: list[_Request] = []
        while not group or (len(group) < LARGEST_GROUP and not self._queue.empty()):
            request = self._queue.get()
            if request is None:
                self._queue.put(None)
                break
            group.append(request)
        return group


class DatabaseThread:
    """Runs functions on a connection in a thread of its own. Opened once and closed once; requests from any loop."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], sqlite3.Connection],
        explain: Callable[[sqlite3.Error], Exception],
        closed: Callable[[], Exception],
    ) -> None:
        """``connect`` is called in the thread; ``explain`` and ``closed`` make what requests raise."""
        self._connect = connect
        self._explain = explain
        self._closed_error = closed
        self._mailbox = _RequestQueue()
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None
        self._name = name
        self.stop = self._mailbox.close
        """Lets the thread end when it has done what waits; from any thread, also when this object is gone."""

    @property
    def commits(self) -> int:
        """Transactions that were committed since it was opened."""
        return self._mailbox.commits

    async def open(self) -> None:
        """Start the thread and connect. Raises what ``connect`` raises; no thread is left then."""
        if self._thread is not None:
            raise self._closed_error()
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        self._ended = loop.create_future()
        # The target is no bound method: a writer that is dropped without being closed can be collected.
        arguments = (self._connect, self._explain, self._closed_error, self._mailbox, opened, self._ended)
        self._thread = threading.Thread(target=_serve, args=arguments, name=self._name, daemon=True)
        self._thread.start()
        try:
            await wait_to_end(opened)
        except BaseException:
            await self.close()
            raise

    async def run(self, work: Callable[[sqlite3.Connection], _T], *, writes: bool) -> _T:
        """What ``work`` returns, or raises, once its transaction is committed; called in the thread.

        Whoever is cancelled while waiting learns nothing more, and the request is done all the same. ``work`` may be
        called twice, after everything that it did was undone.
        """
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        if self._thread is None or not self._mailbox.put(_Request(work, writes, future)):
            raise self._closed_error()
        return await future

    async def close(self) -> None:
        """Wait for what waits, then for the thread. May be called again; a cancellation comes through afterwards."""
        self._mailbox.close()
        if self._thread is not None and self._ended is not None:
            try:
                await wait_to_end(self._ended)
            finally:
                self._thread.join()


# In the thread


def _serve(
    connect: Callable[[], sqlite3.Connection],
    explain: Callable[[sqlite3.Error], Exception],
    closed: Callable[[], Exception],
    mailbox: _RequestQueue,
    opened: asyncio.Future[None],
    done: asyncio.Future[None],
) -> None:
    """The life of the thread; however it ends, nobody waits for ever."""
    connection: sqlite3.Connection | None = None
    try:
        outcome = _attempt(connect)
        connection = outcome.value
        _answer([(opened, outcome)])
        while connection is not None and (group := mailbox.take()):
            _answer(_answers(connection, group, explain, mailbox))
            # An idle thread must not keep the last requests alive.
            del group
    finally:
        mailbox.close()
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()
        while group := mailbox.take():
            _answer([(request.future, _Reply(error=closed())) for request in group])
        _answer([(done, _Reply())])


def _answers(
    connection: sqlite3.Connection,
    group: Sequence[_Request],
    explain: Callable[[sqlite3.Error], Exception],
    mailbox: _RequestQueue,
) -> list[tuple[asyncio.Future[Any], _Reply]]:
    """What became of each of ``group``; raises nothing, since whoever waits must hear of it."""
    answers = _attempt(lambda: _do(connection, group, explain, mailbox))
    if answers.error is None:
        told: list[tuple[asyncio.Future[Any], _Reply]] = answers.value
        return told
    _roll_back(connection)
    return [(request.future, _Reply(error=answers.error)) for request in group]


def _do(
    connection: sqlite3.Connection,
    group: Sequence[_Request],
    explain: Callable[[sqlite3.Error], Exception],
    mailbox: _RequestQueue,
) -> list[tuple[asyncio.Future[Any], _Reply]]:
    writing = [request for request in group if request.writes]
    reading = [request for request in group if not request.writes]
    outcomes = _write(connection, [request.work for request in writing], mailbox) if writing else []
    outcomes += [_read(connection, request.work) for request in reading]
    told = [
        _Reply(error=explain(outcome.error)) if isinstance(outcome.error, sqlite3.Error) else outcome
        for outcome in outcomes
    ]
    return [(request.future, outcome) for request, outcome in zip(writing + reading, told, strict=True)]


def _write(connection: sqlite3.Connection, works: Sequence[_Work], mailbox: _RequestQueue) -> list[_Reply]:
    """What became of each of ``works``: those that returned are on disk, those that raised changed nothing."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.Error as error:
        return [_Reply(error=error)] * len(works)
    try:
        outcomes = [_in_savepoint(connection, work) for work in works]
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        _roll_back(connection)
        if len(works) == 1:
            return [_Reply(error=error)]
        return [outcome for work in works for outcome in _write(connection, [work], mailbox)]
    mailbox.commits += 1
    return outcomes


def _in_savepoint(connection: sqlite3.Connection, work: _Work) -> _Reply:
    """What ``work`` came to, and of one that raised no trace; an error of SQLite concerns the whole group."""
    connection.execute("SAVEPOINT request")
    outcome = _attempt(lambda: work(connection))
    if isinstance(outcome.error, sqlite3.Error):
        raise outcome.error
    if outcome.error is not None:
        connection.execute("ROLLBACK TO request")
    connection.execute("RELEASE request")
    return outcome


def _read(connection: sqlite3.Connection, work: _Work) -> _Reply:
    """What ``work`` came to, on one state of the store."""
    try:
        connection.execute("BEGIN")
    except sqlite3.Error as error:
        return _Reply(error=error)
    outcome = _attempt(lambda: work(connection))
    _roll_back(connection)
    return outcome


def _roll_back(connection: sqlite3.Connection) -> None:
    # After some errors, a full disk among them, SQLite has done it already.
    if connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def _attempt(work: Callable[[], Any]) -> _Reply:
    try:
        return _Reply(call_for_future(work))
    except Exception as error:  # noqa: BLE001 - told to whoever waits
        return _Reply(error=error)


def _answer(answers: Sequence[tuple[asyncio.Future[Any], _Reply]]) -> None:
    """Tell each future its outcome, with one wake-up of each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], _Reply]]] = {}
    for future, outcome in answers:
        by_loop.setdefault(future.get_loop(), []).append((future, outcome))
    for loop, some in by_loop.items():
        # A loop that was closed meanwhile has nobody who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, some)


def _settle(answers: Sequence[tuple[asyncio.Future[Any], _Reply]]) -> None:
    for future, (value, error) in answers:
        if future.done():
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
