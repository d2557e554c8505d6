"""Access control: the checks that every request passes first, in this order.

::

    421  a host that is not this server        against DNS rebinding
    403  a user's name that no trusted proxy has sent, or that is none (``proxied_users.py``)
    401  the token is missing or wrong, and no proxy names the user
    403  a change sent by a foreign page       a browser may add a stored password to it

and before a route's handler (``routes/common.py``): 403, the role does not allow it; 404, the job is not to be seen by
who asks; 403, it belongs to somebody else. Before an event stream: 429, the user has too many of them. Browsers do not
let foreign pages *read* the answers (``observe/http_hosts.py``). Probes of ``livez`` and ``readyz`` under this server's
names need no token. Each change and each refusal leaves a line in the audit.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncpipe.observe.http_hosts import is_own_page, own_host
from asyncpipe.service.http.audit import audit
from asyncpipe.service.http.problems import Problem, answer
from asyncpipe.service.http.proxied_users import ProxiedUsers
from asyncpipe.service.known_tokens import KnownTokens, TokenHolder
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.token_roles import TokenFileError

__all__ = ["READING", "AccessControl", "StreamPlaces", "holder_of", "still_known"]

READING = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods that change nothing."""
REFUSED = frozenset({401, 403, 421, 429})
REALM = "asyncpipe"
CHALLENGES = (
    ("WWW-Authenticate", f'Bearer realm="{REALM}"'),
    ("WWW-Authenticate", f'Basic realm="{REALM}", charset="UTF-8"'),
)
"""Headers of a 401: how a token may be sent. Browsers ask for a password, which is the token."""
OWN = frozenset({"", "same-origin", "none"})
"""Values of ``Sec-Fetch-Site`` that a change may have; ``same-site`` may be another port of the host, so foreign."""


class AccessControl:
    """Middleware that checks requests, answers errors that nothing else has answered, and writes the audit."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings, tokens: KnownTokens, probes: Collection[str]) -> None:
        """Where ``tokens`` ask for none, and no proxy names users, every client may do everything.

        Requests of the paths ``probes`` need no token.
        """
        self._app = app
        self._settings = settings
        self._proxied = ProxiedUsers(settings)
        self._tokens = tokens
        self._probes = frozenset(probes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun: Message = {}

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = begun or message
            await send(message)

        request = Request(scope)
        try:
            self._check(request)
            await self._app(scope, receive, sent)
        except Exception as error:
            if begun:
                raise
            await (await answer(request, error))(scope, receive, sent)
        finally:
            if begun and (scope["method"] not in READING or begun["status"] in REFUSED):
                audit(request, holder_of(request), begun)

    def _check(self, request: Request) -> None:
        """Note who sends ``request``. Raises a ``Problem`` unless it may be answered."""
        hosts = frozenset(host.lower().strip("[]") for host in self._settings.hosts)
        if not own_host(request, hosts):
            raise Problem(421, "foreign-host", "this server does not have that name; use its address")
        if request.scope["path"].removeprefix(request.scope.get("root_path", "")) in self._probes:
            return
        named = self._proxied.holder(request)
        if self._proxied.are_known or self._tokens.is_required:
            token = sent_token(request.headers.getlist("Authorization"))
            holder = None if token is None else self._tokens.holder(token)
            if token is not None and holder is not None:
                request.state.still_known = lambda: self._tokens.holder(token) is not None
            if holder is not None and named is not None:
                detail = f"the proxy names {named.user}, and the token is one of {holder.user}: send one of them"
                raise Problem(403, "two-users", detail)
            request.state.holder = holder = holder or named
            if holder is None:
                detail = "send a token: 'Authorization: Bearer TOKEN', or as the password of any user"
                raise Problem(401, "unauthorized", detail, headers=CHALLENGES)
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "").lower()
        foreign = origin is not None and not is_own_page(origin, request.headers.get("Host", ""), hosts)
        if foreign or (request.method not in READING and site not in OWN):
            raise Problem(403, "foreign-page", "pages of other servers are refused")


class StreamPlaces:
    """The places of event streams: one user has at most a quarter of the server's connections."""

    def __init__(self, connections: int) -> None:
        self._most = max(1, connections // 4)
        self._taken: Counter[str] = Counter()

    @contextmanager
    def place(self, request: Request) -> Iterator[None]:
        """Hold a place for the stream that answers ``request``. Raises a ``Problem`` if its user has no more."""
        if (holder := holder_of(request)) is None:
            yield
            return
        if self._taken[holder.user] >= self._most:
            detail = f"{holder.user} has {self._most} event streams, the most for one user; close some"
            raise Problem(429, "too-many-streams", detail)
        self._taken[holder.user] += 1
        try:
            yield
        finally:
            self._taken[holder.user] -= 1


def sent_token(headers: Sequence[str]) -> bytes | None:
    """The token that the values of ``Authorization`` carry: that of ``Bearer``, or the password of ``Basic``.

    ``None`` unless the header was sent once, in one of these forms.
    """
    if len(headers) != 1:
        return None
    scheme, _, rest = headers[0].partition(" ")
    shown = rest.strip().encode("latin-1", "replace")  # As headers are decoded.
    if scheme.lower() == "bearer":
        return shown
    if scheme.lower() == "basic":
        with suppress(ValueError):
            return base64.b64decode(shown, validate=True).partition(b":")[2]
    return None


def holder_of(request: Request) -> TokenHolder | None:
    """Who sends ``request``; ``None`` where no token is needed, and before the token was looked at."""
    return getattr(request.state, "holder", None)


def still_known(request: Request) -> bool:
    """Whether the token of ``request`` is in use still; true where none is needed."""
    known: Callable[[], bool] = getattr(request.state, "still_known", lambda: True)
    try:
        return known()
    except TokenFileError:
        return False
