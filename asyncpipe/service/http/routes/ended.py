"""What is done to jobs that have ended: they are tried again, copied, and deleted."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from asyncpipe.service.http import models
from asyncpipe.service.http.routes.common import Cause, JobId, Service, api_router, details, locate, owner_of

__all__ = ["router"]

router = api_router("/v1/jobs")


@router.post("/{id}/retry")
async def retry(service: Service, job: JobId, asked: models.RetryRequest, cause: Cause) -> models.JobDetails:
    """Try a job again that failed, was cancelled or quarantined."""
    return await details(service, await service.retry(job, asked.from_step, asked.changes, cause))


@router.post("/{id}/fork", status_code=201)
async def fork(
    service: Service, request: Request, response: Response, job: JobId, asked: models.RetryRequest
) -> models.JobDetails:
    """Submit a copy of a job that goes on from a snapshot of it."""
    copy = await service.fork(job, asked.from_step, asked.changes, **owner_of(request))
    locate(request, response, copy)
    return await details(service, copy)


@router.delete("/{id}")
async def delete(
    service: Service, job: JobId, dry_run: Annotated[bool, Query(description="only show what it would do")] = False
) -> models.DeletedAnswer:
    """Delete a job that has ended, with all that it has."""
    record, files = await service.delete(job, dry_run=dry_run)
    return models.DeletedAnswer(
        id=record.id,
        name=record.name,
        state=record.state,
        deleted=not dry_run,
        files=files.files,
        bytes=files.bytes,
        snapshots=list(files.snapshots),
    )
