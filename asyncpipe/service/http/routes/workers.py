"""Workers: which there are, and hosts that jobs are to leave."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from fastapi import Path

from asyncpipe.service.http import models
from asyncpipe.service.http.routes.common import Service, api_router

__all__ = ["router"]

router = api_router("/v1/workers")

Host: TypeAlias = Annotated[str, Path(max_length=200, description="the host, as /v1/workers names it")]


@router.get("", name="workers")
async def list_workers(service: Service) -> models.WorkersAnswer:
    """Worker processes and their hosts."""
    return models.WorkersAnswer.model_validate({"workers": await service.workers()})


@router.post("/{host}/drain")
async def drain(service: Service, host: Host) -> models.WorkersAnswer:
    """Have jobs leave a host after their steps."""
    return models.WorkersAnswer.model_validate({"workers": await service.drain_host(host)})


@router.post("/{host}/undrain")
async def undrain(service: Service, host: Host) -> models.WorkersAnswer:
    """Have jobs use a host again."""
    return models.WorkersAnswer.model_validate({"workers": await service.undrain_host(host)})
