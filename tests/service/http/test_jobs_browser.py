"""The page of jobs in a real browser: what it shows, that its buttons work, and that it fits at any width."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from http_helpers import TOKEN, FakeService, served, submission

from asyncpipe.observe.live import LiveView
from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs.job_log import LossRow

NODE = Path(__file__).resolve().parents[2] / "node"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = os.environ.get("ASYNCPIPE_TEST_PICTURES")
"""A folder for screenshots, to look at them."""

pytestmark = [
    pytest.mark.one_loop,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: install Debian's package chromium"),
    pytest.mark.skipif(shutil.which("node") is None, reason="no node: install Node.js 20 or later"),
    pytest.mark.skipif(
        not (NODE / "node_modules" / "puppeteer-core").is_dir(),
        reason="no puppeteer-core: run npm install in tests/node",
    ),
]


async def jobs(service: FakeService) -> str:
    """Many that ended long ago, and one in each other state; gives the id of the one that runs."""
    for number in range(30):
        record, _ = await service.submit(submission(name=f"old {number}"))
        await service.cancel(record.id, "not needed any more")
    running, _ = await service.submit(submission(name="runs", weight=2))
    await service.become(running.id, JobState.RUNNING, "it is its turn")
    await reach(service, running.id, 50)
    await service.submit(submission(name="waits", priority_class="background"))
    done, _ = await service.submit(submission(name="done"))
    await service.become(done.id, JobState.RUNNING)
    await reach(service, done.id, 100)
    await service.become(done.id, JobState.FINISHED)
    failed, _ = await service.submit(submission(name="a job with quite a long name, as people like to give them"))
    await service.become(failed.id, JobState.RUNNING)
    await service.become(failed.id, JobState.FAILED, "the loss of step 12 is not finite: nan; see faults.non_finite")
    view = LiveView("runs", steps=100)
    view.training_step(0.5, 8, 64, 0.1)
    service.views[running.id] = view
    service.busy.add(running.id)
    return running.id


async def reach(service: FakeService, job: str, step: int) -> None:
    rows = service.rows.setdefault(job, [])
    for each in range(len(rows) + 1, step + 1):
        rows.append(LossRow(each, 4 * math.exp(-each / 30) + 0.2 * math.sin(each), 0.01, 0.1, 64))
    await service.store.progress(job, step)


async def facts_of(process: asyncio.subprocess.Process, service: FakeService, job: str) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    async for line in process.stdout:
        message = json.loads(line)
        if "facts" in message:
            found: dict[str, Any] = message["facts"]
            return found
        await reach(service, job, 60)
        process.stdin.write(b"done\n")
        await process.stdin.drain()
    raise AssertionError(f"the script ended: {(await process.stderr.read()).decode()}")


async def test_the_page_in_a_browser(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    async with served(tmp_path / "service", token=TOKEN, requests_per_second=50, burst=100) as api:
        running = await jobs(api.service)
        url = api.base.replace("//", f"//me:{TOKEN}@") + "/"
        process = await asyncio.create_subprocess_exec(
            "node", "jobs.mjs", url, CHROMIUM, str(tmp_path / "profile"), *([PICTURES] if PICTURES else []),
            cwd=NODE, limit=1 << 20, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            facts = await facts_of(process, api.service, running)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
    check(facts, running)


def check(facts: dict[str, Any], running: str) -> None:
    assert facts["wrong"] == []
    first = {row["name"]: row for row in facts["first"]["rows"]}
    assert facts["first"]["connection"] == "live"
    assert facts["first"]["about"] == "1 running · 1 queued"
    assert list(first)[:2] == ["runs", "waits"]
    runs, waits, done = first["runs"], first["waits"], first["done"]
    assert (runs["list"], runs["state"], runs["steps"]) == ("active", "running", "step 50 of 100")
    assert runs["buttons"] == ["pause", "cancel"]
    assert runs["points"] >= 50
    assert runs["bar"] > 10
    assert (waits["list"], waits["state"], waits["buttons"]) == ("active", "queued", ["pause", "cancel"])
    assert (done["list"], done["state"], done["buttons"]) == ("ended", "finished", [])
    assert len(first) == 2 + 25
    assert "old 29" in first
    assert "old 0" not in first
    for size, seen in facts["sizes"].items():
        assert seen["scroll"] <= seen["width"] == int(size.split()[0]), size
    second = {row["name"]: row for row in facts["second"]["rows"]}
    assert (second["waits"]["list"], second["waits"]["state"]) == ("ended", "cancelled")
    assert second["runs"]["steps"] == "step 60 of 100"
    assert second["runs"]["loss"] != runs["loss"]
    assert "cannot pause just now" in facts["refused"]["notice"]
    assert facts["live"] == {"place": f"/jobs/{running}/", "job": "runs", "loss": "0.5000"}
