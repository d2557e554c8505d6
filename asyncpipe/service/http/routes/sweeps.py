"""Sweeps: one submission that becomes many jobs in a group."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from fastapi import Body, Request, Response

from asyncpipe.service.http import models
from asyncpipe.service.http.problems import invalid
from asyncpipe.service.http.routes.common import Api, JobRoute, SchemaOf, api_router, wrong
from asyncpipe.service.http.routes.jobs import Key
from asyncpipe.service.submission.sweep import SubmittedSweep

__all__ = ["router"]

router = api_router("/v1/sweeps", JobRoute)


Swept: TypeAlias = Annotated[dict[str, Any], SchemaOf(SubmittedSweep), Body()]
"""A submission with a sweep, which the service checks."""


@router.post("", name="submit_sweep", status_code=201, responses=wrong(409, 507) | {
    200: {"model": models.SweepAnswer, "description": "Done before"},
})  # fmt: skip
async def submit_sweep(
    api: Api, request: Request, response: Response, job: Swept, key: Key = None
) -> models.SweepAnswer:
    """Submit a job for each combination of values; all of them or none."""
    sweep = job.pop("sweep", None)
    if not isinstance(sweep, dict | list):
        raise invalid(("sweep", "must be a table with a list of values for each key, or a list of tables"))
    try:
        added = await api.service.submit_sweep(job, sweep, key)
    except Exception as error:
        api.refused(request, "submit", error, job=None)
        raise
    for record, is_new in added:
        api.audit.line(request, "submit", "ok", job=record.id, state=str(record.state), new=is_new)
    response.status_code = 201 if any(is_new for _, is_new in added) else 200
    return models.SweepAnswer.of_records([record for record, _ in added], api.redact)
