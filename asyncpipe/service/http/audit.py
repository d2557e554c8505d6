"""The audit: who changed what, and who was refused; one JSON line each on the logger ``asyncpipe.audit``.

::

    {"when": "2026-11-21T18:00:00.123Z", "client": "127.0.0.1", "token": "ci", "what": "pause", "job": "01j…",
     "outcome": "ok", "key": null, "state": "running"}

``outcome`` is ``ok`` or ``refused``; a refusal also has ``status`` and ``reason``. An idempotency key appears as a
hash, of a token its name. ``audit_files`` writes the lines to files, on a thread of its own, so the event loop never
waits for a disk. The files are bounded. Refusals have a file of their own, so that many refusals cannot push changes
out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Full, Queue
from typing import Any

from starlette.requests import HTTPConnection

from asyncpipe.errors import OptionError
from asyncpipe.service.http.redact import shorten
from asyncpipe.service.http.who import holder_of
from asyncpipe.service.whole_writes import write_whole

__all__ = ["LOGGER", "Audit", "AuditFile", "audit_files"]

LOGGER = "asyncpipe.audit"
CHANGES, REFUSALS = "audit.jsonl", "refused.jsonl"
MOST_BYTES = 64 * 2**20
"""Of one file, about 200,000 lines. A full file is renamed to ``audit.jsonl.1``, which it replaces."""
MOST_WAITING = 10_000
"""Lines that wait for the disk; further lines are lost, and the log says how many."""

_logger = logging.getLogger(LOGGER)
_troubles = logging.getLogger("asyncpipe.service.http")


class Audit:
    """Logs the lines of one API; several APIs in one process have one each, so that each has its own files."""

    def line(self, request: HTTPConnection, what: str, outcome: str, **more: Any) -> None:
        """Log one line; ``more`` adds members such as ``job``, ``status`` and ``reason``."""
        keys = request.headers.getlist("Idempotency-Key")
        table = {
            "when": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "client": None if request.client is None else request.client.host,
            "token": None if (holder := holder_of(request)) is None else holder.name,
            "what": shorten(what),
            "job": None,
            "outcome": outcome,
            "key": hashlib.sha256(keys[0].encode()).hexdigest()[:16] if keys else None,
            **{name: shorten(value) if isinstance(value, str) else value for name, value in more.items()},
        }
        _logger.info("%s", json.dumps(table), extra={"audit": self, "refused": outcome != "ok"})


@asynccontextmanager
async def audit_files(audit: Audit, folder: Path) -> AsyncIterator[None]:
    """Write the lines of ``audit`` to its files in ``folder`` during the block; at its end all of them are written.

    Raises ``OptionError`` where the files cannot be opened.
    """
    files: list[AuditFile] = []
    try:
        for name, refused in ((CHANGES, False), (REFUSALS, True)):
            files.append(await asyncio.to_thread(AuditFile, folder / name, refused))
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


class _BoundedQueueHandler(QueueHandler):
    """Queues the lines of one API; drops a line rather than wait when the queue is full."""

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
            if self._lost.bit_count() == 1:  # At 1, 2, 4, 8 …
                _troubles.error("the audit file cannot be written fast enough: %d lines are lost", self._lost)


class _Listener(QueueListener):
    """The thread that writes the files."""

    def __init__(self, queue: Queue[Any], *handlers: logging.Handler) -> None:
        super().__init__(queue, *handlers)
        self._put = queue.put

    def enqueue_sentinel(self) -> None:
        """Ask the thread to end; waits for room in the queue, where the base class would raise ``Full``."""
        self._put(None)


class AuditFile(RotatingFileHandler):
    """A rotating file that only this user can read. A line that cannot be written whole goes to the log instead."""

    def __init__(self, path: Path, refused: bool) -> None:
        """For refusals if ``refused``, else for changes."""
        super().__init__(path, maxBytes=MOST_BYTES, backupCount=1, encoding="ascii")
        self._refused = refused
        self._failed = False

    def filter(self, record: logging.LogRecord) -> Any:
        return getattr(record, "refused", None) is self._refused and super().filter(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, in a new file if this one is full."""
        try:
            if self.shouldRollover(record):
                self.doRollover()
            self.stream = self.stream or self._open()
            descriptor = self.stream.fileno()
            write_whole(descriptor, f"{record.getMessage()}\n".encode(), os.fstat(descriptor).st_size)
            self._failed = False
        except OSError as error:
            if not self._failed:  # Reported once, until a line can be written again.
                _troubles.error("the audit file cannot be written (%s); its lines are here", error.strerror)
            self._failed = True
            _troubles.warning("%s", record.getMessage())

    def doRollover(self) -> None:
        """Rename the full file to ``.1`` and open a new one; ``.1`` stays if somebody has moved the full file."""
        if os.path.exists(self.baseFilename):
            super().doRollover()
        elif self.stream is not None:
            self.stream.close()
            self.stream = self._open()

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return open(self.baseFilename, "a", encoding="ascii", opener=lambda path, _: os.open(path, flags, 0o600))
