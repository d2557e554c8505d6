"""The pages of a service in a real browser: what they show, that they are used by keys alone, and what axe finds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from browser_helpers import NEEDS_A_BROWSER, driven
from http_helpers import TOKEN, FakeService, served, submission

from asyncpipe.observe.live import LiveView
from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs.outlook import Outlook
from asyncpipe.service.jobs.run_log import RunLog
from asyncpipe.service.store.job_records import LossRow
from asyncpipe.service.store.job_store import JobFilter
from asyncpipe.service.submission.submission import check_submission

pytestmark = [*NEEDS_A_BROWSER, pytest.mark.long, pytest.mark.timeout(180)]


async def jobs(service: FakeService) -> str:
    """Many that ended long ago, and one in each other state; gives the id of the one that runs."""
    for number in range(30):
        record, _ = await service.submit(submission(name=f"old {number}"))
        await service.cancel(record.id, "not needed any more")
    spec = check_submission(submission(name="runs", weight=2), service.settings, service.entries)
    running, _ = await service.store.add(spec, owner="ann", teams=("vision",))
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
    await service.store.transition(
        failed.id, JobState.FAILED, "the loss of step 12 is not finite: nan; see faults.non_finite", root=ROOT
    )
    for record, stream, lines in ((running, "stdout", HOSTILE), (failed, "traceback", f"Traceback\n{ROOT}")):
        log = RunLog(service.settings.folder / "jobs" / record.id, 1)
        log.say(stream, lines)
        log.close()
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
        rows.append(LossRow(each, 4 * math.exp(-each / 30) + 0.2 * math.sin(each), 0.01, 0.1, 64, 1.0))
    await service.store.write_records(job, rows[-1:], [])


async def test_the_page_in_a_browser(tmp_path: Path) -> None:
    async with served(tmp_path / "service", token=TOKEN) as api:
        running = await jobs(api.service)

        async def go_on() -> None:
            await reach(api.service, running, 60)

        url = api.base.replace("//", f"//me:{TOKEN}@") + "/"
        facts = await driven("jobs.mjs", url, tmp_path / "profile", {"go on": go_on})
    check(facts, running)


ROOT = "NonFiniteError: nan (tiny.py:3 in build)"
HOSTILE = "epoch 1\n<img src=x onerror=alert(1)> is said\nepoch 2"
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
    assert done["facts"].endswith("2 replicas")
    assert (done["cells"]["devices"], runs["cells"]["devices"]) == ("cpu:0 | cpu:1", "cpu:0, cpu:1")
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
    check_columns(facts)
    check_jobs(facts, running)
    check_forms(facts)
    check_devices(facts["devices"])


def check_page(seen: dict[str, Any], where: str) -> None:
    assert seen["violations"] == [], where
    assert seen["scroll"] <= seen["width"], where


def check_columns(facts: dict[str, Any]) -> None:
    columns = facts["columns"]
    check_page(columns["audit"], "columns")
    assert columns["heads"][1:-1] == ["Name", "State", "User", "Devices", "Steps", "Loss ↓", "Waited", "Updated"]
    assert columns["kept"] == "state,owner,devices,steps,loss,waited,updated"
    assert columns["place"] == f"?columns={columns['kept'].replace(',', '%2C')}&sort=-loss"
    assert columns["focus"] == "Loss ↓"
    assert (facts["ascending"], facts["descending"]) == (["done", "runs"], ["runs", "done"])


def check_forms(facts: dict[str, Any]) -> None:
    dialog, form = facts["dialog"], facts["form"]
    number = 'must be a finite number greater than 0, got "fast"'
    assert dialog["wrong"] == [["field-training.learning_rate", number]]
    assert dialog["focus"] == "field-training.learning_rate"
    given = {key: rest for key, *rest in dialog["given"]}
    assert (given["parameters.width"], given["training.learning_rate"]) == (["16", "4"], ["0.5", "–"])
    assert "parameters.scale" not in given
    assert len(given) + dialog["unchanged"] > 20
    assert form["name"] == LONG
    assert {key: text.split(",")[0] for key, text in form["wrong"]} == {
        "field-name": "missing; must be a printable text of 1 to 200 characters",
        "field-training.steps": "must be an integer from 1 to 1000000000",
        "field-pipeline.devices": "must be devices of this service: cpu:0",
    }
    assert form["told"].startswith("3 values must be changed.")
    assert form["made"][0] == "by hand"
    assert "Steps0 of 9" in form["made"][1]
    assert "Devicescpu:0" in form["made"][1]
    for each in (*dialog["audits"], *form["audits"]):
        check_page(each, "forms")


def check_devices(seen: dict[str, Any]) -> None:
    # Those of runs, done and the job that failed.
    assert seen["rows"] == [["cpu:0", "runs (ann)", 3], ["cpu:1", "runs (ann)", 3]]
    assert seen["users"] == ["ann", "others"]
    assert [row[0] for row in seen["hours"]] == ["ann", "others"]
    for each in seen["audits"]:
        check_page(each, "devices")


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
    assert [line[9:] for line in runs["log"]] == HOSTILE.split("\n")  # After the time.
    assert runs["found"] == ["2 lines of 3 match", 2]
    assert failed["trace"] == f"Traceback\n{ROOT}"
    assert facts["causes"] == [f"1 job {ROOT}"]
    assert runs["marks"] == 0
    for job in (runs, done, failed):
        assert set(job["files"].values()) == {200}
        for seen in job["audits"]:
            check_page(seen, job["state"])
    assert runs["back"] == failed["back"] == "/"
