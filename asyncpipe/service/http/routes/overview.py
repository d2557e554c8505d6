"""What is asked again and again while somebody looks: whether anything has changed."""

from __future__ import annotations

from asyncpipe.service.http import models
from asyncpipe.service.http.routes.common import Api, api_router

__all__ = ["router"]

router = api_router("/v1")


@router.get("/counts")
async def counts(api: Api) -> models.CountsAnswer:
    """How many jobs are in each state, and whether any has changed."""
    states, sequence = await api.service.changes()
    return models.CountsAnswer(states=dict(states), sequence=sequence)
