"""Where one half of a service's state is gone, it says so: it neither begins jobs anew nor shows an empty list."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from manager_helpers import ENTRY, Fakes, make_settings, mlp, submission, until

from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs.lost_state import LostStateError
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.training_service import TrainingService

pytestmark = [pytest.mark.usefixtures("no_leaks")]

JOB = submission(snapshots={"every": 2})


@asynccontextmanager
async def service(folder: Path, **changed: object) -> AsyncIterator[tuple[TrainingService, Fakes]]:
    fakes = Fakes()
    settings = make_settings(folder, **{"max_running": 1, **changed})
    async with TrainingService(settings, entries=Entries({ENTRY: mlp}), make_trainer=fakes) as opened:
        yield opened, fakes


@pytest.fixture
async def jobs(tmp_path: Path) -> list[str]:
    """Ids of a job that has a snapshot and runs, and one that waits."""
    async with service(tmp_path) as (opened, fakes):
        running = await opened.submit(JOB)
        await until(lambda: fakes.made["job"])
        fakes["job"].go(3)
        while (await opened.get(running[0].id)).snapshot is None:
            pass
        waiting = await opened.submit(JOB)
    return [running[0].id, waiting[0].id]


def lose(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def there(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if not path.name.endswith(".lock"))


async def refused(folder: Path) -> str:
    before = there(folder)
    with pytest.raises(LostStateError) as caught:
        async with service(folder):
            pass
    # Nor is anything made in its place, but for the lock of the store.
    assert there(folder) == before
    return str(caught.value)


@pytest.mark.promise(
    "The service",
    "A service whose store or job folders are missing or outdated refuses to start and names the problem.",
)
async def test_a_store_that_is_gone_or_empty_is_not_begun_anew_beside_folders_of_jobs(tmp_path, jobs):
    store = tmp_path / "jobs.sqlite3"
    content = store.read_bytes()
    store.write_bytes(b"")
    assert f"is empty, and {tmp_path / 'jobs'} has the folder of a job ({jobs[0]})" in await refused(tmp_path)
    lose(store)
    assert "is gone, and" in await refused(tmp_path)
    (tmp_path / "jobs.sqlite3-wal").write_bytes(b"what was committed last")
    assert "jobs.sqlite3-wal is there" in await refused(tmp_path)
    lose(tmp_path / "jobs.sqlite3-wal")
    store.write_bytes(content)
    async with service(tmp_path) as (opened, _):
        assert [job.id for job in await opened.list()] == jobs[::-1]


@pytest.mark.promise(
    "The service",
    "A service whose store or job folders are missing or outdated refuses to start and names the problem.",
)
async def test_a_store_that_is_older_than_its_folders_is_refused(tmp_path, jobs):
    (tmp_path / "jobs" / jobs[1][::-1]).mkdir()
    problem = await refused(tmp_path)
    assert f"has the folder of a job ({jobs[1][::-1]}) that the store does not know" in problem
    assert 'If it is gone for good, start with lost_state = "quarantine"' in problem
    async with service(tmp_path, lost_state="quarantine") as (opened, _):
        assert [job.id for job in await opened.list()] == jobs[::-1]


@pytest.mark.promise(
    "The service",
    "A service whose store or job folders are missing or outdated refuses to start and names the problem.",
)
@pytest.mark.parametrize("how", ["gone", "empty"])
async def test_folders_that_are_all_gone_are_a_disk_that_is_not_mounted(tmp_path, jobs, how):
    lose(tmp_path / "jobs")
    if how == "empty":
        (tmp_path / "jobs").mkdir()
    problem = await refused(tmp_path)
    assert f"the store has 1 jobs with snapshots, and {tmp_path / 'jobs'} is {how}; mount its disk" in problem
    async with service(tmp_path, lost_state="quarantine") as (opened, _):
        other, lost = await opened.list()
        assert lost.state is JobState.QUARANTINED
        assert other.state is not JobState.QUARANTINED


@pytest.mark.promise("The service", "A job whose snapshots are missing starts from scratch only if you ask for it.")
async def test_a_job_whose_snapshots_are_gone_is_quarantined_and_others_go_on(tmp_path, jobs):
    lose(tmp_path / "jobs" / jobs[0] / "snapshots")
    async with service(tmp_path) as (opened, fakes):
        await until(lambda: fakes.made["job"])
        other, lost = await opened.list()
        assert lost.state is JobState.QUARANTINED
        assert lost.cause == (
            f"its snapshots are lost: the last was step-3, and {tmp_path / 'jobs' / jobs[0] / 'snapshots'} is gone; "
            "it is not begun anew by itself"
        )
        assert other.state is JobState.RUNNING
        # The same is looked at again before each run.
        fakes["job"].go(3)
        while (await opened.get(other.id)).snapshot is None:
            pass
        await opened.pause(other.id)
        while (await opened.get(other.id)).state is not JobState.PAUSED:
            pass
        lose(tmp_path / "jobs" / jobs[1])
        await opened.resume(other.id)
        while (await opened.get(other.id)).state is not JobState.QUARANTINED:
            pass
        assert len(fakes.made["job"]) == 1


async def test_what_a_job_can_do_without_is_said_when_it_goes_on(tmp_path, jobs):
    folder = tmp_path / "jobs" / jobs[0]
    snapshots = sorted((folder / "snapshots").iterdir())
    snapshots[-1].rename(folder / "snapshots" / "step-1")
    lose(*snapshots[:-1])
    async with service(tmp_path) as (opened, fakes):
        await until(lambda: fakes.made["job"])
        began = (await opened.history(jobs[0]))[-1]
        assert "its snapshot step-3 is gone, so it goes on from step-1" in began.cause


@pytest.mark.promise("The service", "A store that lacks its last commits is reported in the log and by `/readyz`.")
@pytest.mark.parametrize("cut", [False, True])
async def test_a_store_without_its_last_commits_is_told_from_the_audit(tmp_path, caplog, cut):
    async with service(tmp_path, max_running=1) as (opened, _):
        known = [(await opened.submit(submission()))[0].id for _ in range(8)]
        await opened.pause(known[-1])
        # The file as a kill leaves it: the commits are in the write-ahead log.
        for name in ("jobs.sqlite3", "jobs.sqlite3-wal"):
            (tmp_path / f"{name}.killed").write_bytes((tmp_path / name).read_bytes())
    wal = (tmp_path / "jobs.sqlite3-wal.killed").read_bytes()
    (tmp_path / "jobs.sqlite3-wal.killed").write_bytes(wal[: len(wal) // 2] if cut else wal)
    for name in ("jobs.sqlite3", "jobs.sqlite3-wal"):
        (tmp_path / f"{name}.killed").rename(tmp_path / name)
    lines = [json.dumps({"status": 201, "job": job}) for job in known] + ['{"status": 201, "job"']
    (tmp_path / "audit.jsonl").write_text("\n".join(lines))
    async with service(tmp_path, max_running=1) as (opened, _):
        left = len(await opened.list())
        assert (left < 8) == cut
        lost = f"the audit has 8 submitted jobs, and the store only {left}: what it committed last is lost"
        assert opened.status().reason == (f"takes jobs; {lost}" if cut else "takes jobs")
    assert (lost in caplog.text) == cut
