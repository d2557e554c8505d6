"""The audit: who changed what, and who was refused; a record each on the logger ``asyncpipe.audit``.

Its fields are ``client``, ``user``, ``token`` (its name; none of a user whom a proxy names), ``what`` (method, path),
``status``, ``job`` of a new job, and ``key``, a hash of the idempotency key. Refusals come from
``asyncpipe.audit.refused``, so that they can have a file of their own, and cannot push changes out of a bounded one:
``asyncpipe serve`` does this (``cli/log_format.py``). An application that embeds the API configures the loggers as it
does its others.
"""

from __future__ import annotations

import hashlib
import logging

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message

from asyncpipe.service.known_tokens import TokenHolder

__all__ = ["audit"]

MOST_PATH = 200
"""Characters of a path that a line has."""

_logger = logging.getLogger("asyncpipe.audit")
_refused = logging.getLogger("asyncpipe.audit.refused")


def audit(request: Request, holder: TokenHolder | None, begun: Message) -> None:
    """Log that ``request`` of ``holder`` was answered with the head ``begun``."""
    key = request.headers.get("Idempotency-Key")
    location = Headers(raw=begun.get("headers", [])).get("Location", "")
    table = {
        "client": None if request.client is None else request.client.host,
        "user": None if holder is None else holder.user,
        "token": None if holder is None else holder.token,
        "what": f"{request.method} {request.scope['path'][:MOST_PATH]}",
        "status": begun["status"],
        "job": location.rpartition("/")[2] or None,
        "key": None if key is None else hashlib.sha256(key.encode()).hexdigest()[:16],
    }
    logger = _logger if begun["status"] < 400 else _refused
    logger.info("%(what)s: %(status)s, by %(client)s", table, extra=table)
