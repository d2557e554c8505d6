"""Who changed what, and who was refused: a JSON line each on the logger ``asyncpipe.audit``.

::

    {"when": "2026-11-21T18:00:00.123Z", "client": "127.0.0.1", "what": "pause", "job": "01j…", "outcome": "ok",
     "key": null, "state": "running"}

``outcome`` is ``ok`` or ``refused``, with ``status`` and ``reason`` then. Of an idempotency key there is a hash, of a
token nothing. ``audit_file`` writes the lines to a file, on a thread of its own: the loop never waits for a disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import Full, Queue
from typing import Any

from aiohttp import web

from asyncpipe.errors import OptionError
from asyncpipe.service.http.redact import shorten

__all__ = ["LOGGER", "Audit", "audit_file"]

LOGGER = "asyncpipe.audit"
NAME = "audit.jsonl"
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
        _logger.info("%s", json.dumps(table), extra={"audit": self})


@asynccontextmanager
async def audit_file(audit: Audit, folder: Path) -> AsyncIterator[None]:
    """During the block the lines of ``audit`` go to ``audit.jsonl`` in ``folder``; at its end all of them are there.

    Raises ``OptionError`` where the file cannot be opened.
    """
    try:
        file = await asyncio.to_thread(_File, folder / NAME)
    except OSError as error:
        raise OptionError(f"the audit file in {folder} cannot be opened: {error.strerror}") from error
    queue: Queue[Any] = Queue(MOST_WAITING)
    handler = _Waiting(queue, audit)
    listener = _Listener(queue, file)
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
        await asyncio.shield(asyncio.to_thread(_finish, listener, file))


def _finish(listener: QueueListener, file: logging.Handler) -> None:
    listener.stop()
    file.close()


class _Listener(QueueListener):
    """The thread that writes."""

    def __init__(self, queue: Queue[Any], *handlers: logging.Handler) -> None:
        super().__init__(queue, *handlers)
        self._put = queue.put

    def enqueue_sentinel(self) -> None:
        """Ask for the end, behind all that waits: the queue may be full."""
        self._put(None)


class _Waiting(QueueHandler):
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
    """The file, which is this user's own. A line is in it whole or not at all; one that is not goes to the log."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        line = record.getMessage().encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
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

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            os.close(self._descriptor)
        super().close()
