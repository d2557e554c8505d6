"""Who sends a request: the holder of its token, which access control has noted in the request's scope."""

from __future__ import annotations

from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Scope

from asyncpipe.service.known_tokens import TokenHolder

__all__ = ["holder_of", "with_holder"]

_KEY = "asyncpipe.holder"


def with_holder(scope: Scope, holder: TokenHolder) -> Scope:
    """``scope`` of a request that ``holder`` sends."""
    return {**scope, _KEY: holder}


def holder_of(request: HTTPConnection) -> TokenHolder | None:
    """Who sends ``request``; ``None`` where no token is needed, and before the token was looked at."""
    holder: Any = request.scope.get(_KEY)
    return holder if isinstance(holder, TokenHolder) else None
