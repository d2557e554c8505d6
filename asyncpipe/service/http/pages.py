"""Pages for people: all jobs at ``/``, and the live page of each job at ``/jobs/ID/``.

The list is made in the browser from the API. A live page needs a feed, which encodes the view of its job; a job that
somebody watches has one. Feeds that nobody watches are closed when there are more than ``MOST_FEEDS``.
"""

from __future__ import annotations

from collections import OrderedDict

from aiohttp import web

from asyncpipe.observe.live import LiveView
from asyncpipe.observe.live.feed import LiveFeed
from asyncpipe.observe.live.handlers import FILES, LiveHandlers, add_files
from asyncpipe.service.http.rate_limits import StreamLimit
from asyncpipe.service.http.routes import job_id
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

    def __init__(self, service: TrainingService, limit: StreamLimit) -> None:
        self._service = service
        self._limit = limit
        self._feeds: OrderedDict[str, tuple[LiveView, LiveFeed]] = OrderedDict()
        """By job; the one that was requested last is last."""
        self._closing = False
        self._live = LiveHandlers(self._feed)

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add all pages."""
        add_files(router, "/", __package__ or "", OWN_FILES)
        add_files(router, "/", "asyncpipe.observe.live", SHARED_FILES)
        router.add_get("/jobs/{id}", self._to_page)
        add_files(router, "/jobs/{id}/", "asyncpipe.observe.live", FILES)
        router.add_get("/jobs/{id}/state", self._live.state)
        router.add_get("/jobs/{id}/events", self._events)

    async def close(self, _: web.Application) -> None:
        """End every open page."""
        self._closing = True
        while self._feeds:
            await self._feeds.popitem()[1][1].close()
        await self._live.close()

    async def _to_page(self, request: web.Request) -> web.StreamResponse:
        # Relative, so that it is right where a host mounts the API; so are the page's references to its files.
        return web.Response(status=308, headers={"Location": f"{job_id(request)}/"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        with self._limit.hold():
            return await self._live.events(request)

    async def _feed(self, request: web.Request) -> LiveFeed:
        """The feed of the job that ``request`` names. Raises ``UnknownJobError``."""
        record = await self._service.get(job_id(request))
        view = self._service.view(record.id)
        known = self._feeds.get(record.id)
        if known is not None and view in (None, known[0]):
            self._feeds.move_to_end(record.id)
            return known[1]
        view = view or _resting(record)
        feed = LiveFeed(view)
        if self._closing:  # ``close`` has passed and will not close it.
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
