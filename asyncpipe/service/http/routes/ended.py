"""What is done to jobs that have ended: they are tried again, copied, and deleted."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, Query, Request, Response

from asyncpipe.service.http import models
from asyncpipe.service.http.routes.common import CAUSE, LOCATION, Api, JobId, JobRoute, api_router, locate, wrong

__all__ = ["router"]

router = api_router("/v1/jobs", JobRoute)


@router.post("/{id}/retry", responses=wrong(404, 409, 507))
async def retry(
    api: Api, request: Request, job: JobId, asked: Annotated[models.RetryRequest, Body()]
) -> models.JobDetails:
    """Try a job again that failed, was cancelled or quarantined."""
    again = api.service.retry(job, asked.from_step, asked.changes, CAUSE)
    return await api.details(await api.audited(request, "retry", job, again))


@router.post("/{id}/fork", status_code=201, responses=wrong(404, 507) | {201: {"headers": LOCATION}})
async def fork(
    api: Api, request: Request, response: Response, job: JobId, asked: Annotated[models.RetryRequest, Body()]
) -> models.JobDetails:
    """Submit a copy of a job that goes on from a snapshot of it."""
    copy = await api.audited(request, "fork", job, api.service.fork(job, asked.from_step, asked.changes))
    locate(request, response, copy)
    return await api.details(copy)


@router.delete("/{id}", responses=wrong(404, 409, 507))
async def delete(
    api: Api,
    request: Request,
    job: JobId,
    dry_run: Annotated[
        bool, Query(description="must be true or false: whether this only shows what it would do")
    ] = False,
) -> models.DeletedAnswer:
    """Delete a job that has ended, with all that it has."""
    if dry_run:
        record, files = await api.service.delete(job, dry_run=True)
    else:
        record, files = await api.audited(request, "delete", job, api.service.delete(job))
    return models.DeletedAnswer(
        id=record.id,
        name=record.spec.name,
        state=record.state,
        deleted=not dry_run,
        files=files.files,
        bytes=files.bytes,
        snapshots=list(files.snapshots),
    )
