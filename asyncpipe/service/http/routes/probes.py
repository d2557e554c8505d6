"""What supervisors ask: whether the service lives, and whether it takes jobs."""

from __future__ import annotations

from asyncpipe.service.http import models
from asyncpipe.service.http.problems import Problem
from asyncpipe.service.http.routes.common import Service, api_router

__all__ = ["router"]

router = api_router()


@router.get("/livez", name="alive")
async def alive(service: Service) -> models.ReadyAnswer:
    """Fails if a restart would help."""
    status = service.status()
    if not status.live:
        raise Problem(503, "not-alive", status.reason)
    return models.ReadyAnswer(ready=status.ready, reason=status.reason)


@router.get("/readyz", name="ready")
async def ready(service: Service) -> models.ReadyAnswer:
    """Fails while no jobs can be submitted."""
    status = service.status()
    if not status.ready:
        raise Problem(503, "not-ready", status.reason)
    return models.ReadyAnswer(ready=True, reason=status.reason)
