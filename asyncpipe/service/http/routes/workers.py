"""Workers: which there are, and hosts that jobs are to leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, TypeAlias

from fastapi import Path

from asyncpipe.service.http import models
from asyncpipe.service.http.routes.common import Seen, Service, api_router
from asyncpipe.service.job_states import JobState
from asyncpipe.service.store.job_store import JobFilter

__all__ = ["router"]

router = api_router("/v1/workers")

Host: TypeAlias = Annotated[str, Path(max_length=200, description="the host, as /v1/workers names it")]


@router.get("", name="workers")
async def list_workers(service: Service, seen: Seen) -> models.WorkersAnswer:
    """Worker processes and their hosts."""
    workers = await service.workers()
    if seen is not None:
        running = JobFilter(frozenset({JobState.RUNNING}), whose=seen)
        known = {job.id for job in await service.list(running, models.MOST_LISTED)}
        workers = [replace(each, jobs=tuple(job for job in each.jobs if job in known)) for each in workers]
    return models.WorkersAnswer.model_validate({"workers": workers})


@router.post("/{host}/drain")
async def drain(service: Service, host: Host) -> models.WorkersAnswer:
    """Have jobs leave a host after their steps."""
    return models.WorkersAnswer.model_validate({"workers": await service.drain_host(host)})


@router.post("/{host}/undrain")
async def undrain(service: Service, host: Host) -> models.WorkersAnswer:
    """Have jobs use a host again."""
    return models.WorkersAnswer.model_validate({"workers": await service.undrain_host(host)})
