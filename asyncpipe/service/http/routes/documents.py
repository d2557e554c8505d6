"""What jobs may name, how many jobs there are, and how those have failed that have."""

from __future__ import annotations

import asyncio

from fastapi import Request

from asyncpipe.core.schedules.registry import known_schedules
from asyncpipe.service.http import models
from asyncpipe.service.http.access_control import holder_of
from asyncpipe.service.http.routes.common import Seen, Service, api_router
from asyncpipe.service.http.routes.jobs import Count, Since, Word
from asyncpipe.service.store.job_store import JobFilter
from asyncpipe.service.token_roles import TokenRole

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
    codes = await asyncio.to_thread(lambda: {name: known.code(name) for name in known.names})
    found = [
        models.EntryAnswer(name=name, code=code and code.partition("\n")[0], parameters=known.schema(name))
        for name, code in codes.items()
    ]
    return models.EntriesAnswer(entries=found)


@router.get("/counts")
async def counts(service: Service, seen: Seen) -> models.CountsAnswer:
    """How many jobs are in each state, and whether any has changed: asked again and again while somebody looks."""
    states, sequence = await service.changes(seen)
    return models.CountsAnswer(states=dict(states), sequence=sequence)


@router.get("/me")
async def me(service: Service, request: Request) -> models.MeAnswer:
    """Who asks, what the role is, and what quotas allow; without users, somebody who may do everything."""
    holder = holder_of(request)
    if holder is None:
        return models.MeAnswer(user=None, role=TokenRole.OPERATE, teams=[], limits=[])
    limits = await service.use(holder.user, holder.teams)
    return models.MeAnswer.model_validate({**holder._asdict(), "teams": list(holder.teams), "limits": limits})


@router.get("/failures")
async def failures(
    service: Service, seen: Seen, entry: Word = None, text: Word = None, since: Since = None, limit: Count = 100
) -> models.FailuresAnswer:
    """Jobs that have failed, grouped by the root line of their last failure, the newest first."""
    found = await service.failures(JobFilter(entry=entry, text=text, since=since, whose=seen), limit)
    return models.FailuresAnswer.model_validate({"failures": found})
