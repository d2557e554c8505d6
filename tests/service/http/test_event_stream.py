"""EventStreams of events and the live pages: what is sent, where it goes on, how it ends."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from aiohttp import ClientSession
from http_helpers import NOBODY, Api, fake, mounted, served, submission

from asyncpipe.observe.live import LiveView, event_streams
from asyncpipe.observe.live import handlers as live_http
from asyncpipe.service.http import pages, serve_api
from asyncpipe.service.http.pages import OWN_FILES, SHARED_FILES
from asyncpipe.service.job_states import JobState

pytestmark = [pytest.mark.usefixtures("no_leaks")]


async def blocks(answer: Any, count: int) -> list[dict[str, str]]:
    """The next ``count`` events, or all that come before the end; comments and pauses left out."""
    found: list[dict[str, str]] = []
    block: dict[str, str] = {}
    async with asyncio.timeout(10):
        while len(found) < count:
            line = (await answer.content.readline()).decode()
            if not line:
                break
            name, _, value = line.rstrip("\n").partition(": ")
            if line == "\n":
                if "data" in block:
                    found.append(block)
                block = {}
            elif name:
                block[name] = value
    return found


def follow(api: Api, job: str, query: str = "", **headers: str) -> Any:
    return api.session.get(f"{api.base}/v1/jobs/{job}/events{query}", headers=headers)


async def test_past_and_new_events_are_sent_and_the_end(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        api.service.tell(job, "state", number=1, to="queued", cause="submitted", **{"from": None})
        async with follow(api, job) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            (past,) = await blocks(answer, 1)
            assert (past["id"], past["event"]) == ("1", "state")
            data = json.loads(past["data"])
            assert (data["id"], data["at"], data["kind"]) == (1, 1.5, "state")
            assert data["data"]["cause"] == "submitted"
            api.service.tell(job, "step", step=1, loss=math.nan, learning_rate=0.1, seconds=0.5, tokens=8)
            (new,) = await blocks(answer, 1)
            step = {"step": 1, "loss": None, "learning_rate": 0.1, "seconds": 0.5, "tokens": 8}
            assert json.loads(new["data"])["data"] == step
            api.service.tell(job, "state", number=2, to="cancelled", cause="", **{"from": "queued"})
            await api.service.become(job, JobState.CANCELLED)
            assert [event["event"] for event in await blocks(answer, 9)] == ["state", "end"]
        assert api.service.followers == 0


@pytest.mark.parametrize(
    ("query", "headers"), [("?after=2", {}), ("", {"Last-Event-ID": "2"}), ("?after=1", {"Last-Event-ID": "2"})]
)
async def test_who_comes_back_goes_on_behind_the_last(tmp_path: Path, query: str, headers: dict[str, str]) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        for number in range(4):
            api.service.tell(job, "note", level=20, text=str(number))
        await api.service.cancel(job, "enough")
        async with follow(api, job, query, **headers) as answer:
            assert [event.get("id") for event in await blocks(answer, 9)] == ["3", "4", None]


@pytest.mark.parametrize("wrong", ["x", "-1", "1.5", "9" * 30])
async def test_an_odd_last_event_is_a_422(tmp_path: Path, wrong: str) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        async with follow(api, job, **{"Last-Event-ID": wrong}) as answer:
            assert answer.status == 422
        assert api.service.followers == 0


async def test_a_stream_of_no_job_is_a_404(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api, follow(api, NOBODY) as answer:
        assert answer.status == 404


async def test_a_service_that_ends_leaves_the_stream_without_an_end(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        async with follow(api, job) as answer:
            await answer.content.readline()
            await api.service.drain("shutting down")
            assert await blocks(answer, 9) == []


async def test_a_server_that_closes_ends_its_streams(tmp_path: Path) -> None:
    async with fake(tmp_path) as service, ClientSession() as session:
        job = (await service.submit(submission()))[0].id
        service.views[job] = LiveView("demo")
        async with serve_api(service, service.settings) as url:  # type: ignore[arg-type]
            answer = await session.get(f"{url}v1/jobs/{job}/events")
            page = await session.get(f"{url}jobs/{job}/events")
            assert await answer.content.readline() == b"retry: 1000\n"
            assert await page.content.readline() == b"retry: 1000\n"
        assert service.followers == 0
        assert b"event: end" not in await answer.read()
        assert b"event: end" in await page.read()


async def test_a_client_that_goes_is_not_followed_any_more(tmp_path: Path) -> None:
    async with served(tmp_path) as api:
        job = await api.submitted()
        async with follow(api, job) as answer:
            await answer.content.readline()
            assert api.service.followers == 1
            answer.close()
        async with asyncio.timeout(10):
            while api.service.followers:
                news = api.service.news
                api.service.tell(job, "note", level=20, text="is anybody there?")
                await asyncio.wait([asyncio.ensure_future(news.wait())])


async def test_a_quiet_stream_is_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(event_streams, "KEEP_ALIVE_SECONDS", 0.01)
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        async with follow(api, job) as answer, asyncio.timeout(10):
            while await answer.content.readline() != event_streams.KEEP_ALIVE[:-1]:
                pass


# Live pages


async def test_a_job_has_a_live_page(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted(name="quite mine")
        view = LiveView("quite mine", steps=10)
        api.service.views[job] = view
        view.training_step(0.5, 1, 1, 0.1)
        status, page, headers = await api.ask("GET", f"/jobs/{job}/")
        assert (status, "live.js" in page) == (200, True)
        assert headers.items() >= live_http.HEADERS.items()
        _, state, _ = await api.ask("GET", f"/jobs/{job}/state")
        assert (state["job"], state["training"]["loss"], state["ended"]) == ("quite mine", 0.5, False)
        async with api.session.get(f"{api.base}/jobs/{job}/events") as answer:
            (event,) = await blocks(answer, 1)
            assert event["event"] == "state"
            view.end()
            view.training_step(0.25, 1, 1, 0.1)
            assert [event["event"] for event in await blocks(answer, 9)][-1] == "end"


async def test_a_job_that_does_not_run_has_a_page_that_rests_until_it_does(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        _, state, _ = await api.ask("GET", f"/jobs/{job}/state")
        assert (state["job"], state["ended"], state["training"]) == ("demo", True, None)
        api.service.views[job] = LiveView("demo")
        assert (await api.ask("GET", f"/jobs/{job}/state"))[1]["ended"] is False


async def test_live_pages_of_no_job_are_404(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        for path in ("state", "events"):
            assert (await api.ask("GET", f"/jobs/{NOBODY}/{path}"))[0] == 404


async def test_feeds_are_not_kept_for_every_job_that_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_threads: Any
) -> None:
    monkeypatch.setattr(pages, "MOST_FEEDS", 2)
    async with mounted(tmp_path) as api:
        for number in range(6):
            job = await api.submitted(name=str(number))
            assert (await api.ask("GET", f"/jobs/{job}/state"))[1]["job"] == str(number)
        assert new_threads() <= 2 + 2


async def test_the_page_of_jobs_asks_only_for_files_that_are_there(tmp_path: Path) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        texts = {path: (await api.ask("GET", path))[1] for path in (*OWN_FILES, *SHARED_FILES)}
        texts[f"/jobs/{job}/"] = (await api.ask("GET", f"/jobs/{job}/"))[1]
        pages = {"/": "jobs.js", f"/jobs/{job}/": "job.js"}
        for path, script in pages.items():
            asked = {urljoin(path, name) for name in re.findall(r'(?:src|href)="(?!data:)([^"]+)"', texts[path])}
            assert asked - {"/v1/jobs", "/", f"/jobs/{job}/state"} <= set(texts)
            ids = set(re.findall(r'id="([^"]+)"', texts[path]))
            assert set(re.findall(r"\$\('([a-z-]+)'", texts[f"/{script}"])) <= ids
        for path, text in texts.items():
            assert {f"/{name}" for name in re.findall(r"from '\./([^']+)'", text)} <= set(texts), path
        for path, text in texts.items():
            if "/vendor/" in path:
                continue
            wrong = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=|onclick"
            assert not re.search(wrong, text), path
            assert set(re.findall(r"https?://[^'\" ]+", text)) <= {"http://www.w3.org/2000/svg"}, path
