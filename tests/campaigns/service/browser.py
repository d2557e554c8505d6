"""The pages of a service in a real browser, with no job, one, 12 and 5,000: two widths and schemes, keys alone, axe."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

from asyncpipe.service.job_states import JobState
from asyncpipe.service.store.job_records import LossRow
from asyncpipe.service.store.job_store import JobStore
from tests.campaigns.service import Row
from tests.campaigns.service._served import JOB, TOKEN, RealService, serve

NODE = Path(__file__).parents[2] / "node"
ENDED, LIVE = {0: 0, 1: 0, 12: 8, 5000: 5000}, {0: 0, 1: 1, 12: 4, 5000: 0}
"""How many jobs have ended, and how many have not, by how many there are."""
SECONDS = 180.0
AT_ONCE = 500


def run(folder: Path) -> list[Row]:
    """A row for each number of jobs. Needs Chromium, Node.js, and what ``make node`` installs."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or not (NODE / "node_modules" / "axe-core").is_dir():
        return [Row("pages in a browser", "no chromium, or no axe-core: run make node", held=False)]
    return [_row(folder / str(count), count, chromium) for count in ENDED]


def _row(folder: Path, count: int, chromium: str) -> Row:
    (folder / "service").mkdir(parents=True, mode=0o700)
    asyncio.run(_fill(folder / "service", ENDED[count]))
    with serve(folder, "--max-running", "1") as service:
        _submit(service, LIVE[count])
        url = service.url.replace("//", f"//me:{TOKEN}@")
        command = ("node", "survey.mjs", url, chromium, str(folder / "profile"))
        done = subprocess.run(command, cwd=NODE, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return _judged(count, json.loads(done.stdout.splitlines()[-1])["facts"])


def _judged(count: int, facts: dict[str, Any]) -> Row:
    wrong = [each for audit in facts["audits"] for each in audit["violations"]]
    wide = sum(audit["scroll"] > audit["width"] for audit in facts["audits"])
    keys = facts["keys"]
    found = "" if facts["found"] < 0 else f"; a search shows what it found after {facts['found']} ms"
    figure = (
        f"{facts['rows']} rows after {facts['milliseconds']} ms, {facts['asked']} requests in 3 s{found}; axe finds "
        f"{len(wrong)} in {len(facts['audits'])} views; {wide} wider than the window; Tab reaches {keys['reached']} of "
        f"{keys['usable']}, {keys['unseen']} without a ring; {len(facts['wrong'])} errors"
    )
    for each in [*wrong, *facts["wrong"]]:
        print(f"    {each}")
    held = not wrong and not wide and not facts["wrong"] and keys["reached"] == keys["usable"] and not keys["unseen"]
    return Row(f"{count:,} jobs, at 400 and 1,280 px, light and dark", figure, held)


def _submit(service: RealService, count: int) -> None:
    """One that runs, the others wait; the last is paused."""
    training = JOB["training"] | {"steps": 100_000}
    jobs = [service.client.submit(JOB | {"name": f"number {each}", "training": training}) for each in range(count)]
    if count > 1:
        service.client.pause(jobs[-1]["id"])


async def _fill(folder: Path, count: int) -> None:
    """Jobs that have ended, some of them not well, with a curve each."""
    document = JOB | {"pipeline": JOB["pipeline"] | {"devices": ["cpu:0", "cpu:1"]}}
    async with JobStore(folder / "jobs.sqlite3") as store:
        for first in range(0, count, AT_ONCE):
            await asyncio.gather(
                *(_ended(store, folder, document, each) for each in range(first, min(first + AT_ONCE, count)))
            )


async def _ended(store: JobStore, folder: Path, document: dict[str, Any], number: int) -> None:
    named = document | {"name": f"number {number}", "tags": ["nightly"] if number % 3 == 0 else []}
    job = (await store.add(named))[0].id
    await store.transition(job, JobState.RUNNING, "it is its turn")
    steps = 60 + number % 40
    curve = [
        LossRow(step, 4 * math.exp(-step / (20 + number % 17)) + 0.1 * math.sin(step), 0.01, 0.1, 64)
        for step in range(1, steps + 1)
    ]
    await store.write_records(job, curve, [])
    end = JobState.FAILED if number % 11 == 5 else JobState.CANCELLED if number % 13 == 7 else JobState.FINISHED
    cause = f"the loss of step {steps} is not finite: nan" if end is JobState.FAILED else f"all {steps} steps are done"
    await store.transition(job, end, cause)
    place = folder / "jobs" / job
    place.mkdir(parents=True, mode=0o700)
