"""Pages for people: all jobs at ``/``, and the page of each job at ``/jobs/ID/``; their files are in ``web/``.

The list is made in the browser from the API. The page of a job is the live page (``observe/live``), around which
``web/job.js`` shows what the API says of the job. It needs a feed, which encodes the view of its job; a job that
somebody watches has one. Feeds that nobody watches are closed when there are more than ``MOST_FEEDS``.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from functools import partial
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from asyncpipe.observe.live import LiveView
from asyncpipe.observe.live.event_streams import EventStream, until
from asyncpipe.observe.live.feed import LiveFeed
from asyncpipe.observe.live.handlers import FILES, file_route, file_routes, file_text
from asyncpipe.service.http.access_control import still_known
from asyncpipe.service.http.routes.common import job_id
from asyncpipe.service.job_states import JobRecord
from asyncpipe.service.training_service import TrainingService

__all__ = ["Pages"]

MOST_FEEDS = 4
"""Feeds beyond this number are closed if nobody watches; each has a thread, which mostly sleeps."""
LIVE = "asyncpipe.observe.live"
SCRIPTS = (
    "actions", "api", "columns", "compare", "devices", "dialog", "failures", "fields", "job", "jobs", "log", "page",
    "submit", "workers",
)  # fmt: skip
OWN_FILES = {
    "/": ("web/jobs.html", "text/html"),
    **{f"/{name}": ("web/page.html", "text/html") for name in ("devices", "submit")},
    "/jobs.css": ("web/jobs.css", "text/css"),
    **{f"/{name}.js": (f"web/{name}.js", "text/javascript") for name in SCRIPTS},
}
SHARED_FILES = {path: file for path, file in FILES.items() if path != "/"}


class Pages:
    """The pages of one service."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service
        self._feeds: OrderedDict[str, _JobFeed] = OrderedDict()
        """By job; the one that was requested last is last."""
        self._closing = False

    def routes(self) -> list[BaseRoute]:
        """The routes of all pages."""
        return [
            *file_routes("/", __package__ or "", OWN_FILES),
            *file_routes("/", LIVE, SHARED_FILES),
            Route("/jobs/{id}", self._to_page),
            file_route("/jobs/{id}/", job_page(), "text/html"),
            Route("/jobs/{id}/state", self._state),
            Route("/jobs/{id}/events", self._events),
        ]

    async def end(self) -> None:
        """Send every open page its last message."""
        self._closing = True
        while self._feeds:
            await self._feeds.popitem()[1].feed.close()

    async def _to_page(self, request: Request) -> Response:
        # Relative, so that it is right where a host mounts the API; so are the page's references to its files.
        return Response(status_code=308, headers={"Location": f"{await job_id(request, request.path_params['id'])}/"})

    async def _state(self, request: Request) -> Response:
        message = await (await self._feed(request)).newest()
        return Response(message.data, media_type="application/json")

    async def _events(self, request: Request) -> EventStream:
        followed = (await self._feed(request)).follow(request.headers.get("Last-Event-ID"))
        # The end of the application closes the feed, which sends a last message.
        events = until(asyncio.Event(), partial(still_known, request), followed)
        return EventStream(events, request.app.state.places.place(request))

    async def _feed(self, request: Request) -> LiveFeed:
        """The feed of the job that ``request`` names. Raises ``UnknownJobError``."""
        record = await self._service.get(await job_id(request, request.path_params["id"]))
        view = self._service.view(record.id)
        known = self._feeds.get(record.id)
        if known is None or not known.shows(view, record):
            past = view or await self._service.past_view(record.id)
            # Another request may have made the same meanwhile.
            if (known := self._feeds.get(record.id)) is None or not known.shows(view, record):
                return await self._new_feed(past, record, known)
        self._feeds.move_to_end(record.id)
        return known.feed

    async def _new_feed(self, view: LiveView, record: JobRecord, before: _JobFeed | None) -> LiveFeed:
        feed = LiveFeed(view)
        if self._closing:  # ``end`` has passed and will not close it.
            await feed.close()
            return feed
        feed.start()
        self._feeds[record.id] = _JobFeed(view, feed, record.attempts)
        self._feeds.move_to_end(record.id)
        if before is not None:
            await before.feed.close()
        await self._make_room()
        return feed

    async def _make_room(self) -> None:
        for job, each in list(self._feeds.items()):
            if len(self._feeds) <= MOST_FEEDS:
                return
            if not each.feed.followers and self._feeds.get(job) is each:
                del self._feeds[job]
                await each.feed.close()


class _JobFeed(NamedTuple):
    view: LiveView
    feed: LiveFeed
    attempts: int
    """Of the job when the feed was made: a job that has run since has another view."""

    def shows(self, view: LiveView | None, record: JobRecord) -> bool:
        """Whether this is what a job shows whose run has ``view``, ``None`` if it does not run."""
        return self.view is view if view is not None else self.attempts == record.attempts


def job_page() -> str:
    """The live page with the script of its job; its files are two folders above it."""
    page = file_text(LIVE, "live.html").replace("<body>", '<body data-ended="not running">')
    page = page.replace("</head>", '<script src="job.js" type="module"></script>\n</head>')
    return re.sub(r'(href|src)="(?=[\w/.]+\.(css|js)")', r'\1="../../', page)
