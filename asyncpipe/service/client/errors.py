"""What calls of a client raise, beside ``OptionError`` for what cannot be asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncpipe.errors import AsyncpipeError

__all__ = ["ApiError", "DamagedDownloadError", "UnreachableError", "WaitTimeoutError"]


class ApiError(AsyncpipeError, RuntimeError):
    """The service refused a request: its HTTP ``status``, ``title``, ``detail``, and ``problems`` by wrong key.

    ``kind`` is a name for programs (``job-state``), ``body`` the whole response, ``retry_after`` in seconds.
    """

    def __init__(self, status: int, body: Mapping[str, Any], retry_after: float = 0.0) -> None:
        self.status = status
        self.retry_after = retry_after
        self.body = dict(body)
        self.title = str(body.get("title") or "HTTP error")
        self.detail = str(body.get("detail") or "")
        self.kind = str(body.get("type") or "").rpartition(":")[2]
        self.problems = _problems(body.get("problems"))
        lines = [f"{self.title} ({status}): {self.detail}".removesuffix(": ")]
        super().__init__("\n".join([*lines, *(f"{key}: {text}" if key else text for key, text in self.problems)]))


class UnreachableError(AsyncpipeError, ConnectionError):
    """The service could not be reached, or its response did not arrive; the message says where and why."""


class DamagedDownloadError(AsyncpipeError, OSError):
    """What was downloaded does not have the SHA-256 that the service said; it was removed."""


class WaitTimeoutError(AsyncpipeError, TimeoutError):
    """A job did not end within the given time; it continues."""


def _problems(found: object) -> list[tuple[str, str]]:
    if not isinstance(found, list):
        return []
    return [(str(row.get("key", "")), str(row.get("text", ""))) for row in found if isinstance(row, dict)]
