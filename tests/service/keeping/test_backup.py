"""A backup of a service that runs has what its jobs go on from, with the same bits, and is restored whole or not."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import stat
import tarfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import curve, newest_step, same
from manager_helpers import ENTRY, make_settings, opened, submission
from torch import Generator, Tensor, nn

from asyncpipe import cli
from asyncpipe.service.job_states import JobState
from asyncpipe.service.keeping import backup as backup_module
from asyncpipe.service.keeping.backup import BackupError, SnapshotsWanted, back_up, restore
from asyncpipe.service.store import job_records
from asyncpipe.service.store.database import StoreError, StoreProblem, open_beside
from asyncpipe.service.store.finding import number_of
from asyncpipe.service.store.job_records import LossRow
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.training_service import TrainingService
from asyncpipe.train.snapshots.format import Manifest, write_snapshot
from asyncpipe.train.workload import Workload

pytestmark = [pytest.mark.usefixtures("no_leaks")]

HELD = 10
"""The batch at which the first service waits."""


class Held:
    """Where the first service's loader waits, so that its job is in the middle when the backup is made."""

    open = threading.Event()


def batches(batch_size: int, generator: Generator) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(1000):
        assert number != HELD or Held.open.wait(30)
        x = torch.randn(batch_size, 8, generator=generator)
        yield x, x.flip(1)


def small() -> Workload:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
    return Workload(model, nn.functional.mse_loss, batches)


def service(folder: Path) -> TrainingService:
    return TrainingService(make_settings(folder), entries=Entries({ENTRY: small}), retry_seconds=0.05)


async def finished(service: TrainingService, job: str) -> None:
    states = [event.data["to"] async for event in service.follow(job) if event.kind == "state"]
    assert states[-1] == "finished", await service.get(job)


@pytest.mark.promise(
    "The service", "A backup of a running service is one consistent state; jobs resume from it bit-identically."
)
async def test_a_job_that_runs_goes_on_from_its_backup_with_the_same_bits(tmp_path):
    Held.open.clear()
    training = {"steps": 16, "batch_size": 4, "learning_rate": 0.01}
    async with service(tmp_path / "first") as first:
        record, _ = await first.submit(submission(training=training, snapshots={"every": 3, "keep": 2}))
        async for event in first.follow(record.id):
            if event.kind == "snapshot":  # Which steps have one depends on how fast the disk is.
                break
        backup = tmp_path / "backup.tar"
        done = await asyncio.to_thread(back_up, tmp_path / "first", backup)
        assert (done.jobs, done.problems) == (1, [])
        assert done.snapshots in (1, 2)
        assert stat.S_IMODE(backup.stat().st_mode) == 0o600
        assert done.size == backup.stat().st_size
        # What is submitted later is not in it.
        await first.submit(submission("later", training=training))
        Held.open.set()
        await finished(first, record.id)
    restored = await asyncio.to_thread(restore, backup, tmp_path / "second")
    assert restored == 1
    assert curve(tmp_path / "second", record.id)[-1][0] >= newest_step(tmp_path / "second", record.id) > 0
    async with service(tmp_path / "second") as second:
        assert [each.id for each in await second.list()] == [record.id]
        await finished(second, record.id)
    assert curve(tmp_path / "second", record.id) == curve(tmp_path / "first", record.id)
    assert same((tmp_path / "first", record.id), (tmp_path / "second", record.id)) > 4


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """Of a service with a job that has ended and one that waits."""
    folder = tmp_path / "service"
    async with opened(folder, max_running=1) as service:
        service.fakes.free = True
        ended = await service.submit("ended")
        await service.comes(ended.id, JobState.FINISHED)
        service.fakes.free = False
        await service.running("runs")
        await service.submit("waits")
    for path in folder.glob("jobs/*/snapshots"):
        shutil.rmtree(path)  # A fake's are empty folders.
    return folder


async def test_commands_make_and_restore_a_backup_of_a_store_that_is_in_use(folder, tmp_path, capsys):
    backup, restored = tmp_path / "backup.tar", tmp_path / "restored"
    async with JobStore(folder / "jobs.sqlite3") as store:
        assert await asyncio.to_thread(cli.main, ["service", "backup", str(backup), "--folder", str(folder)]) == 0
        before = await store.list()
    assert f"{backup}: 3 jobs, 0 snapshots" in capsys.readouterr().out
    assert cli.main(["service", "restore", str(backup), "--folder", str(restored)]) == 0
    async with JobStore(restored / "jobs.sqlite3") as store:
        assert await store.list() == before
    assert cli.main(["service", "backup", str(backup), "--folder", str(folder)]) == 2
    assert "is there already; name another file" in capsys.readouterr().err
    assert cli.main(["service", "restore", str(backup), "--folder", str(restored)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.main(["service", "backup", str(tmp_path / "no.tar"), "--folder", str(tmp_path / "nowhere")]) == 2
    assert "is not there" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.incomplete")) + list(tmp_path.glob("no.tar*"))


def a_snapshot(folder: Path, step: int) -> Path:
    path = folder / "snapshots" / f"step-{step}"
    return write_snapshot(path, {"model": {"weight": torch.ones(9)}, "optimizer": {}}, Manifest(step=step))


@pytest.mark.promise("The service", "A backup is restored whole or not at all.")
async def test_what_is_damaged_or_cut_off_is_not_restored(folder, tmp_path):
    job = next((folder / "jobs").iterdir())
    (job / "snapshots").mkdir()
    model = (a_snapshot(job, 3) / "model.pt").read_bytes()
    backup = tmp_path / "backup.tar"
    back_up(folder, backup)
    content = backup.read_bytes()
    store, snapshot = content.index(b"SQLite format 3"), content.index(model)
    wrong = {
        "no backup": [b"hello" * 1000, content[: len(content) // 2], content[:store] + bytes(len(content) - store)],
        "is damaged: .*model.pt": [content[: snapshot + 100] + b"?" + content[snapshot + 101 :]],
    }
    for problem, contents in wrong.items():
        for damaged in contents:
            backup.write_bytes(damaged)
            with pytest.raises(BackupError, match=problem):
                restore(backup, tmp_path / "restored")
    (tmp_path / "out").write_text("out")
    with tarfile.open(backup, "w") as tar:
        tar.add(tmp_path / "out", "../out")
    with pytest.raises(BackupError):
        restore(backup, tmp_path / "restored")
    assert not list(tmp_path.glob("restored*"))


async def test_what_is_missing_is_told_and_all_else_is_backed_up(folder, tmp_path):
    job, other = sorted(path for path in (folder / "jobs").iterdir())[:2]
    damaged = job / "snapshots" / "step-2"
    damaged.mkdir(parents=True)
    a_snapshot(job, 4)
    shutil.rmtree(other)
    done = back_up(folder, tmp_path / "backup.tar", SnapshotsWanted.ALL)
    assert len(done.problems) == 2
    assert any("snapshot.json cannot be read" in problem for problem in done.problems)
    assert any(f"{other} is not there" in problem for problem in done.problems)
    restore(tmp_path / "backup.tar", tmp_path / "restored")
    assert [path.name for path in (tmp_path / "restored" / "jobs" / job.name / "snapshots").iterdir()] == ["step-4"]


async def test_the_losses_of_a_backup_reach_its_newest_snapshot(folder, tmp_path, monkeypatch):
    job = sorted(path for path in (folder / "jobs").iterdir())[0]
    async with JobStore(folder / "jobs.sqlite3") as store:
        await store.write_records(job.name, [LossRow(step, 1 / step, 0.1, 0.5, 64) for step in (1, 2)], [])
        add = backup_module._add_snapshots

        def later(*arguments: Any) -> int:
            """Between the copy of the store and its snapshots, the job goes on."""
            rows = [LossRow(step, 1 / step, 0.1, 0.5, 64) for step in (3, 4, 5)]
            with closing(sqlite3.connect(folder / "jobs.sqlite3")) as live:
                job_records.write_losses(live, number_of(live, job.name), rows)
                live.commit()
            if not (job / "snapshots" / "step-4").exists():
                (job / "snapshots").mkdir()
                a_snapshot(job, 4)
            return add(*arguments)

        monkeypatch.setattr(backup_module, "_add_snapshots", later)
        await asyncio.to_thread(back_up, folder, tmp_path / "backup.tar")
    restore(tmp_path / "backup.tar", tmp_path / "restored")
    assert [step for step, *_ in curve(tmp_path / "restored", job.name)] == [1, 2, 3, 4]


@pytest.mark.promise(
    "The service", "A second service on a store is refused; a process that only reads delays no commit."
)
async def test_a_reader_beside_a_service_sees_one_state_and_delays_no_commit(tmp_path):
    path = tmp_path / "jobs.sqlite3"
    async with opened(tmp_path) as service:
        await service.submit("first")
        with open_beside(path, busy_seconds=0) as beside:
            beside.execute("BEGIN")
            count = "SELECT count(*) FROM jobs"
            assert beside.execute(count).fetchone() == (1,)
            await service.submit("second")
            assert beside.execute(count).fetchone() == (1,)
            beside.execute("ROLLBACK")
            assert beside.execute(count).fetchone() == (2,)
    with pytest.raises(StoreError) as caught, open_beside(tmp_path / "nothing"):
        pass
    assert caught.value.problem is StoreProblem.FORBIDDEN
    assert os.listdir(tmp_path / "jobs")
