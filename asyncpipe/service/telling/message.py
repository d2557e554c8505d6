"""What a webhook is told: the message, and the headers that show who sent it and when. Pure.

The form is that of Standard Webhooks (https://www.standardwebhooks.com), for which many languages have libraries::

    webhook-id: 01j….118                    the same each time that this message is sent
    webhook-timestamp: 1790000000           seconds of Unix time, of this attempt
    webhook-signature: v1,K5oZfzN95Z9U…     base64 of HMAC-SHA256 of "id.timestamp.body"

    {"type": "job.failed", "timestamp": "2026-11-21T18:00:00.123Z", "data": {"job": "01j…", "name": …, "cause": …}}
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from datetime import UTC, datetime

from asyncpipe.service.job_states import JSON, JobRecord, Transition

__all__ = ["body_of", "id_of", "signed_headers"]


def id_of(transition: Transition) -> str:
    """The message's id, by which a receiver knows one that it has already."""
    return f"{transition.job}.{transition.sequence}"


def body_of(transition: Transition, record: JobRecord, lost: int) -> bytes:
    """The message about a job's ``transition``; ``record`` is the job now.

    ``lost`` messages before it could not be delivered, and are not sent any more.
    """
    data: dict[str, JSON] = {
        "job": record.id,
        "name": record.spec.name,
        "entry": record.spec.entry,
        "state": str(transition.to_state),
        "was": None if transition.from_state is None else str(transition.from_state),
        "cause": transition.cause,
        "step": record.step,
        "attempts": record.attempts,
        "snapshot": record.snapshot,
        "tags": list(record.spec.tags),
        "lost": lost,
    }
    when = datetime.fromtimestamp(transition.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"type": f"job.{transition.to_state}", "timestamp": when, "data": data}).encode()


def signed_headers(key: bytes, message: str, body: bytes, at: float) -> Mapping[str, str]:
    """The headers of an attempt at the Unix time ``at`` to deliver ``body``, the message of the id ``message``."""
    timestamp = str(int(at))
    signature = hmac.new(key, f"{message}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "content-type": "application/json",
        "webhook-id": message,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(signature).decode()}",
    }
