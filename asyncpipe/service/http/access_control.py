"""Access control: the checks that every request passes first, in this order.

::

    417  an expectation that no server has
    429  too many requests of an address       before the token, since guessing tokens takes requests, too
    421  a host that is not this server        against DNS rebinding
    401  the token is missing or wrong
    429  too many requests with a token        whose requests do not count for the address that they come from
    403  a change sent by a foreign page       a browser may add a stored password to it

and before a route's handler (``routes/common.py``): 403, the token's role does not allow it. A 429 leaves no line in
the audit, so a client cannot cause more lines than its rate allows. Browsers do not let foreign pages *read* the
answers (``observe/http_hosts.py``). Probes of ``livez`` and ``readyz`` under this server's names need no token and are
not counted: many requests from one address must not get the process restarted.

A token that is revoked ends what was begun with it: an event stream or a download stops where it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncpipe.observe.http_hosts import is_own_page, own_host
from asyncpipe.observe.http_tokens import CHALLENGES, sent_token
from asyncpipe.service.http.audit import Audit
from asyncpipe.service.http.client_address import TrustedProxies
from asyncpipe.service.http.problems import Problem
from asyncpipe.service.http.rate_limits import RateLimits, retry_after
from asyncpipe.service.http.who import admit, with_holder
from asyncpipe.service.known_tokens import KnownTokens, TokenHolder

__all__ = ["READING", "AccessControl"]

READING = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods that change nothing."""
OWN = frozenset({"", "same-origin", "none"})
"""Values of ``Sec-Fetch-Site`` that a change may have; ``same-site`` may be another port of the host, so foreign."""


class AccessControl:
    """Middleware that checks requests; it refuses with a ``Problem`` and, except for the rate, a line in the audit."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str],
        tokens: KnownTokens,
        limits: RateLimits,
        proxies: TrustedProxies,
        audit: Audit,
        probes: Collection[str],
    ) -> None:
        """``hosts`` are further names of this server; where ``tokens`` ask for none, every client may do everything.

        Requests of the paths ``probes`` need no token, and are not counted.
        """
        self._app = app
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)
        self._tokens = tokens
        self._limits = limits
        self._proxies = proxies
        self._audit = audit
        self._probes = frozenset(probes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or raise a ``Problem``."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = self._from_client(scope)
        holder = self._check(HTTPConnection(scope), scope["path"].removeprefix(scope.get("root_path", "")))
        if holder is None:
            await self._app(scope, receive, send)
        else:
            await self._until_revoked(holder, with_holder(scope, holder), receive, send)

    def _from_client(self, scope: Scope) -> Scope:
        """``scope`` with the address of the client in place of that of a proxy."""
        peer, port = scope["client"] or (None, 0)
        client = self._proxies.client(peer, HTTPConnection(scope).headers.getlist(self._proxies.header))
        return scope if client == peer else {**scope, "client": (client, port)}

    async def _until_revoked(self, holder: TokenHolder, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        has_begun = False

        async def sent(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        def end() -> None:
            with suppress(RuntimeError):  # The request has ended meanwhile.
                limit.reschedule(loop.time())

        limit = asyncio.timeout(None)
        try:
            async with limit:
                with holder.told(lambda: loop.call_soon_threadsafe(end)):
                    await self._app(scope, receive, sent)
        except TimeoutError:
            if not limit.expired():
                raise
            if not has_begun:
                raise _unauthorized() from None
            with suppress(RuntimeError):  # The answer is shorter than it had said.
                await send({"type": "http.response.body", "body": b""})

    def _check(self, request: HTTPConnection, path: str) -> TokenHolder | None:
        """Who sends ``request``. Raises a ``Problem`` unless it may be answered."""
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            raise Problem(417, "expectation", "the only expectation that is met is 100-continue", close=True)
        is_own = own_host(request, self._hosts)
        if is_own and path in self._probes:
            return None
        address = None if request.client is None else request.client.host
        _refuse_for(self._limits.of_address(address), "this client")
        if not is_own:
            detail = "this server does not have that name; use its address"
            raise self._refused(request, Problem(421, "foreign-host", detail))
        holder = self._holder(request, address) if self._tokens.is_required else None
        self._check_page(request)
        admit(request.scope)
        return holder

    def _holder(self, request: HTTPConnection, address: str | None) -> TokenHolder:
        token = sent_token(request.headers.getlist("Authorization"))
        holder = None if token is None else self._tokens.holder(token)
        if holder is None:
            raise self._refused(request, _unauthorized())
        self._limits.give_back(address)
        _refuse_for(self._limits.of_token(holder.name), f"the token {holder.name!r}")
        return holder

    def _check_page(self, request: HTTPConnection) -> None:
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "").lower()
        foreign = origin is not None and not is_own_page(origin, request.headers.get("Host", ""), self._hosts)
        if foreign or (request.scope["method"] not in READING and site not in OWN):
            raise self._refused(request, Problem(403, "foreign-page", "pages of other servers are refused"))

    def _refused(self, request: HTTPConnection, problem: Problem) -> Problem:
        what = f"{request.scope['method']} {request.scope['path']}"
        self._audit.line(request, what, "refused", status=problem.status, reason=problem.kind)
        return problem


def _refuse_for(wait: float, who: str) -> None:
    if wait:
        headers = [("Retry-After", retry_after(wait))]
        raise Problem(429, "too-many-requests", f"{who} sends too many requests", headers=headers)


def _unauthorized() -> Problem:
    detail = "send a token: 'Authorization: Bearer TOKEN', or as the password of any user"
    return Problem(401, "unauthorized", detail, headers=CHALLENGES)
