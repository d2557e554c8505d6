"""A service with very many jobs: what its clients wait for, how long it starts, what it holds.

A store with 200,000 jobs that have ended, 10,000 that are queued and 200 that run (stand-ins, which do a step a second)
is written at once, as a service would have left it; the service that opens it is another process. One in 50 of the
jobs that have ended has a folder: making 200,000 would take longer than all else. Its disk counts: a
submission is synced. ``commits`` says how many transactions a second one file takes, by how many clients there are.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import markdown
from asyncpipe.core.predict.report import Report
from asyncpipe.observe.metrics import serve_metrics
from asyncpipe.service.http import serve_api
from asyncpipe.service.job_states import JobState
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.database import STORE, open_database
from asyncpipe.service.store.job_store import JobStore, make_id
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.training_service import TrainingService
from asyncpipe.train.progress import StepProgress, TrainingSummary
from asyncpipe.train.workload import Workload

__all__ = ["run", "show"]

ENTRY = "stand:in"
DEVICES = [f"cpu:{number}" for number in range(8)]
ENDED = (JobState.FINISHED, JobState.FINISHED, JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)
TRIES = 40
SUBMITTED = 300


# The store


def document(number: int) -> dict[str, Any]:
    """Of a job of ten users and fifty names."""
    return {
        "name": f"run-{number % 50}",
        "entry": ENTRY,
        "parameters": {"width": 1024, "layers": 24, "dataset": {"name": "corpus", "split": "train"}},
        "pipeline": {"devices": DEVICES[number % 7 : number % 7 + 2], "microbatches": 8, "schedule": "1f1b"},
        "training": {"steps": 10**6, "batch_size": 32, "learning_rate": 3e-4, "warmup_steps": 100, "clip": 1.0},
        "snapshots": {"every": 10**6},
        "tags": [f"user-{number % 10}", "sweep"],
    }


@cache
def columns(number: int) -> dict[str, Any]:
    """What the store has of ``document(number)``."""
    made = document(number)
    return {"name": made["name"], "tags": json.dumps(made["tags"]), "document": json.dumps(made)}


@cache
def moves(state: JobState) -> list[str]:
    """The events by which a job came to ``state``."""
    path = [None, JobState.QUEUED, JobState.RUNNING, state][: 2 if state is JobState.QUEUED else 4]
    pairs = [(before, after) for before, after in pairwise(path) if before is not after]
    return [json.dumps({"from": before, "to": after, "cause": "as it was"}) for before, after in pairs]


def fill(folder: Path, ended: int, queued: int, running: int) -> None:
    """Write the store of ``folder``, and a folder for each job that has begun."""
    chance, begun = random.Random(1), time.time() - 90 * 86400  # noqa: S311
    states = [chance.choice(ENDED) for _ in range(ended)] + [JobState.RUNNING] * running + [JobState.QUEUED] * queued
    (folder / "jobs").mkdir(parents=True)
    with closing(open_database(folder / STORE, 5.0)) as db:
        db.execute("BEGIN")
        for number, state in enumerate(states, 1):
            at = begun + number * 30.0
            job = make_id(at)
            row = {
                "id": job,
                "entry": ENTRY,
                "priority_class": "foreground",
                "state": state,
                "cause": "submitted" if state is JobState.QUEUED else "trained 1000 steps, the last loss was 1.5",
                "submitted": at,
                "updated": at + 60,
                "attempts": int(state is not JobState.QUEUED),
                **columns(number % 350),
            }
            names = ", ".join(row)
            db.execute(f"INSERT INTO jobs ({names}) VALUES ({', '.join('?' * len(row))})", (*row.values(),))  # noqa: S608
            events = [(number, at + 20 * index, "state", data) for index, data in enumerate(moves(state))]
            db.executemany("INSERT INTO events (job, at, kind, data) VALUES (?, ?, ?, ?)", events)
            if state is not JobState.QUEUED:
                if number % 50 == 0 or state is JobState.RUNNING:  # The others' are gone with their snapshots.
                    (folder / "jobs" / job).mkdir()
                steps = [(number, step, 1.5, 3e-4, 0.1, 1024, None) for step in range(1, 6)]
                db.executemany("INSERT INTO losses VALUES (?, ?, ?, ?, ?, ?, ?)", steps)
        db.execute("COMMIT")


# The service, in a process of its own


class _StandIn:
    """Does a step a second until it is told to stop."""

    def __init__(self, job: Any, _: Any, *, progress: Any, orders: Any, **__: Any) -> None:
        self._job, self._progress, self._orders = job, progress, orders

    async def run(self) -> TrainingSummary:
        stopped, step = asyncio.Event(), 10
        unwatch = self._orders.watch(stopped.set)
        report = Report.__new__(Report)
        try:
            while not self._orders.stopping:
                step += 1
                self._progress.stepped(StepProgress(step, 10**6, 1.5, 0.1, 1.0, 0.25, 4, 4, 16.0, 1.0, report))
                stopped.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await stopped.wait()
        finally:
            unwatch()
        return TrainingSummary(self._job.name, step, True, 0.0, 0.0, 0.0, 0.0, snapshot=None)


def _workload(width: int, layers: int, dataset: dict[str, str]) -> Workload:
    return Workload(nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss, lambda *_: [])


def _serve(folder: Path, running: int, told: Any) -> None:
    async def serve() -> None:
        began = time.monotonic()
        settings = ServiceSettings(
            folder=folder, devices=DEVICES, entries=[ENTRY], port=0, max_running=running, max_queued=100_000
        )
        entries = Entries({ENTRY: _workload})
        service = TrainingService(settings, entries=entries, make_trainer=_StandIn)
        async with service, serve_api(service, settings) as url:
            from prometheus_client import CollectorRegistry

            registry = CollectorRegistry()
            registry.register(service.collector)
            with serve_metrics(registry, 0) as metrics:
                told.send((url, metrics.port, time.monotonic() - began))
                await asyncio.to_thread(told.recv)

    logging.disable()
    asyncio.run(serve())


@contextmanager
def served(folder: Path, running: int) -> Iterator[tuple[Any, str, int, float]]:
    """The process, the addresses of its API and its metrics, and the seconds that it has taken to start."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(folder, running, there))
    process.start()
    try:
        yield process, *here.recv()
    finally:
        process.kill()
        process.join()


def held(pid: int) -> tuple[float, float]:
    """MB that a process holds, and the most that it has held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    now, most = (int(found[name].split()[0]) / 1000 for name in ("VmRSS", "VmHWM"))
    return now, most


# What is measured


def timed(call: Callable[[], Any], tries: int = TRIES) -> dict[str, float]:
    """The median and the slowest of some calls, in ms."""
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1000)
    return {"p50": statistics.median(times), "p99": sorted(times)[int(0.99 * (len(times) - 1))], "most": max(times)}


LISTS: dict[str, dict[str, Any]] = {
    "the first page": {},
    "the first page, oldest first": {"order": "oldest"},
    "a page of 1,000": {"limit": 1000},
    "queued": {"state": "queued"},
    "running": {"state": "running"},
    "finished": {"state": "finished"},
    "failed or cancelled": {"state": ["failed", "cancelled"]},
    "by entry": {"entry": ENTRY},
    "by tag": {"tag": "user-3"},
    "by a tag that none has": {"tag": "nobody"},
    "by text": {"text": "RUN-7"},
    "by a text that none has": {"text": "nowhere"},
    "failed, by text": {"state": "failed", "text": "run-7"},
    "changed lately": {"since": time.time() - 3600},
}


def run(progress: Progress, ended: int = 200_000, queued: int = 10_000, running: int = 200) -> Figures:
    """Rows of figures, each in ms if nothing else is said."""
    folder = Path(tempfile.mkdtemp(prefix="asyncpipe-many-jobs-"))
    try:
        progress(f"a store with {ended + queued + running:,} jobs")
        began = time.perf_counter()
        fill(folder, ended, queued, running)
        written = time.perf_counter() - began
        progress(f"written in {written:.0f} s; the service starts")
        size = (folder / STORE).stat().st_size / 1e6
        with served(folder, running) as (process, url, metrics, seconds):
            rows = list(_measured(progress, url.rstrip("/"), metrics, process.pid, running))
        rows[:0] = [{"what": "the store, MB", "p50": size}, {"what": "the start, s", "p50": seconds}]
        return {"rows": rows, "commits": list(_commits(folder / "commits"))}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measured(progress: Progress, url: str, metrics: int, pid: int, running: int) -> Iterator[dict[str, Any]]:
    with httpx.Client(base_url=url, timeout=60) as client:

        def get(path: str, **query: Any) -> dict[str, Any]:
            answer = client.get(f"{path}?{urlencode(query, doseq=True)}")
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
            return found

        while get("/v1/counts")["states"]["running"] < running:
            time.sleep(0.2)
        yield {
            "what": "memory, MB, now and most, after the start",
            **dict(zip(("p50", "most"), held(pid), strict=True)),
        }
        progress("lists")
        for what, query in LISTS.items():
            yield {"what": f"list, {what}", **timed(partial(get, "/v1/jobs", **query), 10)}
        deep = get("/v1/jobs", limit=1000, order="oldest")["jobs"]
        for _ in range(100):
            deep = get("/v1/jobs", limit=1000, order="oldest", after=deep[-1]["id"])["jobs"] or deep
        yield {"what": "list, a page behind 100,000 jobs", **timed(lambda: get("/v1/jobs", after=deep[-1]["id"]))}
        yield {"what": "counts", **timed(lambda: get("/v1/counts"))}
        one = get("/v1/jobs", state="queued")["jobs"][0]["id"]
        yield {"what": "a queued job", **timed(lambda: get(f"/v1/jobs/{one}"))}
        yield {"what": "scrape of the metrics", **timed(lambda: httpx.get(f"http://127.0.0.1:{metrics}/metrics"), 5)}
        progress("submissions")
        numbers = iter(range(10**9))

        def submit() -> None:
            client.post("/v1/jobs", json=document(next(numbers))).raise_for_status()

        yield {"what": "submit, one client", **timed(submit, SUBMITTED)}
        yield {"what": "submit, 8 clients", **_together(url, 8)}
        progress("decisions and events")
        yield {"what": "cancel of a running job until another begins", **_replaced(get, client)}
        yield {"what": "cancel of a queued job until a stream says so", **_streamed(get, client)}
        yield {"what": "memory, MB, now and most, at the end", **dict(zip(("p50", "most"), held(pid), strict=True))}


def _together(url: str, clients: int) -> dict[str, float]:
    def submit(first: int) -> list[float]:
        with httpx.Client(base_url=url, timeout=60) as client:
            times = []
            for number in range(first, first + 50):
                began = time.perf_counter()
                client.post("/v1/jobs", json=document(number)).raise_for_status()
                times.append((time.perf_counter() - began) * 1000)
            return times

    with ThreadPoolExecutor(clients) as pool:
        times = sorted(chain.from_iterable(pool.map(submit, range(0, 1000 * clients, 1000))))
    return {"p50": statistics.median(times), "p99": times[int(0.99 * (len(times) - 1))], "most": times[-1]}


def _replaced(get: Callable[..., dict[str, Any]], client: httpx.Client) -> dict[str, float]:
    """Between the two transitions, by the store's clock."""
    times = []
    for _ in range(10):
        before = {each["id"] for each in get("/v1/jobs", state="running", limit=1000)["jobs"]}
        gone = next(iter(before))
        client.post(f"/v1/jobs/{gone}/cancel").raise_for_status()
        while not (new := {each["id"] for each in get("/v1/jobs", state="running", limit=1000)["jobs"]} - before):
            time.sleep(0.01)
        ended, begun = (get(f"/v1/jobs/{job}/history")["transitions"][-1]["at"] for job in (gone, new.pop()))
        times.append((begun - ended) * 1000)
    return {"p50": statistics.median(times), "most": max(times)}


def _streamed(get: Callable[..., dict[str, Any]], client: httpx.Client) -> dict[str, float]:
    times = []
    for job in [each["id"] for each in get("/v1/jobs", state="queued", limit=20)["jobs"]]:
        with httpx.stream("GET", f"{client.base_url}/v1/jobs/{job}/events", timeout=60) as stream:
            lines = stream.iter_lines()
            while "queued" not in next(lines):
                pass
            began = time.perf_counter()
            client.post(f"/v1/jobs/{job}/cancel").raise_for_status()
            while "cancelled" not in next(lines):
                pass
            times.append((time.perf_counter() - began) * 1000)
    return {"p50": statistics.median(times), "most": max(times)}


def _commits(folder: Path) -> Iterator[dict[str, Any]]:
    """Submissions and commits a second, by how many coroutines submit at once."""

    async def submitted(clients: int, seconds: float = 4.0) -> tuple[float, float]:
        async with JobStore(folder / f"{clients}.sqlite3") as store:
            until, done = time.perf_counter() + seconds, 0

            async def submit() -> None:
                nonlocal done
                while time.perf_counter() < until:
                    await store.add(document(done))
                    done += 1

            await asyncio.gather(*(submit() for _ in range(clients)))
            return done / seconds, store.commits / seconds

    folder.mkdir()
    for clients in (1, 8, 64):
        added, commits = asyncio.run(submitted(clients))
        yield {"clients": clients, "submissions a second": added, "commits a second": commits}


show = markdown(
    rows="Times in ms, if nothing else is said", commits="Transactions of one store, by clients that submit at once"
)
"""Two tables."""
