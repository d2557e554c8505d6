"""What runs said, over HTTP and on the command line: pages, the end of a run, and a stream that misses nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from http_helpers import NOBODY, Api, mounted, served

from asyncpipe import cli
from asyncpipe.service import job_reading
from asyncpipe.service.client import JobClient
from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs import run_log
from asyncpipe.service.jobs.run_log import RunLog, place_of

pytestmark = [pytest.mark.usefixtures("no_leaks")]


def says(api: Api, job: str, run: int, *texts: str, stream: str = "stdout") -> None:
    """One line each."""
    log = RunLog(api.service.settings.folder / "jobs" / job, run)
    for text in texts:
        log.say(stream, text)
    log.close()


async def test_a_run_is_read_whole_in_pages_from_its_end_and_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        place = f"/v1/jobs/{job}/logs"
        nothing = {"run": 0, "lines": [], "next": 0, "runs": [], "more": False}
        assert (await api.ask("GET", place))[:2] == (200, nothing)
        says(api, job, 1, "of the first run")
        says(api, job, 2, *map(str, range(30)))
        says(api, job, 2, "oh", stream="stderr")
        monkeypatch.setattr(run_log.read_said, "__defaults__", (200,))
        found, query = [], ""
        while True:
            status, page, _ = await api.ask("GET", place + query)
            assert (status, page["run"], page["runs"]) == (200, 2, [1, 2])
            found += page["lines"]
            if not page["more"]:
                break
            query = f"?after={page['next']}"
        assert [line["text"] for line in found] == [*map(str, range(30)), "oh"]
        assert found[-1].keys() == {"at", "stream", "text"}
        for query, texts in {
            "?tail=2": ["29", "oh"],
            "?tail=2&stream=stdout": ["28", "29"],
            "?stream=stderr": ["oh"],
            "?run=1": ["of the first run"],
            "?run=7": [],
        }.items():
            _, page, _ = await api.ask("GET", place + query)
            assert [line["text"] for line in page["lines"]] == texts, query
        assert [(await api.ask("GET", place + query))[0] for query in ("?tail=0", "?stream=x", "?run=0")] == [422] * 3
        for path in ("logs", "logs/events"):
            assert (await api.ask("GET", f"/v1/jobs/{NOBODY}/{path}"))[0] == 404


async def test_a_follower_that_reconnects_misses_nothing_and_is_told_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_reading, "FOLLOW_SECONDS", 0.01)
    async with mounted(tmp_path) as api:
        job = await api.submitted()
        says(api, job, 1, "begins", "goes on")
        place = f"{api.base}/v1/jobs/{job}/logs/events"
        async with api.session.get(f"{place}?tail=1") as stream:
            first = await said(stream)
            assert texts(first) == ["goes on"]
            says(api, job, 1, "lives")
            second = await said(stream)
            assert (texts(second), second["data"]["run"]) == (["lives"], 1)
        says(api, job, 1, "while nobody looks")
        says(api, job, 2, "of the next run")
        await api.service.become(job, JobState.RUNNING)
        await api.service.become(job, JobState.FAILED)
        async with api.session.get(f"{place}?tail=1", headers={"Last-Event-ID": str(second["id"])}) as stream:
            assert [texts(await said(stream)) for _ in range(2)] == [["while nobody looks"], ["of the next run"]]
            assert (await stream.text()).strip() == "event: end\ndata: {}"
        client = JobClient(api.base)
        lines = await asyncio.to_thread(lambda: list(client.logs(job, run=1, follow=True)))
        assert [(line["run"], line["text"]) for line in lines][-1] == (1, "while nobody looks")
        lines = await asyncio.to_thread(lambda: list(client.logs(job)))
        assert [line["text"] for line in lines] == ["of the next run"]


def texts(event: Any) -> list[str]:
    return [line["text"] for line in event["data"]["lines"]]


async def said(stream: Any) -> Any:
    """The data of the next event; its id is the place that it names."""
    async with asyncio.timeout(10):
        while not (line := await stream.content.readline()).startswith(b"id: "):
            assert line
        number = int(line.removeprefix(b"id: "))
        assert await stream.content.readline() == b"event: said\n"
        data = json.loads((await stream.content.readline()).removeprefix(b"data: "))
        assert number == data["id"] == data["data"]["next"]
        return data


async def test_failures_are_grouped_and_listed_and_shown_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(tmp_path) as api:
        jobs = [await api.submitted(name=f"job {number}") for number in range(4)]
        roots = ("KeyError: x (a.py:1 in f)", "ValueError: y", "KeyError: x (a.py:1 in f)")
        for job, root in zip(jobs[:3], roots, strict=True):
            await api.service.store.transition(job, JobState.FAILED, f"failed as {job}", root=root)
        says(api, jobs[0], 1, "one\tline", "\x1b[31mred")
        _, answer, _ = await api.ask("GET", "/v1/failures")
        first, second = answer["failures"]
        assert (first["root"], first["count"], first["jobs"], first["users"]) == (
            "KeyError: x (a.py:1 in f)", 2, [jobs[2], jobs[0]], [],
        )  # fmt: skip
        assert (first["example"], second["count"]) == (f"failed as {jobs[2]}", 1)
        assert first["first"] <= first["last"]

        def run(*arguments: str) -> list[str]:
            assert cli.main(["jobs", *arguments, "--url", api.base]) == 0
            return capsys.readouterr().out.splitlines()

        listed = await asyncio.to_thread(run, "list", "--root", first["root"], "--json")
        assert [job["id"] for job in json.loads(listed[0])] == [jobs[2], jobs[0]]
        table = await asyncio.to_thread(run, "failures")
        assert [line.split()[0] for line in table] == ["JOBS", "2", "1"]
        lines = await asyncio.to_thread(run, "logs", "job 0")
        assert [line.split("  ", 1)[1] for line in lines] == ["stdout     one     line", "stdout     \\x1b[31mred"]
        lines = await asyncio.to_thread(run, "logs", "job 0", "--tail", "1", "--follow", "--json")
        assert [json.loads(line)["text"] for line in lines] == ["\x1b[31mred"]
        assert place_of(1) > 0
