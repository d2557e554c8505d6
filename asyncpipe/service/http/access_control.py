"""Access control: the checks that every request passes first, in this order.

::

    429  too many requests                     before the token, since guessing tokens takes requests, too
    421  a host that is not this server        against DNS rebinding
    401  the token is missing or wrong
    403  a change sent by a foreign page       a browser may add a stored password to it

A 429 leaves no line in the audit, so a client cannot cause more lines than its rate allows. Browsers do not let foreign
pages *read* the answers (``observe/http_hosts.py``). Probes of ``livez`` and ``readyz`` under this server's names need
no token and are not counted: many requests from one address must not get the process restarted.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import SecretStr

from asyncpipe.observe.http_hosts import is_own_page, own_host
from asyncpipe.service.http.audit import Audit
from asyncpipe.service.http.problems import Problem
from asyncpipe.service.http.rate_limits import TokenBuckets, client_of, retry_after

__all__ = ["READING", "AccessControl"]

READING = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods that change nothing."""
REALM = "asyncpipe"
CHALLENGES = [
    ("WWW-Authenticate", f'Bearer realm="{REALM}"'),
    ("WWW-Authenticate", f'Basic realm="{REALM}", charset="UTF-8"'),
]
OWN = frozenset({"", "same-origin", "none"})
"""Values of ``Sec-Fetch-Site`` that a change may have; ``same-site`` may be another port of the host, so foreign."""

_logger = logging.getLogger("asyncpipe.service.http")


class AccessControl:
    """Checks requests; refuses them with a ``Problem`` and, except for the rate, a line in the audit."""

    def __init__(self, hosts: Collection[str], token: SecretStr | None, buckets: TokenBuckets, audit: Audit) -> None:
        """``hosts`` are further names of this server; without a ``token`` every client may do everything."""
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)
        # Digests have equal lengths, so the time of a comparison does not reveal the token's length.
        self._token = None if token is None else _digest(token.get_secret_value().encode())
        self._buckets = buckets
        self._audit = audit
        self._probes: set[web.AbstractResource | None] = set()

    def free(self, *routes: web.AbstractRoute) -> None:
        """Let requests of these routes through without a token, and do not count them."""
        self._probes |= {route.resource for route in routes}

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The middleware; it follows ``catch_problems`` and precedes all others."""
        self._check(request)
        return await handler(request)

    def _check(self, request: web.Request) -> None:
        """Raise a ``Problem`` unless ``request`` may be answered."""
        is_own = own_host(request, self._hosts)
        resource = request.match_info.route.resource
        if is_own and resource is not None and resource in self._probes:
            return
        wait = self._buckets.take(client_of(request.remote))
        if wait:
            headers = [("Retry-After", retry_after(wait))]
            raise Problem(429, "too-many-requests", "this client sends too many requests", headers=headers)
        if not is_own:
            detail = "this server does not have that name; use its address"
            raise self._refused(request, Problem(421, "foreign-host", detail))
        if self._token is not None and not self._is_right(request):
            detail = "send the token: 'Authorization: Bearer TOKEN', or as the password of any user"
            raise self._refused(request, Problem(401, "unauthorized", detail, headers=CHALLENGES))
        self._check_page(request)

    def _check_page(self, request: web.Request) -> None:
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "").lower()
        foreign = origin is not None and not is_own_page(origin, request.headers.get("Host", ""), self._hosts)
        if foreign or (request.method not in READING and site not in OWN):
            raise self._refused(request, Problem(403, "foreign-page", "pages of other servers are refused"))

    def _is_right(self, request: web.Request) -> bool:
        sent = request.headers.getall("Authorization", [])
        token = _sent_token(sent[0]) if len(sent) == 1 else None
        return token is not None and hmac.compare_digest(_digest(token), self._token or b"")

    def _refused(self, request: web.Request, problem: Problem) -> Problem:
        self._audit.line(
            request, f"{request.method} {request.path}", "refused", status=problem.status, reason=problem.kind
        )
        return problem


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _sent_token(header: str) -> bytes | None:
    """The token in an ``Authorization`` header: the value of ``Bearer``, or the password of ``Basic``."""
    scheme, _, rest = header.partition(" ")
    shown = rest.strip().encode("utf-8", "surrogateescape")
    match scheme.lower():
        case "bearer":
            return shown
        case "basic":
            try:
                return base64.b64decode(shown, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return None
    return None
