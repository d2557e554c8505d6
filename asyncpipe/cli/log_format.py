"""The log of a command that serves: lines of text or of JSON on stderr, of which refused requests get only a few.

::

    2026-11-21 18:00:00,123 ERROR asyncpipe.service.jobs: job 01j… (charlm) failed at step 43, attempt 2: …
    {"time": "2026-11-21T18:00:00.123Z", "level": "error", "logger": "asyncpipe.service.jobs", "message": "job …",
     "job": "01j…", "job_name": "charlm", "event": "end", "state": "failed", "step": 43, …}
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

__all__ = ["FORMATS", "JsonLines", "RefusalLimit", "log_to_stderr"]

FORMATS = ("text", "json")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
AT_ONCE, EACH = 10, 60.0
"""So many refused requests are logged within so many seconds; the next one says how many were not."""

_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def log_to_stderr(level: str, form: str) -> None:
    """Have the root logger write to stderr, from ``level`` on, in one of ``FORMATS``."""
    handler = _LimitedHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, logger and message, and what else the record says, by its names."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        table: dict[str, Any] = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _OF_EVERY_RECORD and (value is None or isinstance(value, str | int | float | bool)):
                table.setdefault(name, value)
        if record.exc_info:
            table["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            table["stack"] = self.formatStack(record.stack_info)
        return json.dumps(table)


class RefusalLimit:
    """Lets a few records about refused requests pass in each minute, and all other records.

    Anybody who reaches the port can have a request refused, and a flood of them must not be one of the log. The files
    beside the audit have each refusal.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = 0.0
        self._passed = 0
        self._held_back = 0

    def let_through(self, record: logging.LogRecord) -> logging.LogRecord | None:
        """What is logged in the place of ``record``; ``None`` for nothing."""
        if not getattr(record, "refused", False):
            return record
        now = self._clock()
        if now - self._since >= EACH:
            self._since, self._passed = now, 0
        if self._passed >= AT_ONCE:
            self._held_back += 1
            return None
        self._passed += 1
        if not self._held_back:
            return record
        # A copy: other handlers have the same record.
        told = logging.makeLogRecord(vars(record))
        told.msg, told.args = f"{record.getMessage()} (and {self._held_back} more refused before)", None
        told.not_logged = self._held_back
        self._held_back = 0
        return told


class _LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes what the limit lets through. No filter does that: it could not put another record in the place of one."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._limit = RefusalLimit()

    def emit(self, record: logging.LogRecord) -> None:
        if (shown := self._limit.let_through(record)) is not None:
            super().emit(shown)
