"""Workers: which there are, and hosts that jobs are to leave."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Annotated, TypeAlias

from fastapi import Body, Path, Request

from asyncpipe.service.http import models
from asyncpipe.service.http.routes.common import Api, ApiParts, api_router, wrong
from asyncpipe.service.jobs.hosts import WorkerStatus

__all__ = ["router"]

router = api_router("/v1/workers")

Host: TypeAlias = Annotated[str, Path(min_length=1, max_length=200, description="the host, as /v1/workers names it")]
Nothing: TypeAlias = Annotated[models.NothingRequest, Body()]


@router.get("", name="workers")
async def list_workers(api: Api) -> models.WorkersAnswer:
    """Worker processes and their hosts."""
    return _answer(api, await api.service.workers())


@router.post("/{host}/drain", responses=wrong(404))
async def drain(api: Api, request: Request, host: Host, _: Nothing) -> models.WorkersAnswer:
    """Have jobs leave a host after their steps."""
    return await _act(api, request, "drain", host, api.service.drain_host(host))


@router.post("/{host}/undrain", responses=wrong(404))
async def undrain(api: Api, request: Request, host: Host, _: Nothing) -> models.WorkersAnswer:
    """Have jobs use a host again."""
    return await _act(api, request, "undrain", host, api.service.undrain_host(host))


async def _act(
    api: ApiParts, request: Request, what: str, host: str, act: Awaitable[Sequence[WorkerStatus]]
) -> models.WorkersAnswer:
    try:
        found = await act
    except Exception as error:
        api.refused(request, what, error, host=host)
        raise
    api.audit.line(request, what, "ok", host=host)
    return _answer(api, found)


def _answer(api: ApiParts, found: Sequence[WorkerStatus]) -> models.WorkersAnswer:
    return models.WorkersAnswer(workers=[models.WorkerAnswer.of(each, api.redact) for each in found])
