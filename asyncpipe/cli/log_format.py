"""Where the log of ``asyncpipe serve`` goes: to stderr as text or JSON lines, and the audit to files of its own."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncpipe.errors import missing_package

__all__ = ["FORMATS", "LEVELS", "add_to_audit", "service_log"]

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
JSON: dict[str, Any] = {
    "fmt": ["asctime", "levelname", "name", "message"],
    "rename_fields": {"asctime": "time", "levelname": "level", "name": "logger"},
}
CHANGES = "audit.jsonl"
MOST_BYTES = 64 * 2**20
"""Of one file of the audit, about 200,000 lines. A full file is renamed to ``audit.jsonl.1``, which it replaces."""


def service_log(level: str, form: str, folder: Path) -> dict[str, Any]:
    """A configuration for ``logging.config.dictConfig``: stderr from ``level`` on, in one of ``FORMATS``.

    What ``asyncpipe.service.http.audit`` logs goes to ``folder``: changes to ``audit.jsonl`` and refusals to
    ``refused.jsonl``, so that many refusals push no changes out.
    """
    if find_spec("pythonjsonlogger") is None:
        raise missing_package("a service writes JSON lines with python-json-logger", "service")
    audit = {"formatter": "json", "class": "logging.handlers.RotatingFileHandler", "delay": True}
    audit |= {"maxBytes": MOST_BYTES, "backupCount": 1, "encoding": "utf-8"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "text": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
            "json": {"()": "pythonjsonlogger.json.JsonFormatter", **JSON},
        },
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": form},
            "changes": {**audit, "filename": str(folder / CHANGES)},
            "refusals": {**audit, "filename": str(folder / "refused.jsonl")},
        },
        "root": {"level": level.upper(), "handlers": ["stderr"]},
        "loggers": {
            "asyncpipe.audit": {"level": "INFO", "handlers": ["changes"], "propagate": False},
            "asyncpipe.audit.refused": {"handlers": ["refusals"], "propagate": False},
            "uvicorn": {"level": "WARNING"},
        },
    }


def add_to_audit(folder: Path, token: str, what: str) -> None:
    """Add a change to the audit in ``folder``, by this process's user, beside a service that may run. Blocks.

    The line has the fields of ``asyncpipe.service.http.audit``. Only the service renames a file that is full.
    """
    from pythonjsonlogger.json import JsonFormatter

    table = {"client": f"user {os.getuid()}", "token": token, "what": what}
    logger = logging.getLogger("asyncpipe.audit")
    with closing(logging.FileHandler(folder / CHANGES, encoding="utf-8")) as handler:
        handler.setFormatter(JsonFormatter(**JSON))
        text = f"{what}: {token}, by {table['client']}"
        handler.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None, extra=table))
