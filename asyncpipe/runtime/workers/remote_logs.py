"""Log records of a worker, handled by the controller's loggers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from logging.handlers import QueueHandler
from queue import SimpleQueue

__all__ = ["RemoteLogHandler", "handle_remote_record"]


class RemoteLogHandler(QueueHandler):
    """Gives each record, ready to be pickled, to ``send``. For a worker's root logger."""

    def __init__(self, worker: str, send: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(SimpleQueue())
        self._worker = worker
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        record.processName = self._worker
        self._send(record)


def handle_remote_record(record: logging.LogRecord) -> None:
    """Handle the record of a worker as one of this process's, with the worker's name before the text."""
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        record.msg = f"{record.processName}: {record.msg}"
        logger.handle(record)
