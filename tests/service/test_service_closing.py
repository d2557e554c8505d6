"""What a service does for those who still ask while it closes; with fake trainings, on a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from manager_helpers import ENTRY, Fakes, make_settings, mlp, submission, until

from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs.job_log import Follower, JobLog, JobLogs
from asyncpipe.service.store.job_records import JobEvent
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.training_service import TrainingService

pytestmark = [pytest.mark.usefixtures("no_leaks")]


async def test_a_follower_whose_log_opens_while_the_service_closes_ends(tmp_path, monkeypatch):
    opening, closing, following = threading.Event(), threading.Event(), threading.Event()
    make_folder, close_logs, follow, close_store = Path.mkdir, JobLogs.close, JobLog.follow, JobStore.__aexit__

    def makes(folder: Path, **options: bool) -> None:  # In a thread, which the log waits for before it opens.
        opening.set()
        closing.wait(10)
        make_folder(folder, **options)

    def closes(logs: JobLogs) -> None:
        close_logs(logs)
        closing.set()

    def follows(log: JobLog, after: int) -> Follower:
        follower = follow(log, after)
        ask = follower.next

        async def told() -> list[JobEvent]:
            following.set()
            return await ask()

        follower.next = told
        return follower

    async def ends(store: JobStore, *given: object) -> None:
        await until(following.is_set)  # The follower waits before the service is closed.
        await close_store(store, *given)

    monkeypatch.setattr(JobLogs, "close", closes)
    monkeypatch.setattr(JobLog, "follow", follows)
    monkeypatch.setattr(JobStore, "__aexit__", ends)
    settings = make_settings(tmp_path)
    async with TrainingService(settings, entries=Entries({ENTRY: mlp}), make_trainer=Fakes()) as service:
        job, _ = await service.submit(submission())
        await service.pause(job.id)
        while (await service.get(job.id)).state is not JobState.PAUSED:
            pass
        await until(lambda: service.manager.logs.of(job.id) is None)
        monkeypatch.setattr(Path, "mkdir", makes)
        follower = asyncio.create_task(told_to(service, job.id))
        await until(opening.is_set)
    assert set(await follower) == {"state"}


async def told_to(service: TrainingService, job: str) -> list[str]:
    return [event.kind async for event in service.follow(job)]
