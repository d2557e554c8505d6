"""The events of a job as they happen, and what it says, as server-sent events.

::

    service.follow(job, after) ──▶ event ──▶ "id: 7", "event: state", "data: {…}" ──▶ the client reads it ──▶ the next

A client that reconnects sends the last id that it received and continues after it. The last event of a job that has
ended is ``end``; a stream without it was cut off, or the service shuts down.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import Request

from asyncpipe.observe.live.event_streams import EventStream, until
from asyncpipe.service.http.access_control import still_known
from asyncpipe.service.http.models import EventAnswer, SaidAnswer
from asyncpipe.service.job_states import FINAL_STATES
from asyncpipe.service.jobs.run_log import SaidPage
from asyncpipe.service.service_loop import ServiceDrainingError
from asyncpipe.service.store.job_records import JobEvent
from asyncpipe.service.store.job_store import StoreError
from asyncpipe.service.training_service import TrainingService

__all__ = ["event_stream"]

END = b"event: end\ndata: {}\n\n"


def event_stream(
    request: Request, service: TrainingService, job: str, events: AsyncGenerator[JobEvent | SaidPage, None]
) -> EventStream:
    """The answer that sends ``events`` of ``job`` and their end, as long as who asks may have them."""
    state, sent = request.app.state, _to_the_end(service, job, events)
    return EventStream(until(state.closing, partial(still_known, request), sent), state.places.place(request))


async def _to_the_end(
    service: TrainingService, job: str, events: AsyncGenerator[JobEvent | SaidPage, None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield _encoded(event)
    try:
        has_ended = (await service.get(job)).state in FINAL_STATES
    except (ServiceDrainingError, StoreError):
        has_ended = False
    if has_ended:
        yield END


def _encoded(event: JobEvent | SaidPage) -> bytes:
    if isinstance(event, SaidPage):
        data = f'{{"id": {event.next}, "data": {SaidAnswer.model_validate(event).model_dump_json()}}}'
        return f"id: {event.next}\nevent: said\ndata: {data}\n\n".encode()
    data = EventAnswer.model_validate(event).model_dump_json()
    return f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()
