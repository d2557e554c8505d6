"""Access control: the checks that every request passes first, in this order.

::

    417  an expectation that no server has
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

from pydantic import SecretStr
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

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
    """Middleware that checks requests; it refuses with a ``Problem`` and, except for the rate, a line in the audit."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str],
        token: SecretStr | None,
        buckets: TokenBuckets,
        audit: Audit,
        probes: Collection[str],
    ) -> None:
        """``hosts`` are further names of this server; without a ``token`` every client may do everything.

        Requests of the paths ``probes`` need no token, and are not counted.
        """
        self._app = app
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)
        # Digests have equal lengths, so the time of a comparison does not reveal the token's length.
        self._token = None if token is None else _digest(token.get_secret_value().encode())
        self._buckets = buckets
        self._audit = audit
        self._probes = frozenset(probes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or raise a ``Problem``."""
        if scope["type"] == "http":
            self._check(HTTPConnection(scope), scope["path"].removeprefix(scope.get("root_path", "")))
        await self._app(scope, receive, send)

    def _check(self, request: HTTPConnection, path: str) -> None:
        """Raise a ``Problem`` unless ``request`` may be answered."""
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            raise Problem(417, "expectation", "the only expectation that is met is 100-continue", close=True)
        is_own = own_host(request, self._hosts)
        if is_own and path in self._probes:
            return
        wait = self._buckets.take(client_of(None if request.client is None else request.client.host))
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

    def _check_page(self, request: HTTPConnection) -> None:
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "").lower()
        foreign = origin is not None and not is_own_page(origin, request.headers.get("Host", ""), self._hosts)
        if foreign or (request.scope["method"] not in READING and site not in OWN):
            raise self._refused(request, Problem(403, "foreign-page", "pages of other servers are refused"))

    def _is_right(self, request: HTTPConnection) -> bool:
        sent = request.headers.getlist("Authorization")
        token = _sent_token(sent[0]) if len(sent) == 1 else None
        return token is not None and hmac.compare_digest(_digest(token), self._token or b"")

    def _refused(self, request: HTTPConnection, problem: Problem) -> Problem:
        what = f"{request.scope['method']} {request.scope['path']}"
        self._audit.line(request, what, "refused", status=problem.status, reason=problem.kind)
        return problem


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _sent_token(header: str) -> bytes | None:
    """The token in an ``Authorization`` header: the value of ``Bearer``, or the password of ``Basic``."""
    scheme, _, rest = header.partition(" ")
    shown = rest.strip().encode("latin-1")  # As starlette decodes it.
    match scheme.lower():
        case "bearer":
            return shown
        case "basic":
            try:
                return base64.b64decode(shown, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return None
    return None
