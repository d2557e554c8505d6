"""What jobs may name, and the description of the API."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import Request

from asyncpipe.core.schedules.registry import known_schedules
from asyncpipe.service.http import models
from asyncpipe.service.http.openapi import describe
from asyncpipe.service.http.routes.common import Api, api_router

__all__ = ["router"]

router = api_router("/v1")


@router.get("/schedules")
async def schedules(api: Api) -> models.SchedulesAnswer:
    """Schedules that jobs may name."""
    return models.SchedulesAnswer(schedules=await asyncio.to_thread(known_schedules))


@router.get("/entries")
async def entries(api: Api) -> models.EntriesAnswer:
    """Entries that jobs may name."""
    known = api.service.entries
    found = [models.EntryAnswer(name=name, parameters=known.schema(name)) for name in known.names]
    return models.EntriesAnswer(entries=found)


@router.get("/openapi.json", name="describe")
async def description(api: Api, request: Request) -> dict[str, Any]:
    """This document."""
    below = request.scope.get("root_path", "")
    entries, needs_token = api.service.entries, api.service.tokens.is_required
    make = partial(describe, request.app.routes, api.settings, entries, needs_token=needs_token, below=below)
    # In a thread: it looks for installed schedules, and makes a schema of every model.
    return await asyncio.to_thread(make)
