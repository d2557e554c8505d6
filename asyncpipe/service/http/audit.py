"""Who changed what, and who was refused: a JSON line each on the logger ``asyncpipe.audit``.

::

    {"when": "2026-11-21T18:00:00.123Z", "client": "127.0.0.1", "what": "pause", "job": "01j…", "outcome": "ok",
     "key": null, "state": "running"}

``outcome`` is ``ok`` or ``refused``, with ``status`` and ``reason`` then. Of an idempotency key there is a hash, of a
token nothing. ``audit_files`` writes the lines to files, on a thread of its own: the loop never waits for a disk. The
files are bounded, so there are two of them: whoever is refused, as often as may be, pushes no change out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import Full, Queue
from typing import Any

from aiohttp import web

from asyncpipe.errors import OptionError
from asyncpipe.service.http.redact import shorten

__all__ = ["LOGGER", "Audit", "audit_files"]

LOGGER = "asyncpipe.audit"
CHANGES, REFUSALS = "audit.jsonl", "refused.jsonl"
MOST_BYTES = 64 * 2**20
"""Of a file, some 200,000 lines. When it is full it becomes the older one, ``audit.jsonl.1``, and replaces that."""
MOST_WAITING = 10_000
"""Lines that a disk may be behind; more are lost, and counted in the log."""

_logger = logging.getLogger(LOGGER)
_troubles = logging.getLogger("asyncpipe.service.http")


class Audit:
    """Writes the lines of one API; those of another one in this process are told apart by it."""

    def line(self, request: web.Request, what: str, outcome: str, **more: Any) -> None:
        """One line; ``more`` adds members such as ``job``, ``status`` and ``reason``."""
        keys = request.headers.getall("Idempotency-Key", [])
        table = {
            "when": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "client": request.remote,
            "what": shorten(what),
            "job": None,
            "outcome": outcome,
            "key": hashlib.sha256(keys[0].encode("utf-8", "surrogateescape")).hexdigest()[:16] if keys else None,
            **{name: shorten(value) if isinstance(value, str) else value for name, value in more.items()},
        }
        _logger.info("%s", json.dumps(table), extra={"audit": self, "refused": outcome != "ok"})


@asynccontextmanager
async def audit_files(audit: Audit, folder: Path) -> AsyncIterator[None]:
    """During the block the lines of ``audit`` go to its files in ``folder``; at its end all of them are there.

    Raises ``OptionError`` where the files cannot be opened.
    """
    files: list[_File] = []
    try:
        for name, refused in ((CHANGES, False), (REFUSALS, True)):
            files.append(await asyncio.to_thread(_File, folder / name, refused))
    except OSError as error:
        _close(files)
        raise OptionError(f"the audit file in {folder} cannot be opened: {error.strerror}") from error
    queue: Queue[Any] = Queue(MOST_WAITING)
    handler = _BoundedQueueHandler(queue, audit)
    listener = _Listener(queue, *files)
    level = _logger.level
    if not _logger.isEnabledFor(logging.INFO):
        _logger.setLevel(logging.INFO)
    listener.start()
    _logger.addHandler(handler)
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.setLevel(level)
        await asyncio.shield(asyncio.to_thread(_finish, listener, files))


def _finish(listener: QueueListener, files: Iterable[logging.Handler]) -> None:
    listener.stop()
    _close(files)


def _close(files: Iterable[logging.Handler]) -> None:
    for file in files:
        file.close()


class _Listener(QueueListener):
    """The thread that writes."""

    def __init__(self, queue: Queue[Any], *handlers: logging.Handler) -> None:
        super().__init__(queue, *handlers)
        self._put = queue.put

    def enqueue_sentinel(self) -> None:
        """Ask for the end, behind all that waits: the queue may be full."""
        self._put(None)


class _BoundedQueueHandler(QueueHandler):
    """Takes one API's lines, and loses some before it waits."""

    def __init__(self, queue: Queue[Any], audit: Audit) -> None:
        super().__init__(queue)
        self._audit = audit
        self._lost = 0

    def filter(self, record: logging.LogRecord) -> Any:
        return getattr(record, "audit", None) is self._audit and super().filter(record)

    def prepare(self, record: logging.LogRecord) -> Any:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            self._lost += 1
            if self._lost & (self._lost - 1) == 0:  # At 1, 2, 4, 8 …
                _troubles.error("the disk does not take the audit file: %d lines are lost", self._lost)


class _File(logging.Handler):
    """A file, which is this user's own. A line is in it whole or not at all; one that is not goes to the log."""

    def __init__(self, path: Path, refused: bool) -> None:
        """For the lines of what was ``refused``, or of what was not."""
        super().__init__()
        self._path = path
        self._refused = refused
        self._descriptor = _open(path)
        self._failed = False

    def filter(self, record: logging.LogRecord) -> Any:
        return getattr(record, "refused", None) is self._refused and super().filter(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        line = record.getMessage().encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            if size and size + len(line) > MOST_BYTES:
                self._begin_another()
                size = 0
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            self._failed = False
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, size)
            if not self._failed:  # Once, until it works again.
                _troubles.error("the audit file cannot be written (%s); its lines are here", error.strerror)
            self._failed = True
            _troubles.warning("%s", record.getMessage())

    def _begin_another(self) -> None:
        with suppress(FileNotFoundError):  # Somebody has moved it, or it was moved before and no other could be made.
            os.replace(self._path, f"{self._path}.1")
        full, self._descriptor = self._descriptor, _open(self._path)
        os.close(full)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            os.close(self._descriptor)
        super().close()


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
