"""The live view over HTTP: what pages are sent and when, which requests are answered, and how it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple

import pytest
from aiohttp import ClientSession
from starlette.applications import Starlette
from starlette.routing import Mount

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.observe.http_server import served
from asyncpipe.observe.live import LiveView, event_streams, live_app, serve_live
from asyncpipe.observe.live import feed as live_feed
from asyncpipe.observe.live import handlers as live_http
from asyncpipe.observe.live.event_streams import KEEP_ALIVE
from asyncpipe.observe.live.feed import LiveFeed

pytestmark = [pytest.mark.usefixtures("no_leaks")]

FILES = list(live_http.FILES)


class CountedView(LiveView):
    """Counts its snapshots; ``filling`` makes them as large as a test wants."""

    folds = 0
    filling = ""
    error: Exception | None = None

    def snapshot(self) -> dict[str, Any]:
        self.folds += 1
        if self.error is not None:
            raise self.error
        return super().snapshot() | {"filling": self.filling}


class Clock:
    """The monotonic clock of feeds, which only tests advance, and the CPU time of their threads."""

    now = 100.0
    computed = 0.0

    def __call__(self) -> float:
        return self.now


class Event(NamedTuple):
    id: str
    kind: str
    data: dict[str, Any]


@pytest.fixture
def view() -> CountedView:
    made = CountedView("demo")
    made.step_completed(simulate(lower(find_schedule("1f1b"), Shape(2, 4, 2), checkpoint=CheckpointMode("never"))))
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(live_feed, "monotonic", made)
    monkeypatch.setattr(live_feed, "thread_time", lambda: made.computed)
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeds look for news every 10 ms and do not pause after a snapshot."""
    monkeypatch.setattr(live_feed, "WATCHED_SECONDS", 0.01)
    monkeypatch.setattr(live_feed, "REST", 0.0)


@asynccontextmanager
async def connected(view: LiveView, **options: Any) -> AsyncIterator[ClientSession]:
    async with client_of(live_app(view, **options)) as client:
        yield client


@asynccontextmanager
async def client_of(app: Starlette) -> AsyncIterator[ClientSession]:
    async with served(app, "127.0.0.1", 0, "it") as port, ClientSession(f"http://127.0.0.1:{port}") as client:
        yield client


def step(view: LiveView, loss: float = 1.0) -> None:
    view.training_step(loss, 4, 400, 0.1)


def parsed(text: bytes) -> Event:
    fields = dict(line.split(": ", 1) for line in text.decode().strip().split("\n"))
    assert set(fields) == {"id", "event", "data"}
    return Event(fields["id"], fields["event"], json.loads(fields["data"]))


async def next_block(response: Any) -> bytes:
    """The next event or comment of a stream."""
    async with asyncio.timeout(10):
        block: bytes = await response.content.readuntil(b"\n\n")
    return block


async def next_event(response: Any) -> Event:
    return parsed(await next_block(response))


# What a page is sent


@pytest.mark.usefixtures("quick")
async def test_a_page_is_sent_the_state_and_then_what_is_new(view: CountedView) -> None:
    async with connected(view) as client, client.get("/events") as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await next_block(response) == event_streams.RETRY
        first = await next_event(response)
        assert (first.kind, first.data["job"], first.data["training"]) == ("state", "demo", None)
        assert first.data["timeline"]["count"] == 2 * 2 * 4 + 2 * 4
        step(view, 3.5)
        second = await next_event(response)
        assert (second.kind, second.data["training"]["loss"]) == ("state", 3.5)
        assert second.id != first.id


async def test_the_state_is_told_once_as_json(view: CountedView) -> None:
    step(view)
    async with connected(view) as client, client.get("/state") as response:
        assert response.content_type == "application/json"
        state = await response.json()
    assert state == json.loads(json.dumps(view.snapshot()))


@pytest.mark.usefixtures("quick")
async def test_where_nothing_is_new_only_comments_are_sent(view: CountedView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(event_streams, "KEEP_ALIVE_SECONDS", 0.05)
    async with connected(view) as client, client.get("/events") as response:
        await next_block(response)
        await next_event(response)
        folds = view.folds
        for _ in range(3):
            assert await next_block(response) == KEEP_ALIVE
        assert view.folds == folds
        step(view)
        while (block := await next_block(response)) == KEEP_ALIVE:
            pass
        assert parsed(block).data["training"]["steps"] == 1


async def test_a_page_that_reconnects_is_not_sent_what_it_has(view: CountedView, clock: Clock) -> None:
    feed = LiveFeed(view)
    async with aclosing(feed.follow()) as events:
        first = parsed(await anext(events))
    async with aclosing(feed.follow(first.id)) as events:
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert not waiting.done()
        step(view)
        clock.now += 10
        newest = await feed.newest()
        assert parsed(await waiting).id == newest.id != first.id
    await feed.close()


async def test_a_slow_page_is_sent_the_newest_state_alone(view: CountedView, clock: Clock) -> None:
    feed = LiveFeed(view)
    async with aclosing(feed.follow()) as events:
        await anext(events)
        for loss in (3.0, 2.0, 1.0):
            step(view, loss)
            clock.now += 10
            await feed.newest()
        assert parsed(await anext(events)).data["training"]["loss"] == 1.0
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert not waiting.done()
        step(view, 0.5)
        clock.now += 10
        await feed.newest()
        assert parsed(await waiting).data["training"]["loss"] == 0.5
    await feed.close()


# Folds


async def test_a_view_is_folded_at_most_four_times_a_second(view: CountedView, clock: Clock) -> None:
    feed = LiveFeed(view)
    for _ in range(100):
        step(view)
        await feed.newest()
        clock.now += 1 / 16
    # Sixteenths, since binary fractions add up exactly.
    assert view.folds == 100 / 4
    await feed.close()


async def test_a_long_fold_is_followed_by_a_long_rest(
    view: CountedView, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow() -> dict[str, Any]:
        clock.computed += 0.5
        return {"ended": False}

    monkeypatch.setattr(view, "snapshot", slow)
    feed = LiveFeed(view)
    first = await feed.newest()
    for seconds, is_same in ((0.5 * live_feed.REST - 0.1, True), (0.2, False)):
        step(view)
        clock.now += seconds
        assert (await feed.newest() is first) == is_same
    await feed.close()


async def test_a_fold_that_fails_is_logged_once_and_pages_go_on(
    view: CountedView, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    feed = LiveFeed(view)
    good = await feed.newest()
    view.error = ZeroDivisionError("no")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            step(view)
            clock.now += 10
            assert (await feed.newest()).data == good.data
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "no snapshot of the live view could be taken"
    ]
    view.error = None
    step(view)
    await feed.close()
    assert json.loads((await feed.newest()).data)["training"]["steps"] == 4


# The end


async def test_closing_tells_every_page_and_ends_its_connection(view: CountedView) -> None:
    async with ClientSession() as session:
        async with serve_live(view, 0) as server:
            responses = [await session.get(f"{server.url}events") for _ in range(3)]
            for response in responses:
                await next_block(response)
                assert (await next_event(response)).data["ended"] is False
            step(view, 0.25)
        for response in responses:
            last = await next_event(response)
            assert (last.kind, last.data["ended"]) == ("end", True)
            assert last.data["training"]["loss"] == 0.25
            assert await response.content.read() == b""
    assert view.ended is False


@pytest.mark.usefixtures("quick")
async def test_a_run_that_ends_is_told_while_the_server_goes_on(view: CountedView) -> None:
    async with connected(view) as client:
        async with client.get("/events") as response:
            await next_block(response)
            await next_event(response)
            view.end()
            last = await next_event(response)
            assert (last.kind, last.data["ended"]) == ("end", True)
            assert await response.content.read() == b""
        # A page that comes later, or comes back, learns the same at once.
        async with client.get("/events", headers={"Last-Event-ID": last.id}) as response:
            await next_block(response)
            assert await next_event(response) == last
            assert await response.content.read() == b""


# Whom it answers


async def get(client: ClientSession, path: str, **headers: str) -> int:
    async with client.get(path, headers=headers) as response:
        return response.status


async def test_requests_that_name_another_host_are_refused(view: CountedView) -> None:
    own = ["localhost", "LOCALHOST:8000", "run.localhost", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000", "[::1]"]
    foreign = [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "10.0.0.1",
        "[",
        "",
        "127.0.0.1.evil",
        "0",
    ]
    async with connected(view) as client:
        assert {host: await get(client, "/state", Host=host) for host in own} == dict.fromkeys(own, 200)
        for path in ("/", "/events", "/state", "/nothing"):
            assert {host: await get(client, path, Host=host) for host in foreign} == dict.fromkeys(foreign, 403)


async def test_the_name_that_it_listens_on_is_answered(view: CountedView) -> None:
    # An odd way to write 127.0.0.1: neither a loopback name nor what the socket says.
    async with serve_live(view, 0, "127.1", hosts=["gpu-box"]) as server, ClientSession() as session:
        for host, status in (("127.1", 200), ("GPU-box:80", 200), ("127.2", 403), ("box", 403)):
            async with session.get(f"http://127.0.0.1:{server.port}/state", headers={"Host": host}) as response:
                assert response.status == status


async def test_a_request_without_a_host_is_refused(view: CountedView) -> None:
    async with serve_live(view, 0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /state HTTP/1.0\r\n\r\n")
        assert (await reader.read()).split(b"\r\n")[0] == b"HTTP/1.1 403 Forbidden"
        writer.close()
        await writer.wait_closed()


async def test_nothing_can_be_sent_and_every_answer_has_the_headers(view: CountedView) -> None:
    async with connected(view) as client:
        for path in (*FILES, "/state", "/events"):
            for method in ("POST", "PUT", "DELETE", "OPTIONS"):
                async with client.request(method, path) as response:
                    assert response.status == 405, (method, path)
        for path in (*FILES, "/state", "/events", "/nothing", "/../live.py"):
            for host in ("localhost", "evil.example"):
                async with client.get(path, headers={"Host": host, "Origin": "http://evil.example"}) as response:
                    assert response.headers.items() >= live_http.HEADERS.items()
                    assert not [name for name in response.headers if name.lower().startswith("access-control")]
        for path in (*FILES, "/state", "/events"):  # The stream of events, which holds the connection, is the last.
            async with client.head(path) as response:
                assert (response.status, await response.read()) == (200, b"")
    policy = live_http.HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


# The page


PAGES = {"/../../", "/../../devices", "/../../submit"}
"""Of a service, to which the page of a job leads."""


async def test_the_page_asks_only_for_files_that_are_there(view: CountedView) -> None:
    async with connected(view) as client:
        texts = {}
        for path, (_, kind) in live_http.FILES.items():
            async with client.get(path) as response:
                assert response.content_type == kind
                assert response.charset == "utf-8"
                texts[path] = await response.text()
    asked = re.findall(r'(?:src|href)="(?!data:)([^"]+)"', texts["/"])
    asked += re.findall(r"from '\./([^']+)'", "".join(texts.values()))
    assert {f"/{name}" for name in asked} == {*FILES, "/state", *PAGES} - {"/"}
    ids = set(re.findall(r'id="([^"]+)"', texts["/"]))
    used = set(re.findall(r"(?:\$|write)\('([a-z-]+)'", texts["/live.js"]))
    assert used <= ids, used - ids
    # Data is text, never markup; and nothing comes from elsewhere.
    for path, text in texts.items():
        if path.startswith("/vendor/"):
            continue
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=|onclick", text), (
            path
        )
        assert set(re.findall(r"https?://[^'\" ]+", text)) <= {"http://www.w3.org/2000/svg"}, path


@pytest.mark.usefixtures("quick")
async def test_it_can_be_a_part_of_another_application(view: CountedView) -> None:
    app = live_app(view)
    host = Starlette(routes=[Mount("/jobs/demo", app)], lifespan=lambda _: app.router.lifespan_context(app))
    async with client_of(host) as client:
        assert await get(client, "/jobs/demo/") == 200
        assert await get(client, "/jobs/demo/live.js") == 200
        assert await get(client, "/jobs/demo/state", Host="evil.example") == 403
        async with client.get("/jobs/demo/events") as response:
            await next_block(response)
            assert (await next_event(response)).data["job"] == "demo"


# Serving


async def test_a_port_that_is_taken_is_an_option_error(view: CountedView) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OptionError, match=rf"cannot serve the live view on 127\.0\.0\.1:{port}: .*in use"):
            async with serve_live(view, port):
                pass


@pytest.mark.parametrize("missing", ["starlette.applications", "uvicorn"])
async def test_without_its_packages_the_error_says_what_to_install(
    view: CountedView, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for module in ("asyncpipe.observe.http_server", "asyncpipe.observe.live.handlers"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(OptionError, match=r"pip install -e '\.\[service\]'"):
        async with serve_live(view, 0):
            pass
