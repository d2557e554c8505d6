"""What the runs of a job said: prints, log records and tracebacks of its code."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Depends, Query, Request

from asyncpipe.observe.live.event_streams import EventStream
from asyncpipe.service.http import models
from asyncpipe.service.http.event_stream import event_stream
from asyncpipe.service.http.routes.common import JobId, Service, Step, api_router
from asyncpipe.service.http.routes.jobs import EVENTS, LastSeen
from asyncpipe.service.jobs.run_log import STREAMS, SaidPage, place_of

__all__ = ["router"]

router = api_router("/v1/jobs/{id}")

MOST_LINES = 10_000


async def _asked(
    service: Service,
    job: JobId,
    run: Annotated[int | None, Query(ge=1, lt=2**20, description="by default the last one")] = None,
    stream: Annotated[Literal[STREAMS] | None, Query(description="only its lines")] = None,  # type: ignore[valid-type]
    tail: Annotated[int | None, Query(ge=1, le=MOST_LINES, description="only so many lines at the end")] = None,
    after: Annotated[Step | None, Query(description="only what follows this place, as `next` names it")] = None,
) -> Any:
    runs = await service.runs_said(job)
    begin = place_of(run or max(runs, default=0)) if after is None else after
    return runs, begin, tail, partial(service.said, job, run=run, stream=stream)


AskedLogs: TypeAlias = Annotated[
    tuple[Sequence[int], int, int | None, Callable[..., AsyncGenerator[SaidPage, None]]], Depends(_asked)
]
"""The runs that have said something, the place to begin at, how many lines, and what gives the pages."""


@router.get("/logs")
async def logs(asked: AskedLogs) -> models.LogsAnswer:
    """What a run of a job said, 256 KiB at once."""
    runs, begin, tail, said = asked
    page = await anext(said(begin, tail=tail), None) or SaidPage(begin >> 40, begin, [])
    more = tail is None and bool(page.lines)
    return models.LogsAnswer.model_validate({**page._asdict(), "runs": runs, "more": more})


@router.get("/logs/events", status_code=200, response_class=EventStream, responses=EVENTS)
async def log_events(
    service: Service,
    request: Request,
    job: JobId,
    asked: AskedLogs,
    seen: LastSeen = None,
) -> EventStream:
    """What a job says, as it says it."""
    _, begin, tail, said = asked
    pages = said(begin, tail=tail, follow=True) if seen is None else said(seen, follow=True)
    return event_stream(request, service, job, pages)
