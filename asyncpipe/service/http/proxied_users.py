"""Single sign-on: the user whom a trusted proxy names in a header, as oauth2-proxy does.

::

    browser ── cookie ──▶ oauth2-proxy ── X-Forwarded-User: alice ──▶ the service
    anybody else ─────────────────────── X-Forwarded-User: alice ──▶ 403

What counts is who is connected to the service, not whom ``X-Forwarded-For`` names: anybody can write that. A request
that has the header and comes from elsewhere is refused rather than read without it: who sends it claims to be somebody,
or comes by a proxy that should be listed, and either is to be noticed.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from asyncpipe.service.http.problems import Problem
from asyncpipe.service.known_tokens import TokenHolder
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.token_roles import NAME_RULE, SETTINGS_HOLDER, TokenRole, is_name

__all__ = ["NotesPeer", "ProxiedUsers"]

PEER = "asyncpipe.peer"
"""The key of a request's scope that has the address of who is connected."""
MOST_TEAMS = 100


class NotesPeer:
    """Middleware that notes who is connected, before ``X-Forwarded-For`` of a trusted proxy replaces the client."""

    def __init__(self, app: ASGIApp, proxies: tuple[str, ...]) -> None:
        self._app = ProxyHeadersMiddleware(app, list(proxies)) if proxies else app  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with the note."""
        scope[PEER] = (scope.get("client") or ("",))[0]
        await self._app(scope, receive, send)  # type: ignore[arg-type]


class ProxiedUsers:
    """Who the proxies of ``settings`` say that somebody is; where ``NotesPeer`` is not, nobody is believed."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings

    @property
    def are_known(self) -> bool:
        """Whether a proxy may name users, so that every request needs one, or a token."""
        return self._settings.user_header is not None

    def holder(self, request: Request) -> TokenHolder | None:
        """Whom the proxy names that sends ``request``; ``None`` if nobody does. Raises a ``Problem``."""
        settings = self._settings
        user = self._value(request, settings.user_header)
        groups = self._value(request, settings.groups_header)
        if user is None:
            return None
        if not is_name(user) or user == SETTINGS_HOLDER:
            raise Problem(403, "user-header", f"{settings.user_header} names no user; a name {NAME_RULE}")
        role = TokenRole.OPERATE if user in settings.operators else TokenRole(settings.proxy_role)
        teams = [team for each in (groups or "").split(",") if is_name(team := each.strip().removeprefix("/"))]
        return TokenHolder(user, role, tuple(dict.fromkeys(teams))[:MOST_TEAMS])

    def _value(self, request: Request, header: str | None) -> str | None:
        """The value of ``header``; ``None`` without one. Raises a ``Problem`` unless a proxy has sent it, once."""
        if header is None:
            return None
        # Some proxies and servers take one for the other, so a client could add a second one.
        same = [(name, value) for name, value in request.headers.items() if name.replace("_", "-") == header.lower()]
        if not same:
            return None
        if not self._is_proxy(request.scope.get(PEER, "")):
            raise Problem(403, "user-header", f"{header} is believed from the addresses in user_proxies alone")
        if len(same) > 1 or same[0][0] != header.lower():
            raise Problem(403, "user-header", f"{header} must be there once: have the proxy drop what clients send")
        return same[0][1]

    def _is_proxy(self, address: str) -> bool:
        try:
            return any(ip_address(address) in ip_network(each) for each in self._settings.user_proxies)
        except ValueError:  # A socket of another kind has no address.
            return False
