"""The events of a job as they happen, as server-sent events.

::

    service.follow(job, after) ──▶ event ──▶ "id: 7", "event: state", "data: {…}" ──▶ the client reads it ──▶ the next

A client that reconnects sends the last id that it received and continues after it. The last event of a job that has
ended is ``end``; a stream without it was cut off, or the service shuts down.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from asyncpipe.service.http.models import EventAnswer, SaidAnswer
from asyncpipe.service.job_states import FINAL_STATES
from asyncpipe.service.jobs.run_log import SaidPage
from asyncpipe.service.service_loop import ServiceDrainingError
from asyncpipe.service.store.job_store import StoreError
from asyncpipe.service.training_service import TrainingService

__all__ = ["job_events", "job_said"]

END = b"event: end\ndata: {}\n\n"


async def job_said(
    service: TrainingService, job: str, pages: AsyncGenerator[SaidPage, None]
) -> AsyncGenerator[bytes, None]:
    """What ``job`` said, as an event for each of ``pages``, and the end."""
    async with aclosing(pages):
        async for page in pages:
            data = f'{{"id": {page.next}, "data": {SaidAnswer.of_page(page).model_dump_json()}}}'
            yield f"id: {page.next}\nevent: said\ndata: {data}\n\n".encode()
    async for end in _end_of(service, job):
        yield end


async def job_events(service: TrainingService, job: str, after: int) -> AsyncGenerator[bytes, None]:
    """The events of ``job`` after event ``after``, and the end."""
    async with aclosing(service.follow(job, after)) as events:
        async for event in events:
            data = EventAnswer.model_validate(event).model_dump_json()
            yield f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()
    async for end in _end_of(service, job):
        yield end


async def _end_of(service: TrainingService, job: str) -> AsyncGenerator[bytes, None]:
    try:
        has_ended = (await service.get(job)).state in FINAL_STATES
    except (ServiceDrainingError, StoreError):
        has_ended = False
    if has_ended:
        yield END
