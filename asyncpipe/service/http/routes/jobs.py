"""Jobs: submitting, listing, watching, and what is done to them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Body, Header, Query, Request, Response
from pydantic import Field

from asyncpipe.observe.live.event_streams import EventStream
from asyncpipe.service.http import models
from asyncpipe.service.http.event_stream import EVENT
from asyncpipe.service.http.problems import invalid
from asyncpipe.service.http.routes.common import (
    CAUSE,
    LOCATION,
    MOST_STEP,
    WHOLE,
    Api,
    ApiParts,
    JobId,
    JobRoute,
    SchemaOf,
    Step,
    api_router,
    locate,
    wrong,
)
from asyncpipe.service.job_states import (
    FINAL_STATES,
    IDEMPOTENCY_KEY,
    MAX_KEY,
    MAX_NAME,
    MAX_TAGS,
    TAG,
    TAG_PATTERN,
    JobState,
)
from asyncpipe.service.service_loop import ServiceDrainingError
from asyncpipe.service.store.job_store import JobFilter, StoreError, UnknownJobError
from asyncpipe.service.submission.submission import Submission

__all__ = ["Key", "router"]

router = api_router("/v1/jobs", JobRoute)

Key: TypeAlias = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=MAX_KEY,
        pattern="^[!-~]([ -~]*[!-~])?$",
        description=f"must be {IDEMPOTENCY_KEY}: with the same key again there is no second job",
    ),
]
Nothing: TypeAlias = Annotated[models.NothingRequest, Body()]
Submitted: TypeAlias = Annotated[dict[str, Any], SchemaOf(Submission), Body()]
"""A submission, which the service checks."""
Limit: TypeAlias = Annotated[
    int,
    Field(ge=1, le=models.MOST_LISTED),
    WHOLE,
    Query(description=f"must be an integer from 1 to {models.MOST_LISTED}: the most rows"),
]
AfterStep: TypeAlias = Annotated[
    Step, Query(description=f"must be an integer from 0 to {MOST_STEP}: only what follows it")
]
Count: TypeAlias = Annotated[int, Field(ge=1, le=models.MOST_LISTED), WHOLE]
Points: TypeAlias = Annotated[
    Count | None,
    Query(description=f"must be an integer from 1 to {models.MOST_LISTED}: so many of all steps, evenly spread"),
]
_Word: TypeAlias = Annotated[
    str | None, Query(min_length=1, max_length=MAX_NAME, description=f"must be a text of 1 to {MAX_NAME} characters")
]


# Changing


@router.post("", name="submit", status_code=201, responses=wrong(409, 507) | {
    201: {"headers": LOCATION}, 200: {"model": models.JobDetails, "description": "Done before", "headers": LOCATION},
})  # fmt: skip
async def submit(api: Api, request: Request, response: Response, job: Submitted, key: Key = None) -> models.JobDetails:
    """Submit a job."""
    record, is_new = await api.audited(request, "submit", None, api.service.submit(job, key))
    response.status_code = 201 if is_new else 200
    locate(request, response, record)
    return await api.details(record)


@router.post("/{id}/pause", responses=wrong(404, 409, 507))
async def pause(api: Api, request: Request, job: JobId, _: Nothing) -> models.JobDetails:
    """Pause a job after its step."""
    return await api.details(await api.audited(request, "pause", job, api.service.pause(job, CAUSE)))


@router.post("/{id}/resume", responses=wrong(404, 409, 507))
async def resume(api: Api, request: Request, job: JobId, _: Nothing) -> models.JobDetails:
    """Resume a paused job."""
    return await api.details(await api.audited(request, "resume", job, api.service.resume(job, CAUSE)))


@router.post("/{id}/cancel", responses=wrong(404, 409, 507))
async def cancel(api: Api, request: Request, job: JobId, _: Nothing) -> models.JobDetails:
    """Cancel a job for good."""
    return await api.details(await api.audited(request, "cancel", job, api.service.cancel(job, CAUSE)))


@router.patch("/{id}", name="amend", responses=wrong(404, 409, 507))
async def amend(
    api: Api, request: Request, job: JobId, asked: Annotated[models.AmendRequest, Body()]
) -> models.JobDetails:
    """Change the priority class, weight or tags of a job."""
    tags = None if asked.tags is None else list(dict.fromkeys(asked.tags))
    change = api.service.amend(job, priority_class=asked.priority_class, weight=asked.weight, tags=tags)
    return await api.details(await api.audited(request, "amend", job, change))


@router.put("/{id}/schedule", responses=wrong(404, 409, 507))
async def change_schedule(
    api: Api, request: Request, job: JobId, asked: Annotated[models.ScheduleRequest, Body()]
) -> models.JobDetails:
    """Change the schedule after the current step."""
    change = api.service.change_schedule(job, asked.schedule)
    return await api.details(await api.audited(request, "schedule", job, change))


# Reading


@router.get("", name="list")
async def list_jobs(
    api: Api,
    state: Annotated[
        list[JobState] | None, Query(description=f"must be one of {', '.join(JobState)}: only jobs in these states")
    ] = None,
    entry: _Word = None,
    tag: Annotated[
        list[Annotated[str, Field(pattern=f"^{TAG_PATTERN}$")]] | None,
        Query(max_length=MAX_TAGS, description=f"must be {TAG}: only jobs with all of these tags"),
    ] = None,
    text: _Word = None,
    since: Annotated[
        float | None,
        Query(ge=0, lt=1e15, allow_inf_nan=False, description="must be a Unix time: only jobs that changed since"),
    ] = None,
    limit: Limit = 100,
    after: Annotated[
        str | None, Query(pattern=models.ID, description="must be the id of a job: only jobs that follow this one")
    ] = None,
    order: Annotated[
        Literal["newest", "oldest"], Query(description="must be newest or oldest: which is first")
    ] = "newest",
) -> models.JobsAnswer:
    """Jobs that meet all that is asked for, the newest first."""
    wanted = JobFilter(frozenset(state) if state else None, entry, tuple(tag or ()), text, since)
    try:
        records = await api.service.list(wanted, limit, after, newest_first=order == "newest")
    except UnknownJobError:
        raise invalid(("after", "must be the id of a job, and no job has this one")) from None
    outlooks = await api.service.outlooks([record.id for record in records])
    return models.JobsAnswer.of_records(records, outlooks, api.redact, limit)


@router.get("/{id}", responses=wrong(404))
async def show(api: Api, job: JobId) -> models.JobDetails:
    """A job, with what was submitted."""
    return await api.details(await api.service.get(job))


@router.get("/{id}/history", responses=wrong(404))
async def history(api: Api, job: JobId) -> models.HistoryAnswer:
    """Every transition of a job."""
    found = await api.service.history(job)
    return models.HistoryAnswer(transitions=[models.TransitionAnswer.of(each, api.redact) for each in found])


@router.get("/{id}/losses", responses=wrong(404))
async def losses(
    api: Api, job: JobId, after: AfterStep = 0, limit: Limit = models.MOST_LISTED, points: Points = None
) -> models.LossesAnswer:
    """Steps of a job."""
    if points is not None:
        spread = await api.service.spread_losses(job, points)
        return models.LossesAnswer(losses=[models.LossAnswer.of(row) for row in spread], next=None)
    rows = await api.service.losses(job, after, limit)
    following = rows[-1].step if len(rows) >= limit else None
    return models.LossesAnswer(losses=[models.LossAnswer.of(row) for row in rows], next=following)


@router.get(
    "/{id}/events",
    status_code=200,
    response_class=EventStream,
    responses=wrong(404) | {200: {"content": {EventStream.media_type: {"schema": EVENT}}}},
)
async def events(
    api: Api,
    job: JobId,
    after: AfterStep = 0,
    seen: Annotated[
        Step | None,
        Header(
            alias="Last-Event-ID",
            description=f"must be an integer from 0 to {MOST_STEP}: the last event that the client has",
        ),
    ] = None,
) -> EventStream:
    """Events of a job as they happen."""
    await api.service.get(job)
    following = api.service.follow(job, after if seen is None else seen)
    return api.streams.answer(following, partial(_is_over, api, job))


async def _is_over(api: ApiParts, job: str) -> bool:
    try:
        return (await api.service.get(job)).state in FINAL_STATES
    except (ServiceDrainingError, StoreError):
        return False
