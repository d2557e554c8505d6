"""The token in a request's ``Authorization`` header, as every HTTP server of asyncpipe reads it."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence

__all__ = ["CHALLENGES", "sent_token", "token_digest"]

REALM = "asyncpipe"
CHALLENGES = (
    ("WWW-Authenticate", f'Bearer realm="{REALM}"'),
    ("WWW-Authenticate", f'Basic realm="{REALM}", charset="UTF-8"'),
)
"""Headers of a 401: how a token may be sent. Browsers ask for a password, which is the token."""


def sent_token(headers: Sequence[str]) -> bytes | None:
    """The token that the values of ``Authorization`` carry: that of ``Bearer``, or the password of ``Basic``.

    ``None`` unless the header was sent once, in one of these forms.
    """
    if len(headers) != 1:
        return None
    scheme, _, rest = headers[0].partition(" ")
    shown = rest.strip().encode("latin-1", "replace")  # As headers are decoded.
    match scheme.lower():
        case "bearer":
            return shown
        case "basic":
            try:
                return base64.b64decode(shown, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return None
    return None


def token_digest(token: bytes) -> bytes:
    """What is kept and compared in place of ``token``: 32 bytes.

    Digests have equal lengths, so comparing them tells nothing of a token's length. A fast hash is enough, since tokens
    are random and long: nobody guesses one by trying.
    """
    return hashlib.sha256(token).digest()
