"""Jobs: submitting, listing, watching, and what is done to them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Body, Header, Query, Request, Response
from pydantic import Field

from asyncpipe.observe.live.event_streams import EventStream
from asyncpipe.service.http import models
from asyncpipe.service.http.event_stream import event_stream
from asyncpipe.service.http.problems import invalid
from asyncpipe.service.http.routes.common import (
    Cause,
    JobId,
    Seen,
    Service,
    Step,
    api_router,
    details,
    locate,
    owner_of,
)
from asyncpipe.service.job_states import IDEMPOTENCY_KEY, MAX_NAME, MAX_TAGS, TAG_PATTERN, JobState
from asyncpipe.service.store.job_store import JobFilter, UnknownJobError
from asyncpipe.service.submission.submission import Amendment

__all__ = ["router"]

router = api_router("/v1/jobs")

Key: TypeAlias = Annotated[
    str | None,
    Header(alias="Idempotency-Key", description=f"{IDEMPOTENCY_KEY}: with the same key again there is no second job"),
]
Count: TypeAlias = Annotated[int, Field(ge=1, le=models.MOST_LISTED)]
EVENT = {"type": "object", "properties": {key: {"type": "string"} for key in ("id", "event", "data")}}
EVENTS: dict[int | str, Any] = {200: {"content": {EventStream.media_type: {"schema": EVENT}}}}
LastSeen: TypeAlias = Annotated[
    Step | None, Header(alias="Last-Event-ID", description="the last event that the client has")
]
Since: TypeAlias = Annotated[float | None, Query(ge=0, lt=1e15, description="Unix time: only jobs that changed since")]
Word: TypeAlias = Annotated[str | None, Query(min_length=1, max_length=MAX_NAME)]


# Changing


@router.post("", status_code=201, responses={200: {"model": models.JobDetails, "description": "Done before"}})
async def submit(
    service: Service,
    request: Request,
    response: Response,
    job: Annotated[dict[str, Any], Body(description="as docs/service.md describes it; each wrong key is named")],
    key: Key = None,
) -> models.JobDetails:
    """Submit a job."""
    record, is_new = await service.submit(job, key, **owner_of(request))
    response.status_code = 201 if is_new else 200
    locate(request, response, record)
    return await details(service, record)


@router.post("/{id}/pause")
async def pause(service: Service, job: JobId, cause: Cause) -> models.JobDetails:
    """Pause a job after its step."""
    return await details(service, await service.pause(job, cause))


@router.post("/{id}/resume")
async def resume(service: Service, job: JobId, cause: Cause) -> models.JobDetails:
    """Resume a paused job."""
    return await details(service, await service.resume(job, cause))


@router.post("/{id}/cancel")
async def cancel(service: Service, job: JobId, cause: Cause) -> models.JobDetails:
    """Cancel a job for good."""
    return await details(service, await service.cancel(job, cause))


@router.patch("/{id}")
async def amend(service: Service, job: JobId, asked: Amendment) -> models.JobDetails:
    """Change the priority class, weight, priority or tags of a job."""
    return await details(service, await service.amend(job, **dict(asked)))


@router.put("/{id}/schedule")
async def change_schedule(service: Service, job: JobId, asked: models.ScheduleRequest) -> models.JobDetails:
    """Change the schedule after the current step."""
    return await details(service, await service.change_schedule(job, asked.schedule))


# Reading


@router.get("", name="list")
async def list_jobs(
    service: Service,
    seen: Seen,
    state: Annotated[list[JobState] | None, Query()] = None,
    entry: Word = None,
    tag: Annotated[list[Annotated[str, Field(pattern=f"^{TAG_PATTERN}$")]] | None, Query(max_length=MAX_TAGS)] = None,
    text: Word = None,
    owner: Word = None,
    since: Since = None,
    root: Annotated[str | None, Query(min_length=1, max_length=300, description="as /v1/failures has it")] = None,
    limit: Count = 100,
    after: Annotated[
        str | None, Query(pattern=models.ID, description="only jobs that follow the one of this id")
    ] = None,
    order: Literal["newest", "oldest"] = "newest",
) -> models.JobsAnswer:
    """Jobs that meet all that is asked for, the newest first."""
    wanted = JobFilter(frozenset(state) if state else None, entry, tuple(tag or ()), text, since, owner, seen, root)
    try:
        if seen is not None and after is not None:
            last = await service.get(after)
            after = after if seen.has(last.owner, last.teams) else ""
        records = await service.list(wanted, limit, after, newest_first=order == "newest")
    except UnknownJobError:
        raise invalid(("after", "must be the id of a job, and no job has this one")) from None
    outlooks = await service.outlooks([record.id for record in records])
    return models.JobsAnswer.of_records(records, outlooks, limit)


@router.get("/{id}")
async def show(service: Service, job: JobId) -> models.JobDetails:
    """A job, with what was submitted."""
    return await details(service, await service.get(job))


@router.get("/{id}/history")
async def history(service: Service, job: JobId) -> models.HistoryAnswer:
    """Every transition of a job."""
    return models.HistoryAnswer.model_validate({"transitions": await service.history(job)})


@router.get("/{id}/losses")
async def losses(
    service: Service,
    job: JobId,
    after: Annotated[Step, Query(description="only steps that follow this one")] = 0,
    limit: Count = models.MOST_LISTED,
    points: Annotated[Count | None, Query(description="so many of all steps, evenly spread")] = None,
) -> models.LossesAnswer:
    """Steps of a job."""
    if points is not None:
        return models.LossesAnswer.model_validate({"losses": await service.spread_losses(job, points), "next": None})
    rows = await service.losses(job, after, limit)
    following = rows[-1].step if len(rows) >= limit else None
    return models.LossesAnswer.model_validate({"losses": rows, "next": following})


@router.get("/{id}/events", status_code=200, response_class=EventStream, responses=EVENTS)
async def events(
    service: Service,
    request: Request,
    job: JobId,
    after: Annotated[Step, Query(description="only events that follow this one")] = 0,
    seen: LastSeen = None,
) -> EventStream:
    """Events of a job as they happen."""
    await service.get(job)
    return event_stream(request, service, job, service.follow(job, after if seen is None else seen))
