"""Who may ask: the first thing that happens to a request, in this order.

::

    429  too often                             before the token: guessing is asking, too
    421  a name that is not this server's      DNS rebinding
    401  no token, or another one
    403  a change that a foreign page sends    it may ride on a browser's stored password

A 429 leaves no line in the audit, so a client has no more lines than requests. What a foreign page *reads* its browser
keeps from it (``hosts.py``). Probes of ``livez`` and ``readyz``, by a name of this server's, need no token and are not
counted: whoever floods this address shall not get the process restarted.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
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
"""What ``Sec-Fetch-Site`` may say of a change; another port of the same host is ``same-site``, and foreign."""

_logger = logging.getLogger("asyncpipe.service.http")


class AccessControl:
    """Lets requests through, or refuses them with a ``Problem`` and, where that matters, a line in the audit."""

    def __init__(self, hosts: Collection[str], token: SecretStr | None, buckets: TokenBuckets, audit: Audit) -> None:
        """``hosts`` are further names of this server; without a ``token`` everybody may do everything."""
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)
        # Digests are as long as one another, so a comparison does not tell how long the token is.
        self._token = None if token is None else _digest(token.get_secret_value().encode())
        self._buckets = buckets
        self._audit = audit
        self._probes: set[web.AbstractResource | None] = set()

    def free(self, *routes: web.AbstractRoute) -> None:
        """These need no token and are not counted."""
        self._probes |= {route.resource for route in routes}

    @property
    def middleware(self) -> Middleware:
        """To be the first of an application, behind what turns a ``Problem`` into an answer."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.check(request)
            return await handler(request)

        return guard

    def check(self, request: web.Request) -> None:
        """Raise a ``Problem`` unless ``request`` may be answered."""
        is_own = own_host(request, self._hosts)
        resource = request.match_info.route.resource
        if is_own and resource is not None and resource in self._probes:
            return
        wait = self._buckets.take(client_of(request.remote))
        if wait:
            headers = [("Retry-After", retry_after(wait))]
            raise Problem(429, "too-many-requests", "this client asks too often", headers=headers)
        if not is_own:
            detail = "this server is not known under that name; ask for it by its address"
            raise self._refused(request, Problem(421, "foreign-host", detail))
        if self._token is not None and not self._is_right(request):
            detail = "show the token: 'Authorization: Bearer TOKEN', or as the password of any user"
            raise self._refused(request, Problem(401, "unauthorized", detail, headers=CHALLENGES))
        self._check_page(request)

    def _check_page(self, request: web.Request) -> None:
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "").lower()
        foreign = origin is not None and not is_own_page(origin, request.headers.get("Host", ""), self._hosts)
        if foreign or (request.method not in READING and site not in OWN):
            raise self._refused(request, Problem(403, "foreign-page", "pages of other servers may not ask this one"))

    def _is_right(self, request: web.Request) -> bool:
        shown = request.headers.getall("Authorization", [])
        token = _shown_token(shown[0]) if len(shown) == 1 else None
        return token is not None and hmac.compare_digest(_digest(token), self._token or b"")

    def _refused(self, request: web.Request, problem: Problem) -> Problem:
        self._audit.line(
            request, f"{request.method} {request.path}", "refused", status=problem.status, reason=problem.kind
        )
        return problem


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _shown_token(header: str) -> bytes | None:
    """The token in an ``Authorization`` header: of ``Bearer`` itself, of ``Basic`` the password."""
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
