"""A thousand jobs that have ended, and rules of what is kept of them, applied while another job trains."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from killing import make_folder, poll, serving

from asyncpipe.service.job_states import JobSpec, JobState
from asyncpipe.service.store.job_store import JobStore
from tests.campaigns.service import Row

JOBS = 1000
DAY = 86400.0
SECONDS = 240.0
RULES = """
[retention.jobs]
days = 60
count = 700
[retention.snapshots]
count = 300
"""


def run(folder: Path) -> list[Row]:
    """What the command says before, what the service removes then, and how long requests take meanwhile."""
    service = make_folder(folder)
    (service / "state").mkdir(mode=0o700)
    asyncio.run(_fill(service / "state"))
    config = service / "service.toml"
    config.write_text(config.read_text(encoding="utf-8") + RULES, encoding="utf-8")
    shown = _shown(service)
    wanted = {(each["job"], each["what"]) for each in shown["removals"]}
    whole = {job for job, kind in wanted if kind == "job"}
    seconds: list[float] = []
    with serving(service) as served:
        client = served.client()
        trained = client.submit(_job())["id"]
        begun = time.monotonic()

        def is_done() -> bool:
            asked = time.monotonic()
            client.show(trained)
            seconds.append(time.monotonic() - asked)
            return served.log.read_text(encoding="utf-8").count(" retention: ") >= len(wanted)

        poll("the rules are applied", is_done, 0.02, SECONDS)
        took = time.monotonic() - begun
        after = _shown(service)
        trains = client.show(trained)
        left = {job["id"] for job in client.list()} - {trained}
        names = {path.name for path in (service / "state" / "jobs").iterdir()} - {trained}
        client.cancel(trained)
        client.wait(trained, SECONDS)
        lines = served.log.read_text(encoding="utf-8").count(" retention: ")
    wrong = {
        "jobs are left that should go": left & whole,
        "other jobs are gone": JOBS - len(whole) - len(left),
        "folders are not those of the list": names ^ left,
        "more would be removed": after["removals"],
        "the job beside does not train": trains["state"] != "running" or not trains["step"],
        "the log has other lines": lines - len(wanted),
    }
    all_kinds = sorted({kind for _, kind in wanted})
    kinds = ", ".join(f"{sum(kind == each for _, kind in wanted)} {each}" for each in all_kinds)
    problems = "; ".join(what for what, found in wrong.items() if found)
    figure = (
        f"shown before: {kinds}; removed: {problems or 'the same'}, {took:.1f} s after "
        "the job was submitted; requests meanwhile: "
        f"p50 {1000 * median(seconds):.0f} ms, slowest {1000 * max(seconds):.0f} ms"
    )
    return [Row(f"rules of retention over {JOBS} ended jobs, while a job trains", figure, not problems)]


async def _fill(state: Path) -> None:
    """A store with jobs that ended in the last hundred days, and their files."""
    chance, now = Random(5), [time.time()]
    spec = JobSpec("old", "charlm:build", {"training": {"steps": 4}})
    async with JobStore(state / "jobs.sqlite3", clock=lambda: now[0]) as store:
        for number in range(JOBS):
            now[0] = time.time() - (JOBS - number) / JOBS * 100 * DAY
            record, _ = await store.add(spec)
            await store.transition(record.id, JobState.RUNNING, "it is its turn")
            await store.progress(record.id, 4, "step-4")
            end = chance.choice((JobState.FINISHED, JobState.FINISHED, JobState.FAILED, JobState.CANCELLED))
            await store.transition(record.id, end, "because")
            await asyncio.to_thread(_fill_folder, state / "jobs" / record.id, chance)


def _fill_folder(folder: Path, chance: Random) -> None:
    snapshot = folder / "snapshots" / "step-4"
    snapshot.mkdir(parents=True, mode=0o700)
    (snapshot / "model.pt").write_bytes(bytes(chance.randint(50_000, 150_000)))
    (folder / "trace.json").write_bytes(bytes(20_000))


def _shown(service: Path) -> dict[str, Any]:
    """What the command says that would be removed."""
    command = [sys.executable, "-m", "asyncpipe", "service", "retention", "--json", "--config", "service.toml"]
    done = subprocess.run(command, cwd=service, capture_output=True, text=True, timeout=SECONDS, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _job() -> dict[str, Any]:
    shape = {"width": 16, "blocks": 2, "heads": 2, "context": 16, "sample_length": 2}
    pipeline = {"devices": ["cpu:0", "cpu:1"], "microbatches": 4}
    training = {"steps": 10**6, "batch_size": 8, "learning_rate": 3e-3}
    return {"name": "new", "entry": "charlm:build", "parameters": shape, "pipeline": pipeline, "training": training}
