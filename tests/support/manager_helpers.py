"""What tests of the service's jobs share: trainings that do as they are told, step by step, without a model."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from asyncpipe.core.predict.report import Report
from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.jobs.active_jobs import ActiveJobs
from asyncpipe.service.jobs.manager import Manager
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import check_submission
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import StepProgress, TrainingSummary
from asyncpipe.train.workload import Workload

__all__ = ["ENTRY", "Fake", "Fakes", "Service", "make_settings", "opened", "submission", "until"]

ENTRY = "tests:mlp"
REPORT = Report.__new__(Report)
"""Nobody looks into it."""


def mlp(width: int = 8) -> Workload:
    """Two layers; in most tests nobody runs them."""
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 3)).double()
    return Workload(model, nn.functional.mse_loss, _no_batches)


def _no_batches(batch_size: int, generator: object) -> list[tuple[Tensor, Tensor]]:
    return []


def make_settings(folder: Path, **changed: Any) -> ServiceSettings:
    """Of a service with two devices, on threads."""
    values: dict[str, Any] = {"folder": folder, "devices": ["cpu:0", "cpu:1"], "entries": [ENTRY], "max_running": 2}
    values["isolation"] = "thread"
    return ServiceSettings(**{**values, **changed})


def submission(name: str = "job", **changed: Any) -> dict[str, Any]:
    """A small job, as a client says it."""
    return {
        "name": name,
        "entry": ENTRY,
        "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 2},
        "training": {"steps": 5, "batch_size": 4, "learning_rate": 0.05},
        **changed,
    }


@dataclass(eq=False)
class Fake:
    """A training that does a step whenever ``steps`` is released, and what ``fails`` says before a step."""

    job: Job
    progress: Any
    orders: Any
    first: int
    """The step that its snapshot was taken after."""
    fails: Callable[[Fake], BaseException | None]
    steps: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    schedules: list[str] = field(default_factory=list)
    following: list[asyncio.Task[None]] = field(default_factory=list)
    step: int = 0
    refused: BaseException | None = None
    ended: bool = False

    @property
    def share(self) -> Any:
        return self.orders.share

    @property
    def stopping(self) -> bool:
        return bool(self.orders.stopping)

    async def run(self) -> TrainingSummary:
        self.step = self.first
        unwatch = self.orders.watch(self.hear)
        self.hear()
        try:
            while self.step < self.job.training.steps and not self.stopping:
                await self.steps.acquire()
                if self.stopping:
                    break
                if (error := self.fails(self)) is not None:
                    raise error
                self.step += 1
                self.progress.stepped(told(self.step, self.job.training.steps))
                if self.job.snapshots is not None and self.step % self.job.snapshots.every == 0:
                    self.snapshot()
            if self.step > self.first:
                self.snapshot()
            last = Path(f"step-{self.step}")
            return TrainingSummary(self.job.name, self.step, self.stopping, 0.0, 0.0, 0.0, 0.0, snapshot=last)
        finally:
            self.ended = True
            unwatch()
            await asyncio.gather(*self.following)

    def snapshot(self) -> None:
        assert self.job.snapshots is not None
        path = self.job.snapshots.folder / f"step-{self.step}"
        path.mkdir(parents=True, exist_ok=True)
        self.progress.snapshot(self.step, path)

    def hear(self) -> None:
        if self.stopping:
            self.steps.release()
        if self.orders.wants_schedule:
            self.following.append(asyncio.create_task(self.orders.follow(self.follow)))

    def go(self, steps: int = 10**6) -> None:
        """Let it do so many steps."""
        for _ in range(min(steps, self.job.training.steps + 1)):
            self.steps.release()

    async def follow(self, name: str) -> None:
        await asyncio.sleep(0)
        if self.refused is not None:
            raise self.refused
        self.schedules.append(name)


def told(step: int, steps: int) -> StepProgress:
    return StepProgress(step, steps, 1 / (step + 2), 0.1, 1.0, 0.25, 4, 4, 16.0, 1.0, REPORT)


class Fakes:
    """Makes trainings, and has them by the job's name, the newest last."""

    def __init__(self) -> None:
        self.made: dict[str, list[Fake]] = defaultdict(list)
        self.snapshots: dict[str, int] = defaultdict(int)
        self.free = False
        """Whether trainings run without being told to."""
        self.fails: Callable[[Fake], BaseException | None] = lambda fake: None

    def __call__(self, job: Job, make_workload: Any, *, progress: Any, orders: Any, **_: Any) -> Fake:
        fake = Fake(job, progress, orders, self.snapshots[job.name], lambda fake: self.fails(fake))
        keep = fake.snapshot

        def snapshot() -> None:
            self.snapshots[job.name] = fake.step
            keep()

        fake.snapshot = snapshot  # type: ignore[method-assign]
        if self.free:
            fake.go()
        self.made[job.name].append(fake)
        return fake

    def __getitem__(self, name: str) -> Fake:
        return self.made[name][-1]


@dataclass
class Service:
    """A manager that is open, and what belongs to it."""

    manager: Manager
    store: JobStore
    fakes: Fakes
    entries: Entries

    @property
    def control(self) -> ActiveJobs:
        return self.manager.jobs

    async def submit(self, name: str = "job", **changed: Any) -> JobRecord:
        document = check_submission(submission(name, **changed), self.manager.settings, self.entries)
        return (await self.control.submit(document, None))[0]

    async def running(self, name: str = "job", **changed: Any) -> JobRecord:
        """A new job whose training was made."""
        record = await self.submit(name, **changed)
        before = len(self.fakes.made[name])
        await until(lambda: len(self.fakes.made[name]) > before)
        return await self.store.get(record.id)

    async def comes(self, job: str, *states: JobState) -> JobRecord:
        """The job when it is in one of ``states``."""
        while (record := await self.store.get(job)).state not in states:
            pass
        return record

    async def path(self, job: str) -> list[str]:
        return [str(step.to_state) for step in await self.store.history(job)]


@asynccontextmanager
async def opened(
    folder: Path, fakes: Fakes | None = None, options: Any = None, **changed: Any
) -> AsyncIterator[Service]:
    """A service on the running loop."""
    fakes = fakes or Fakes()
    entries = Entries({ENTRY: mlp})
    settings = make_settings(folder, **changed)
    async with JobStore(folder / "jobs.sqlite3") as store:
        manager = Manager(settings, entries, store, make_trainer=fakes, retry_seconds=0.01, **(options or {}))
        async with manager:
            yield Service(manager, store, fakes, entries)


async def until(true: Callable[[], object]) -> None:
    """Turn the loop until ``true``; a test's own time limit ends what never comes."""
    while not true():  # noqa: ASYNC110 - there is no event for everything that a test waits for
        await asyncio.sleep(0)


def tasks_named(start: str) -> list[asyncio.Task[Any]]:
    """The running tasks of this loop whose names begin with ``start``."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith(start)]
