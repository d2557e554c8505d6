"""The store's database file: opening it safely, and SQLite's errors in words.

A commit that returned is on disk: the file has a write-ahead log and is synced at every commit. While the store is
open, no other process can open it as its own, since two services would run the same jobs twice::

    open_database    holds jobs.sqlite3.lock: an empty database that it has locked for good, by SQLite's own locks
    open_beside      does without: a command of the operator reads (a backup), or changes what the service reads anew

So the lock between services is one file, and the locks of single transactions are on the other: a reader beside the
service sees one state of all jobs, however long it reads, and delays no commit.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from enum import StrEnum
from pathlib import Path

from asyncpipe.errors import AsyncpipeError
from asyncpipe.service.store.schema import APPLICATION_ID, SCHEMA, UPGRADES, VERSION
from asyncpipe.whole_folder import sync_folder

__all__ = ["STORE", "StoreError", "StoreProblem", "check_store", "explain", "is_in_use", "open_beside", "open_database"]


STORE = "jobs.sqlite3"
"""The file in a service's folder."""


class StoreProblem(StrEnum):
    """Why a store cannot be used; callers decide by it whether to try again."""

    FULL = "full"
    LOCKED = "locked"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    OTHER_VERSION = "other version"
    FORBIDDEN = "forbidden"
    CLOSED = "closed"
    FAILED = "failed"


class StoreError(AsyncpipeError, RuntimeError):
    """The job store cannot carry out a request; the message names the file, what is wrong and what would help.

    The request changed nothing. ``problem`` is the reason, ``path`` the file; the original error, if there is one, is
    the ``__cause__``.
    """

    def __init__(self, path: Path, problem: StoreProblem, what: str, advice: str) -> None:
        super().__init__(f"the job store {path} {what}; {advice}")
        self.path = path
        self.problem = problem
        self.what = what


_RESTORE = "restore it from a backup, or move it, its -wal file, audit.jsonl and the folder jobs away to begin anew"
_ONE_SERVICE = "only one process can use a store: stop the other one, or name another file"
_LET_IN = "the user of this process needs to read and write the file and its folder"
_FULL = (StoreProblem.FULL, "has no room on its disk", "free some space and try again")
_WORDS: dict[int, tuple[StoreProblem, str, str]] = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_IOERR_SHMSIZE: _FULL,
    sqlite3.SQLITE_BUSY: (StoreProblem.LOCKED, "is in use by another process", _ONE_SERVICE),
    sqlite3.SQLITE_LOCKED: (StoreProblem.LOCKED, "is in use by another process", _ONE_SERVICE),
    sqlite3.SQLITE_CORRUPT: (StoreProblem.DAMAGED, "is damaged", _RESTORE),
    sqlite3.SQLITE_NOTADB: (StoreProblem.DAMAGED, "is damaged, or no SQLite database", _RESTORE),
    sqlite3.SQLITE_CANTOPEN: (StoreProblem.FORBIDDEN, "cannot be opened", _LET_IN),
    sqlite3.SQLITE_PERM: (StoreProblem.FORBIDDEN, "cannot be opened", _LET_IN),
    sqlite3.SQLITE_READONLY: (StoreProblem.FORBIDDEN, "cannot be written", _LET_IN),
    sqlite3.SQLITE_IOERR: (
        StoreProblem.FAILED,
        "could not be read or written",
        "check whether the disk or this user's quota is full, or the disk is failing",
    ),
}
"""By SQLite's primary result code; one of the extended ones has words of its own."""


def explain(path: Path, error: sqlite3.Error) -> StoreError:
    """The ``StoreError`` for ``error`` of the store at ``path``."""
    code = getattr(error, "sqlite_errorcode", None)
    default = (StoreProblem.FAILED, "refused a request", "this looks like a bug in asyncpipe; please report it")
    if isinstance(error, sqlite3.DataError) and code is None:  # Raised in queries.py.
        default = (StoreProblem.DAMAGED, "holds values that it cannot have written", _RESTORE)
    problem, what, advice = default if code is None else _WORDS.get(code) or _WORDS.get(code & 0xFF, default)
    explained = StoreError(path, problem, f"{what} ({error})", advice)
    explained.__cause__ = error
    return explained


def open_database(path: Path, busy_seconds: float) -> OwnConnection:
    """A connection to the store at ``path``, which is created if it does not exist (0600, its folder 0700). Blocks.

    The connection is for the calling thread and has no implicit transactions. Waits up to ``busy_seconds`` for another
    process to release the file. Raises ``StoreError`` where the file cannot be used; the file is unchanged then. On a
    full disk a store that is there can only be read, and by nobody else; ``trouble`` of the connection says why.
    """
    try:
        _make_file(path)
        _make_file(_lock_of(path))
    except OSError as error:
        what = f"cannot be opened ({error.strerror or error})"
        raise StoreError(path, StoreProblem.FORBIDDEN, what, _LET_IN) from error
    try:
        lock = _locked(path, busy_seconds)
        try:
            try:
                connection = _connected(path, busy_seconds, lock)
            except sqlite3.OperationalError as error:
                if (full := explain(path, error)).problem is not StoreProblem.FULL:
                    raise
                # There is no room for the file that processes share; so it is in the memory of this one.
                connection = _connected(path, busy_seconds, lock, "EXCLUSIVE")
                connection.trouble = full
        except BaseException:
            lock.close()
            raise
    except sqlite3.Error as error:
        raise explain(path, error) from error
    return connection


@contextmanager
def open_beside(path: Path, busy_seconds: float = 5.0, *, is_older: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection to the store at ``path`` that a service may have open meanwhile, during the block. Blocks.

    Its transactions are its own: it has none by itself, and a change waits up to ``busy_seconds`` for the service's.
    With ``is_older`` it may be one that a service would upgrade first. Raises ``StoreError``, also where there is no
    store.
    """
    if not path.is_file():
        advice = "name the folder of a service; it is the setting `folder`"
        raise StoreError(path, StoreProblem.FORBIDDEN, "is not there", advice)
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw", timeout=busy_seconds, isolation_level=None, uri=True
        )
        with closing(connection):
            _check_ours(connection, path, is_older=is_older)
            yield connection
    except sqlite3.Error as error:
        raise explain(path, error) from error


def is_in_use(path: Path) -> bool:
    """Whether a process has opened the store at ``path`` as its own; not to be called in that one. Blocks briefly."""
    if _lock_of(path).exists():
        try:
            _locked(path, 0.0).close()
        except sqlite3.Error as error:
            if (found := explain(path, error)).problem is not StoreProblem.LOCKED:
                raise found from error
            return True
    return False


def check_store(path: Path) -> None:
    """Raise ``StoreError`` unless the file at ``path`` is an intact store that this version can open. Blocks."""
    with open_beside(path, is_older=True) as connection:
        _check_intact(connection, path)


class OwnConnection(sqlite3.Connection):
    """The connection of the process that owns the store; gives the lock back when it is closed."""

    lock: sqlite3.Connection | None = None
    trouble: StoreError | None = None
    """Why it can only read."""

    def close(self) -> None:
        super().close()
        if self.lock is not None:
            self.lock.close()


def _connected(path: Path, busy_seconds: float, lock: sqlite3.Connection, mode: str = "NORMAL") -> OwnConnection:
    connection = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, factory=OwnConnection)
    try:
        connection.execute(f"PRAGMA locking_mode = {mode}")
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    connection.lock = lock
    return connection


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _locked(path: Path, busy_seconds: float) -> sqlite3.Connection:
    """A connection that holds the lock of the store at ``path`` until it is closed, or its process ends."""
    lock = sqlite3.connect(_lock_of(path), timeout=busy_seconds, isolation_level=None)
    try:
        lock.execute("PRAGMA journal_mode = MEMORY")  # No second file for what is never written.
        lock.execute("BEGIN EXCLUSIVE")
    except BaseException:
        lock.close()
        raise
    return lock


def _make_file(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        # SQLite creates its other files with the mode of this one. An existing file is not opened here: closing it
        # would release the POSIX locks that another store of this process holds on it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    sync_folder(path.parent)  # Without that a power failure can lose the name of the file.


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    version = _check_ours(connection, path, is_older=True)
    mode = _pragma(connection, "journal_mode = WAL")
    if mode != "wal":
        advice = "put it on a local disk"
        raise StoreError(path, StoreProblem.FAILED, f"cannot have a write-ahead log (its journal is {mode!r})", advice)
    _check_intact(connection, path)
    while version != VERSION:
        try:
            connection.executescript(f"BEGIN IMMEDIATE; {UPGRADES.get(version, SCHEMA)} COMMIT;")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise


def _check_intact(connection: sqlite3.Connection, path: Path) -> None:
    if (found := _pragma(connection, "integrity_check(1)")) != "ok":
        raise StoreError(path, StoreProblem.DAMAGED, f"is damaged ({found})", _RESTORE)


def _check_ours(connection: sqlite3.Connection, path: Path, *, is_older: bool) -> int:
    """The version of its tables; 0 for an empty file. Raises ``StoreError`` for another program's, and for another
    version's, unless that ``is_older`` and can be upgraded.

    From then on a commit is on disk when it returns, and rows of a job go with it.
    """
    for pragma in ("trusted_schema = OFF", "foreign_keys = ON", "synchronous = FULL"):
        connection.execute(f"PRAGMA {pragma}")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (entries,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if entries and _pragma(connection, "application_id") != APPLICATION_ID:
        what = "is another program's database"
        raise StoreError(path, StoreProblem.FOREIGN, what, "name a file that is not there yet")
    if entries and version != VERSION and not (is_older and version in UPGRADES):
        what = f"was written by another version of asyncpipe (schema {version}; this one has {VERSION})"
        advice = "use that version, or name another file"
        if version in UPGRADES:
            advice = "start its service once with this version, which upgrades it"
        raise StoreError(path, StoreProblem.OTHER_VERSION, what, advice)
    return int(version) if entries else 0


def _pragma(connection: sqlite3.Connection, pragma: str) -> object:
    (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return value
