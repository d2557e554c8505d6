"""Who sends a request, as access control has found out: noted in the request's scope, and told to its connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Scope

from asyncpipe.service.known_tokens import TokenHolder

__all__ = ["ADMITTED", "admit", "holder_of", "with_holder"]

ADMITTED = "asyncpipe.admitted"
"""Where the scope has what the request's connection wants to be called when the request may be answered."""
_KEY = "asyncpipe.holder"


def admit(scope: Scope) -> None:
    """Tell the connection of a request, if it is ours, that the request may be answered."""
    told: Callable[[], object] | None = scope.get(ADMITTED)
    if told is not None:
        told()


def with_holder(scope: Scope, holder: TokenHolder) -> Scope:
    """``scope`` of a request that ``holder`` sends."""
    return {**scope, _KEY: holder}


def holder_of(request: HTTPConnection) -> TokenHolder | None:
    """Who sends ``request``; ``None`` where no token is needed, and before the token was looked at."""
    holder: Any = request.scope.get(_KEY)
    return holder if isinstance(holder, TokenHolder) else None
