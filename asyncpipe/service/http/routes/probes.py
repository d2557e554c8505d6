"""What supervisors ask: whether the service lives, and whether it takes jobs."""

from __future__ import annotations

from asyncpipe.service.http import models
from asyncpipe.service.http.problems import Problem, draining
from asyncpipe.service.http.routes.common import Api, ProbeRoute, api_router

__all__ = ["router"]

router = api_router("", ProbeRoute)


@router.get("/livez", name="alive")
async def alive(api: Api) -> models.ReadyAnswer:
    """Fails if a restart would help."""
    status = api.service.status()
    reason = api.redact(status.reason, 300)
    if not status.live:
        raise Problem(503, "not-alive", reason)
    return models.ReadyAnswer(ready=status.ready, reason=reason)


@router.get("/readyz", name="ready")
async def ready(api: Api) -> models.ReadyAnswer:
    """Fails while no jobs can be submitted."""
    status = api.service.status()
    reason = api.redact(status.reason, 300)
    if not status.ready:
        raise draining(reason)
    return models.ReadyAnswer(ready=True, reason=reason)
