"""Many clients at once, who submit, pause, resume and cancel at random: every history is legal, and nothing is left.

A real service, real HTTP, real trainings of a few steps, in rounds; after each round all jobs are at their ends, and
memory, threads and file descriptors are counted. ``ASYNCPIPE_JOBS`` is the number of jobs. With ``ASYNCPIPE_TRACED``,
what Python has allocated is counted, and shown by lines, in the place of the memory of the process: tracing takes much.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from killing import curve
from manager_helpers import ENTRY, make_settings, submission, until
from torch import Generator, Tensor, nn

pytest.importorskip("fastapi", reason="the API needs FastAPI: pip install -e '.[service]'")

from store_helpers import check_history

from asyncpipe.service.client import ApiError, JobClient
from asyncpipe.service.http import serve_api
from asyncpipe.service.job_states import JobState, Transition
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.training_service import TrainingService
from asyncpipe.train.workload import Workload
from tests.campaigns.soak.samples import POOLS

JOBS = int(os.environ.get("ASYNCPIPE_JOBS", "40"))
CLIENTS = 8 if JOBS < 100 else 20
ROUNDS = 5 if JOBS < 1000 else 10
SEED = 6
IS_TRACED = "ASYNCPIPE_TRACED" in os.environ
MOST_BYTES_A_JOB = 8 * 1024
"""That Python may have allocated more after the last round than after the first ones: noise, not a job's tensors."""
MOST_RSS = 16 * 1024 * 1024
FINAL = ("finished", "failed", "cancelled")
STATUS = Path("/proc/self/status")


def batches(batch_size: int, generator: Generator) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        x = torch.randn(batch_size, 3, generator=generator)
        yield x, x.flip(1)


def tiny(width: int = 8) -> Workload:
    """Two layers."""
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 3))
    return Workload(model, nn.functional.mse_loss, batches, memoryless=True)


@dataclass(frozen=True)
class Counted:
    """What there is when nothing is to do."""

    threads: int
    descriptors: int
    tensors: int
    resident: int
    allocated: int

    @classmethod
    def now(cls) -> Counted:
        """Counts, after the collector has been."""
        gc.collect()
        resident = 0
        if STATUS.exists():
            line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS"))
            resident = int(line.split()[1]) * 1024
        descriptors = len(os.listdir("/proc/self/fd")) if STATUS.exists() else 0
        tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
        allocated = tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0
        # A loop's own helpers are few, and started when they are first needed.
        threads = sum(not thread.name.startswith(POOLS) for thread in threading.enumerate())
        return cls(threads, descriptors, tensors, resident, allocated)


class Client:
    """One client, in a thread; what it was answered is in ``told``."""

    def __init__(self, url: str, seed: int, everybody: list[str]) -> None:
        self._client = JobClient(url)
        self._chance = Random(seed)
        self._everybody = everybody
        self._seed = seed
        self.mine: list[str] = []
        self.told: Counter[tuple[str, str, str]] = Counter()
        """How often (job, what was asked, state that was answered)."""
        self.refused = 0

    def round(self, jobs: int) -> None:
        """Submit so many jobs, do this and that, and see one's own to their ends."""
        mine = [self._submit() for _ in range(jobs)]
        for _ in range(4 * jobs):
            everybody = list(self._everybody)
            self._do(self._chance.choice(mine if self._chance.random() < 0.7 else everybody[-200:]))
        for job in mine:
            self._see_to_its_end(job)
        self.mine += mine

    def _submit(self) -> str:
        chance = self._chance
        pipeline = {"devices": ["cpu:0", "cpu:1"], "microbatches": 2, "schedule": chance.choice(["gpipe", "1f1b"])}
        training = {"steps": chance.randint(1, 6), "batch_size": 4, "learning_rate": 0.05, "seed": self._seed}
        asked = submission(
            f"job-{self._seed}-{len(self.mine)}",
            pipeline=pipeline,
            training=training,
            snapshots={"every": 2, "keep": 1},
            priority_class=chance.choice(["foreground", "foreground", "background"]),
            weight=chance.choice([1.0, 3.0]),
        )
        key = f"{self._seed} {chance.getrandbits(60)}"
        job: str = self._client.submit(asked, key)["id"]
        if chance.random() < 0.2:
            assert self._client.submit(asked, key)["id"] == job, "the same key is the same job"
        self._everybody.append(job)
        return job

    def _do(self, job: str) -> None:
        what = self._chance.choice(("pause", "pause", "resume", "resume", "cancel", "show", "schedule", "losses"))
        try:
            if what == "schedule":
                self._client.change_schedule(job, self._chance.choice(["gpipe", "1f1b"]))
            elif what == "losses":
                list(self._client.losses(job))
            else:
                found = getattr(self._client, what)(job)
                self.told[job, what, found["state"]] += 1
        except ApiError as error:
            self._refused(error)

    def _see_to_its_end(self, job: str) -> None:
        for event in self._client.events(job):
            if event.kind == "state" and event.data["to"] == "paused":
                try:
                    state = self._client.resume(job)["state"]
                    self.told[job, "resume", state] += 1
                except ApiError as error:
                    self._refused(error)
        assert self._client.show(job)["state"] in FINAL

    def _refused(self, error: ApiError) -> None:
        """The job was in another state by then, which is the only reason there may be."""
        if error.status != 409:
            raise error
        self.refused += 1


async def finished(service: TrainingService) -> None:
    """When nothing of any job is left in the service.

    Reads private tables: one that keeps an entry for every job shows nowhere else before weeks have passed.
    """
    manager = service.manager
    await until(lambda: not manager._runs and not manager.logs._open)
    assert not len(manager.jobs.queue)
    assert not manager.jobs.running
    assert not manager.jobs._turns
    assert not manager.logs._users
    assert not manager.logs._turns
    driver = manager.pool.driver
    assert not driver.scheduler._steps
    assert not driver._under_way
    assert not driver._inbox
    for name, executor in driver._executors.items():
        assert not executor.running, f"{name} is still at something"


def check(clients: list[Client], path: Path, histories: dict[str, tuple[Transition, ...]]) -> Counter[str]:
    """That every history is legal and has what was acknowledged; returns how the jobs ended."""
    ended: Counter[str] = Counter()
    told = sum((each.told for each in clients), Counter[Any]())
    for client in clients:
        for job in client.mine:
            history = histories[job]
            check_history(history)
            states = [step.to_state for step in history]
            pairs = Counter(pairwise(states))
            paused, queued, cancelled = (told[job, *key] for key in ANSWERS)
            assert pairs[JobState.QUEUED, JobState.PAUSED] == paused
            assert pairs[JobState.PAUSED, JobState.QUEUED] == queued
            if cancelled or told[job, "cancel", "running"]:
                assert states[-1] in (JobState.CANCELLED, JobState.FINISHED)
            assert states[-1] is JobState.CANCELLED or not cancelled
            ended[states[-1]] += 1
            if states[-1] is JobState.FINISHED:
                steps = [step for step, *_ in curve(path, job)]
                assert steps == list(range(1, len(steps) + 1))
                assert steps
    return ended


ANSWERS = (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled"))


def check_flat(counts: list[Counted]) -> None:
    """That there is no more behind the last round than behind the ones after which all is warm."""
    warm = counts[len(counts) // 3 :]
    assert len({each.threads for each in warm}) == 1, counts
    assert len({each.tensors for each in warm}) == 1, counts
    assert warm[-1].descriptors <= warm[0].descriptors, counts
    assert IS_TRACED or warm[-1].resident - warm[0].resident < MOST_RSS, [each.resident for each in counts]
    jobs = JOBS * len(warm) // len(counts)
    assert warm[-1].allocated - warm[0].allocated < MOST_BYTES_A_JOB * jobs, counts


@pytest.fixture
def quiet() -> Iterator[None]:
    """Nobody keeps lines of the log: the tests' own handler would keep all of them."""
    logging.disable(logging.ERROR)
    if IS_TRACED:
        tracemalloc.start()
    yield
    tracemalloc.stop()
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(60 + 2 * JOBS)
@pytest.mark.usefixtures("no_leaks", "quiet")
async def test_jobs_of_many_clients(tmp_path, capsys):
    settings = make_settings(tmp_path, port=0, max_running=4)
    everybody: list[str] = []
    counts: list[Counted] = []
    allocated: list[tracemalloc.Snapshot] = []
    loop = asyncio.get_running_loop()
    async with TrainingService(settings, entries=Entries({ENTRY: tiny})) as service:
        with ThreadPoolExecutor(CLIENTS) as threads:
            async with serve_api(service, settings) as url:
                clients = [Client(url, seed, everybody) for seed in range(SEED, SEED + CLIENTS)]
                for _ in range(ROUNDS):
                    per = JOBS // ROUNDS // CLIENTS
                    await asyncio.gather(*(loop.run_in_executor(threads, each.round, per) for each in clients))
                    await finished(service)
                    counts.append(Counted.now())
                    if IS_TRACED and len(counts) in (ROUNDS // 3 + 1, ROUNDS):
                        allocated.append(tracemalloc.take_snapshot())
        histories = {job: await service.history(job) for job in everybody}
    ended = check(clients, tmp_path, histories)
    assert sum(ended.values()) == JOBS // ROUNDS // CLIENTS * ROUNDS * CLIENTS
    assert ended["finished"]
    assert ended["cancelled"]
    check_flat(counts)
    with capsys.disabled():
        told = sum((each.told for each in clients), Counter[Any]())
        refused = sum(each.refused for each in clients)
        print(f"\n{dict(ended)}; {sum(told.values())} requests done, {refused} refused; before and after:")
        print(f"  {counts[0]}\n  {counts[len(counts) // 3]}\n  {counts[-1]}")
        if IS_TRACED:
            for difference in allocated[1].compare_to(allocated[0], "lineno")[:8]:
                print(f"  {difference}")
