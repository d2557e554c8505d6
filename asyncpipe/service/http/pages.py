"""Pages for people: all jobs at ``/``, and the live page of each job at ``/jobs/ID/``.

The list is made in the browser from the API. A live page needs a feed, which encodes the view of its job; a job that
somebody watches has one. Feeds that nobody watches are closed when there are more than ``MOST_FEEDS``.
"""

from __future__ import annotations

from collections import OrderedDict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from asyncpipe.observe.live import LiveView
from asyncpipe.observe.live.event_streams import EventStreams
from asyncpipe.observe.live.feed import LiveFeed
from asyncpipe.observe.live.handlers import FILES, LiveHandlers, file_routes
from asyncpipe.service.http.rate_limits import StreamLimit
from asyncpipe.service.http.routes.common import job_id
from asyncpipe.service.job_states import JobRecord
from asyncpipe.service.training_service import TrainingService

__all__ = ["Pages"]

MOST_FEEDS = 4
"""Feeds beyond this number are closed if nobody watches; each has a thread, which mostly sleeps."""
OWN_FILES = {
    "/": ("jobs.html", "text/html"),
    "/jobs.css": ("jobs.css", "text/css"),
    "/jobs.js": ("jobs.js", "text/javascript"),
}
SHARED_FILES = {"/live_draw.js": FILES["/live_draw.js"]}


class Pages:
    """The pages of one service."""

    def __init__(self, service: TrainingService, streams: EventStreams, limit: StreamLimit) -> None:
        self._service = service
        self._limit = limit
        self._feeds: OrderedDict[str, tuple[LiveView, LiveFeed]] = OrderedDict()
        """By job; the one that was requested last is last."""
        self._closing = False
        self._live = LiveHandlers(self._feed, streams, limit.hold)

    def routes(self) -> list[BaseRoute]:
        """The routes of all pages."""
        return [
            *file_routes("/", __package__ or "", OWN_FILES),
            *file_routes("/", "asyncpipe.observe.live", SHARED_FILES),
            Route("/jobs/{id}", self._to_page),
            *file_routes("/jobs/{id}/", "asyncpipe.observe.live", FILES),
            Route("/jobs/{id}/state", self._live.state),
            Route("/jobs/{id}/events", self._live.events),
        ]

    async def end(self) -> None:
        """Send every open page its last message."""
        self._closing = True
        while self._feeds:
            await self._feeds.popitem()[1][1].close()

    async def _to_page(self, request: Request) -> Response:
        # Relative, so that it is right where a host mounts the API; so are the page's references to its files.
        return Response(status_code=308, headers={"Location": f"{job_id(request)}/"})

    async def _feed(self, request: Request) -> LiveFeed:
        """The feed of the job that ``request`` names. Raises ``UnknownJobError``."""
        record = await self._service.get(job_id(request))
        view = self._service.view(record.id)
        known = self._feeds.get(record.id)
        if known is not None and view in (None, known[0]):
            self._feeds.move_to_end(record.id)
            return known[1]
        view = view or _resting(record)
        feed = LiveFeed(view)
        if self._closing:  # ``end`` has passed and will not close it.
            await feed.close()
            return feed
        feed.start()
        self._feeds[record.id] = (view, feed)
        self._feeds.move_to_end(record.id)
        if known is not None:
            await known[1].close()
        await self._make_room()
        return feed

    async def _make_room(self) -> None:
        for job, (_, feed) in list(self._feeds.items()):
            if len(self._feeds) <= MOST_FEEDS:
                return
            if not feed.followers and self._feeds.get(job, (None, None))[1] is feed:
                del self._feeds[job]
                await feed.close()


def _resting(record: JobRecord) -> LiveView:
    """The view of a job that does not run: its name, and that it has ended."""
    view = LiveView(record.spec.name)
    view.end()
    return view
