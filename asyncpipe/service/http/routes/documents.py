"""What jobs may name, how many jobs there are, and how those have failed that have."""

from __future__ import annotations

import asyncio
from collections import Counter
from time import time

from fastapi import Request

from asyncpipe.core.schedules.registry import known_schedules
from asyncpipe.service.http import models
from asyncpipe.service.http.access_control import holder_of
from asyncpipe.service.http.routes.common import Seen, Service, api_router
from asyncpipe.service.http.routes.jobs import Count, Since, Word
from asyncpipe.service.store.job_store import JobFilter
from asyncpipe.service.submission.submission import Submission
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
    return models.EntriesAnswer(entries=found, submission=Submission.model_json_schema())


@router.get("/devices")
async def devices(service: Service, seen: Seen) -> models.DevicesAnswer:
    """Devices that jobs may name, and the runs of the last 24 hours there; of jobs that are not to be seen, when."""
    settings, now = service.settings, time()
    found = [
        models.DeviceAnswer(name=name, places=places, memory_limit=settings.memory_limit.get(name))
        for name, places in Counter(settings.devices).items()
    ]
    runs = [
        run if seen is None or run.owner == seen.user else run._replace(job="", owner=None)
        for run in (await service.runs(now - 86_400))[-models.MOST_RUNS :]
    ]
    return models.DevicesAnswer.model_validate({"now": now, "devices": found, "runs": runs})


@router.get("/counts")
async def counts(service: Service, seen: Seen) -> models.CountsAnswer:
    """How many jobs are in each state, and whether any has changed: asked again and again while somebody looks."""
    states, sequence = await service.changes(seen)
    return models.CountsAnswer(states=dict(states), sequence=sequence)


@router.get("/me")
async def me(service: Service, request: Request) -> models.MeAnswer:
    """Who asks, with which role and of which teams; without users, somebody who may do everything."""
    holder = holder_of(request)
    if holder is None:
        return models.MeAnswer(user=None, role=TokenRole.OPERATE, teams=[], team_access="change")
    access = service.settings.team_access
    return models.MeAnswer(user=holder.user, role=holder.role, teams=list(holder.teams), team_access=access)


@router.get("/failures")
async def failures(
    service: Service, seen: Seen, entry: Word = None, text: Word = None, since: Since = None, limit: Count = 100
) -> models.FailuresAnswer:
    """Jobs that have failed, grouped by the root line of their last failure, the newest first."""
    found = await service.failures(JobFilter(entry=entry, text=text, since=since, whose=seen), limit)
    return models.FailuresAnswer.model_validate({"failures": found})
