"""What jobs may name, and how many jobs there are."""

from __future__ import annotations

import asyncio

from asyncpipe.core.schedules.registry import known_schedules
from asyncpipe.service.http import models
from asyncpipe.service.http.routes.common import Service, api_router

__all__ = ["router"]

router = api_router("/v1")


@router.get("/schedules")
async def schedules(service: Service) -> models.SchedulesAnswer:
    """Schedules that jobs may name."""
    return models.SchedulesAnswer(schedules=await asyncio.to_thread(known_schedules))


@router.get("/entries")
async def entries(service: Service) -> models.EntriesAnswer:
    """Entries that jobs may name."""
    known = service.entries
    found = [models.EntryAnswer(name=name, parameters=known.schema(name)) for name in known.names]
    return models.EntriesAnswer(entries=found)


@router.get("/counts")
async def counts(service: Service) -> models.CountsAnswer:
    """How many jobs are in each state, and whether any has changed: asked again and again while somebody looks."""
    states, sequence = await service.changes()
    return models.CountsAnswer(states=dict(states), sequence=sequence)
