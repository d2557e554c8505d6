"""A full house: a service with 5,000 queued and 50,000 ended jobs starts, lists, finds and takes more."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from killing import serving

from asyncpipe.service.job_states import JobState
from asyncpipe.service.store.database import STORE
from asyncpipe.service.store.job_store import JobStore
from tests.campaigns.service import Row
from tests.campaigns.service._processes import ODD, held_by, job, make_odd_folder, wait_for

__all__ = ["fill", "run"]

ENDED, QUEUED = 50_000, 5_000
SUBMITTED = 200
SUBMIT_SECONDS, LIST_SECONDS, FIND_SECONDS, START_SECONDS = 0.020, 0.250, 0.500, 20.0
MEMORY = 1.0e9
STUCK = f"{ODD}:stuck_loader"
AT_ONCE = 100
"""Jobs that share a commit."""


async def fill(path: Path, ended: int, queued: int) -> None:
    """A store at ``path`` with so many jobs, as a year leaves them."""
    # No two things happen at once: jobs of one instant would be queued by their ids, and listed by their numbers.
    chance, times = random.Random(0), itertools.count(time.time() - 365 * 86400, 200.0)
    async with JobStore(path, clock=lambda: next(times)) as store:

        async def add(number: int) -> None:
            entry = STUCK if number == ended else "charlm:build"
            tags = [f"week={number // 1000}", "night"]
            record, _ = await store.add({**job(entry, 5, folder=Path()), "name": f"job {number}", "tags": tags})
            if number < ended:
                await store.transition(record.id, JobState.RUNNING, "it is its turn")
                to = chance.choices((JobState.FINISHED, JobState.FAILED, JobState.CANCELLED), (8, 1, 1))[0]
                cause = "all 5 steps are done" if to is JobState.FINISHED else "the loss of step 3 is nan"
                await store.transition(record.id, to, cause)

        for first in range(0, ended + queued, AT_ONCE):
            await asyncio.gather(*(add(number) for number in range(first, min(first + AT_ONCE, ended + queued))))


def run(folder: Path) -> list[Row]:
    """What it takes with an empty house, and with a full one."""
    one = _measured(make_odd_folder(folder / "empty"))
    make_odd_folder(folder / "full")
    asyncio.run(fill(folder / "full" / "state" / STORE, ENDED, QUEUED))
    full = _measured(folder / "full")
    rows = []
    house = f"{QUEUED:,} queued and {ENDED:,} ended jobs"
    limits = {"submit, p50": SUBMIT_SECONDS, "start": START_SECONDS}
    for what, seconds in full.items():
        if what == "memory":
            figure, held = f"{seconds / 1e6:.0f} MB, {one[what] / 1e6:.0f} MB without", seconds < MEMORY
        else:
            limit = limits.get(what, FIND_SECONDS if "text" in what or "since" in what else LIST_SECONDS)
            figure, held = f"{seconds * 1e3:.1f} ms, {one[what] * 1e3:.1f} ms without", seconds <= limit
        rows.append(Row(f"{house}: {what}", figure, held))
    return rows


def _measured(folder: Path) -> dict[str, float]:
    """Seconds of each request, and bytes."""
    begun = time.monotonic()
    options = ("--max-queued", "9000", "--max-running", "1", "--isolation", "process")
    with serving(folder, *options, is_fresh=True) as served:
        client = served.client()
        client.entries()
        found = {"start": time.monotonic() - begun}
        # Whoever is first waits for ever: nobody behind it begins, and nobody's steps disturb the figures.
        first = next(client.list(["queued", "running"], oldest_first=True, limit=1), None)
        wait_for(client, (first or client.submit(job(STUCK, 5, folder=Path())))["id"], "running")
        waiting = [
            _seconds(lambda: client.submit({**job("charlm:build", 5), "name": "more"})) for _ in range(SUBMITTED)
        ]
        found["submit, p50"] = median(waiting)
        requests: dict[str, Callable[[], Any]] = {
            "newest 100": lambda: list(client.list(limit=100)),
            "100 of a state": lambda: list(client.list(["failed"], limit=100)),
            "100 of two states": lambda: list(client.list(["finished", "failed"], limit=100)),
            "100 of a tag": lambda: list(client.list(limit=100, tags=["night"])),
            "by a text that nothing has": lambda: list(client.list(text="nowhere to be found")),
            "since a moment ago": lambda: list(client.list(limit=100, since=time.time() - 1)),
        }
        last = next(iter(client.list(limit=1)))["id"]
        requests["one by the beginning of its id"] = lambda: client.show(last[:24])
        for what, ask in requests.items():
            found[what] = median(_seconds(ask) for _ in range(7))
        found["memory"] = float(held_by(served.process.pid))
        return found


def _seconds(ask: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    ask()
    return time.perf_counter() - begun
