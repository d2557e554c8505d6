"""The pages of a service in a real browser: what they show, that they are used by keys alone, and what axe finds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from browser_helpers import NEEDS_A_BROWSER, driven
from http_helpers import TOKEN, FakeService, served, submission
from store_helpers import progress

from asyncpipe.observe.live import LiveView
from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs.outlook import Outlook
from asyncpipe.service.store.job_records import LossRow
from asyncpipe.service.store.job_store import JobFilter

pytestmark = [*NEEDS_A_BROWSER, pytest.mark.long]


async def jobs(service: FakeService) -> str:
    """Many that ended long ago, and one in each other state; gives the id of the one that runs."""
    for number in range(30):
        record, _ = await service.submit(submission(name=f"old {number}"))
        await service.cancel(record.id, "not needed any more")
    running, _ = await service.submit(submission(name="runs", weight=2))
    await service.become(running.id, JobState.RUNNING, "it is its turn")
    await reach(service, running.id, 50)
    waiting, _ = await service.submit(submission(name="waits", priority_class="background"))
    rows = {"devices": [["cpu:0"], ["cpu:1"]], "microbatches": 4, "schedule": "gpipe"}
    done, _ = await service.submit(submission(name="done", pipeline=rows))
    await service.become(done.id, JobState.RUNNING)
    await reach(service, done.id, 100)
    await service.become(done.id, JobState.FINISHED)
    failed, _ = await service.submit(submission(name=LONG))
    await service.become(failed.id, JobState.RUNNING)
    await service.become(failed.id, JobState.FAILED, "the loss of step 12 is not finite: nan; see faults.non_finite")
    view = LiveView("runs", steps=100)
    view.training_step(0.5, 8, 64, 0.1)
    service.views[running.id] = view
    speed = {"steps_per_second": 2.0, "tokens_per_second": 128.0, "left_seconds": 25.0}
    service.known = dict.fromkeys([record.id for record in await service.list(JobFilter(), 1000)], Outlook())
    service.known |= {running.id: Outlook(**speed), waiting.id: Outlook("max_running 1 is reached", 1)}
    service.busy.add(running.id)
    return running.id


async def reach(service: FakeService, job: str, step: int) -> None:
    rows = service.rows.setdefault(job, [])
    for each in range(len(rows) + 1, step + 1):
        rows.append(LossRow(each, 4 * math.exp(-each / 30) + 0.2 * math.sin(each), 0.01, 0.1, 64))
    await progress(service.store, job, step)


async def test_the_page_in_a_browser(tmp_path: Path) -> None:
    async with served(tmp_path / "service", token=TOKEN) as api:
        running = await jobs(api.service)

        async def go_on() -> None:
            await reach(api.service, running, 60)

        url = api.base.replace("//", f"//me:{TOKEN}@") + "/"
        facts = await driven("jobs.mjs", url, tmp_path / "profile", {"go on": go_on})
    check(facts, running)


LONG = "a job with quite a long name, as people like to give them"


def check(facts: dict[str, Any], running: str) -> None:
    assert facts["wrong"] == []
    first = {row["name"]: row for row in facts["first"]["rows"]}
    assert facts["first"]["connection"] == "live"
    assert facts["first"]["about"] == "1 running · 1 waiting · 1 failed"
    assert facts["first"]["chips"] == ["All 34", "Failed 1", "Running 1", "Waiting 1", "Finished 1", "Cancelled 30"]
    assert list(first)[:4] == [LONG, "done", "waits", "runs"]
    runs, waits, done = first["runs"], first["waits"], first["done"]
    assert (runs["state"], runs["steps"]) == ("running", "step 50 of 100")
    assert (runs["buttons"], runs["pace"]) == (["pause", "cancel"], "2 steps/s · 25 s left")
    assert runs["bar"] > 10
    assert (waits["state"], waits["buttons"]) == ("queued", ["pause", "cancel"])
    assert (waits["pace"], waits["cause"]) == ("place 1 in the queue", "max_running 1 is reached")
    assert done["state"] == "finished"
    assert "2 replicas · cpu:0 | cpu:1" in done["facts"]
    assert "· cpu:0, cpu:1 ·" in runs["facts"]
    assert first[LONG]["cause"].startswith("the loss of step 12 is not finite")
    for size, seen in facts["sizes"].items():
        check_page(seen, size)
    check_keys(facts)
    second = {row["name"]: row for row in facts["second"]["rows"]}
    assert second["waits"]["state"] == "cancelled"
    assert second["runs"]["steps"] == "step 60 of 100"
    assert "cannot pause just now" in facts["refused"]["notice"]
    assert ([row["name"] for row in facts["searched"]["rows"]], facts["searched"]["place"]) == (
        [LONG],
        "?text=QUITE+A+LONG",
    )
    compared = facts["compared"]
    assert (facts["chosen"], compared["names"]) == ("2 jobs chosen", ["step", "runs", "done"])
    assert compared["said"].startswith("step 100, runs ")
    assert running in compared["place"]
    check_page(compared["audit"], "compared")
    check_jobs(facts, running)


def check_page(seen: dict[str, Any], where: str) -> None:
    assert seen["violations"] == [], where
    assert seen["scroll"] <= seen["width"], where


def check_keys(facts: dict[str, Any]) -> None:
    assert facts["unseen"] == []
    assert facts["moved"]["row"] == "waits"
    assert [question.split("?")[0] for question in facts["asked"]] == ["Cancel “waits”"] * 2
    assert facts["kept"]["name"] == "Cancel waits"
    assert facts["cancelled"]["row"] == "waits"


def check_jobs(facts: dict[str, Any], running: str) -> None:
    runs, done, failed = facts["runs"], facts["done"], facts[LONG]
    assert (runs["place"], runs["job"], runs["loss"]) == (f"/jobs/{running}/", "runs", "0.5000")
    assert (runs["state"], runs["connection"], runs["buttons"]) == ("running", "live", ["pause", "cancel"])
    assert (runs["facts"]["Speed"], runs["facts"]["Time left"]) == ("2 steps/s, 128 tokens/s", "about 25 s")
    assert (runs["facts"]["Devices"], done["facts"]["Devices"]) == ("cpu:0, cpu:1", "cpu:0 | cpu:1")
    assert (done["state"], done["connection"], done["failure"]) == ("finished", "not running", "")
    assert "Failed after step 0" in failed["failure"]
    assert "the loss of step 12 is not finite" in failed["failure"]
    for job in (runs, done, failed):
        assert set(job["files"].values()) == {200}
        for seen in job["audits"]:
            check_page(seen, job["state"])
    assert runs["back"] == failed["back"] == "/"
