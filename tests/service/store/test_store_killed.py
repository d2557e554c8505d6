"""A process that is killed at any instant has lost nothing that it acknowledged.

A child process writes into a store from several coroutines and says on its standard output what it was told is done.
It is killed while it goes on; then the file must have all that was said. ``ASYNCPIPE_KILLS`` is the number of kills,
all of one store.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from store_helpers import check_history, submitted

from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.store.job_store import RECOVERED, JobStore

KILLS = int(os.environ.get("ASYNCPIPE_KILLS", "8"))
MOST_LINES = 400
MOST_SECONDS = 0.005
ROOT = Path(__file__).parents[3]

CHILD = """
import asyncio, itertools, json, os, random, sys
from asyncpipe.service.job_states import JobState, JobStateError
from asyncpipe.service.store.job_records import JobEvent, LossRow
from asyncpipe.service.store.job_store import JobStore

steps = itertools.count(1)

def say(*words):
    os.write(1, json.dumps(words).encode() + b"\\n")

async def client(store, chance, name):
    jobs = []
    while True:
        key = f"{name} {chance.getrandbits(60)}"
        document = {"name": "job", "entry": "m:f", "key": key, "x": "y" * chance.randrange(5000)}
        job = (await store.add(document, key))[0].id
        say("submitted", job, key)
        jobs.append(job)
        for _ in range(4):
            job, to = chance.choice(jobs), chance.choice(list(JobState))
            try:
                await store.transition(job, to, key)
                say("changed", job, to, key)
                if to is not JobState.RUNNING:
                    continue
                step = next(steps)
                snapshot = JobEvent(0, 0.0, "snapshot", {"step": step, "name": f"step-{step}"})
                await store.write_records(job, [LossRow(step, 0.5, 0.1, 0.1, 1)], [snapshot])
                say("progressed", job, step)
            except JobStateError:
                pass

async def main(path, seed):
    say("opening")
    async with JobStore(path) as store:
        for job in await store.recover():
            say("recovered", job.id)
        async with asyncio.TaskGroup() as clients:
            for number in range(8):
                clients.create_task(client(store, random.Random(seed * 8 + number), f"{seed}.{number}"))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def killed(path: Path, seed: int, lines: int, seconds: float) -> list[list[Any]]:
    """All that a child acknowledged, which was killed ``seconds`` after it had said ``lines`` lines."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, path, str(seed)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(lines)]
        # Nothing is waited for: without it, every kill would come at the same place, behind an answer.
        time.sleep(seconds)
        child.kill()
        said += child.stdout.readlines()
        errors = child.stderr.read().decode()
    assert child.returncode == -signal.SIGKILL, errors
    # The last line may have been cut.
    return [json.loads(line) for line in said if line.endswith(b"\n")]


async def check(path: Path, said: list[list[Any]]) -> dict[str, JobRecord]:
    """The jobs in the store at ``path``, of which all is true that was ``said``, in that order."""
    async with JobStore(path) as store:
        jobs = {job.id: job for job in await everything(store)}
        histories = {job: await store.history(job) for job in jobs}
    for job, history in histories.items():
        check_history(history)
        assert history[-1].to_state is jobs[job].state
    changed = {job: [] for job in jobs}
    progress: dict[str, int] = {}
    for what, job, *details in said:
        if what == "submitted":
            assert jobs[job].document["key"] == details[0]
        elif what == "changed":
            changed[job].append(tuple(details))
        elif what == "recovered":
            changed[job].append((JobState.QUEUED, RECOVERED))
        else:
            progress[job] = details[0]
    for job, acknowledged in changed.items():
        there = [(step.to_state, step.cause) for step in histories[job][1:]]
        rest = iter(there)
        assert all(change in rest for change in acknowledged), f"{acknowledged} is not a part, in its order, of {there}"
    for job, step in progress.items():
        # What was done last may not have been said.
        assert jobs[job].step >= step
        assert jobs[job].snapshot == f"step-{jobs[job].step}"
    return jobs


async def everything(store: JobStore) -> list[JobRecord]:
    jobs: list[JobRecord] = []
    while page := await store.list(limit=1000, after=jobs[-1].id if jobs else None):
        jobs += page
    return jobs


@pytest.mark.timeout(60 + 5 * KILLS)
@pytest.mark.skipif(sys.platform == "win32", reason="this system has no SIGKILL")
async def test_nothing_that_was_acknowledged_is_lost(tmp_path):
    path = tmp_path / "jobs.sqlite"
    chance = random.Random(6)
    said: list[list[Any]] = []
    for seed in range(KILLS):
        # The first is killed about when it makes the file.
        new = killed(path, seed, 1 if seed == 0 else chance.randrange(1, MOST_LINES), chance.uniform(0, MOST_SECONDS))
        assert new[0] == ["opening"]
        said += new[1:]
        assert integrity(path) == "ok"
    jobs = await check(path, said)
    assert len(jobs) >= sum(what == "submitted" for what, *_ in said) > 10 * (KILLS - 1)
    async with JobStore(path) as store:
        running = {job for job, record in jobs.items() if record.state is JobState.RUNNING}
        assert {job.id for job in await store.recover()} == running
        # Whoever was not told asks again, and gets the job that there is.
        job = next(iter(jobs.values()))
        key = job.document["key"]
        assert (await submitted(store, job.document, key)).id == job.id


def integrity(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])
    finally:
        connection.close()
