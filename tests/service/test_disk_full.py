"""A disk that is full is trouble that jobs are told of, never a torn snapshot, and training goes on meanwhile.

Where a file system can be mounted, the service's folder is on a small one of its own that is really full; elsewhere
snapshots fail as on one.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
from manager_helpers import ENTRY, make_settings, submission, until
from torch import Generator, Tensor, nn

from asyncpipe.service.job_states import JobState, JobStateError
from asyncpipe.service.store import database, database_thread
from asyncpipe.service.store.database import open_beside
from asyncpipe.service.store.job_records import JobEvent
from asyncpipe.service.store.job_store import JobStore, StoreError, StoreProblem
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import check_submission
from asyncpipe.service.training_service import TrainingService
from asyncpipe.train.snapshots import writer
from asyncpipe.train.snapshots.format import read_snapshot
from asyncpipe.train.snapshots.resume import snapshots_in
from asyncpipe.train.workload import Workload

pytestmark = [pytest.mark.usefixtures("no_leaks")]

DISK = "12m"
ENDLESS = 10**9


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a small disk of its own."""
    mount = shutil.which("mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = [str(mount), "-t", "tmpfs", "-o", f"size={DISK},mode=700", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("as this user, no small file system can be mounted; run as root where mount(8) is allowed")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


class Ballast:
    """What takes all room that is left."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ballast"

    def load(self) -> None:
        """Fill the disk."""
        with self._path.open("ab", buffering=0) as file:
            try:
                while True:
                    os.write(file.fileno(), bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def drop(self) -> None:
        """Make room."""
        self._path.unlink()


def batches(batch_size: int, generator: Generator) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        x = torch.randn(batch_size, 32, generator=generator)
        yield x, x.flip(1)


class Gate(nn.Module):
    """Waits in every step until it was opened once."""

    opened = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        assert self.opened.wait(30)
        return x


LARGE = ["x" * 4096] * 15
"""More than a snapshot gives back that had some room, and fails."""


def wide(gated: bool = False, comments: Sequence[str] = ()) -> Workload:
    """Two layers, whose snapshots take more than the last page of a file."""
    model = nn.Sequential(nn.Linear(32, 32), Gate() if gated else nn.Dropout(0.2), nn.Linear(32, 32))
    return Workload(model, nn.functional.mse_loss, batches, memoryless=True)


def service(folder: Path) -> TrainingService:
    return TrainingService(make_settings(folder), entries=Entries({ENTRY: wide}), retry_seconds=0.05)


def job(steps: int, **changed: Any) -> dict[str, Any]:
    training = {"steps": steps, "batch_size": 4, "learning_rate": 0.01}
    return submission(training=training, snapshots={"every": 3, "keep": 2}, **changed)


async def first(events: AsyncIterator[JobEvent], true: Callable[[JobEvent], object]) -> JobEvent:
    """The next event of which ``true`` is."""
    async for event in events:
        if true(event):
            return event
    raise AssertionError("the events ended before that")


def failed(event: JobEvent) -> bool:
    return event.kind == "note" and str(event.data["text"]).startswith("no snapshot of step")


def is_snapshot(event: JobEvent) -> bool:
    return event.kind == "snapshot"


def check_snapshots(folder: Path) -> list[int]:
    """That nothing else than whole snapshots is there; their steps."""
    assert not list(folder.glob("*.incomplete"))
    return [read_snapshot(path).step for path in snapshots_in(folder)]


async def test_training_goes_on_while_the_disk_is_full(disk):
    ballast = Ballast(disk)
    async with service(disk) as opened:
        record, _ = await opened.submit(job(ENDLESS))
        events = opened.follow(record.id)
        await first(events, is_snapshot)
        ballast.load()
        note = await first(events, failed)
        assert "No space left on device" in str(note.data["text"])
        step = (await first(events, lambda event: event.kind == "step")).data["step"]
        await first(events, lambda event: event.kind == "step" and event.data["step"] > step + 20)
        await first(events, failed)
        assert await opened.get(record.id) is not None, "it can be read"
        ballast.load()  # What the snapshot has given back that was begun before the disk was full.
        with pytest.raises(StoreError) as refused:
            await opened.submit(job(3, parameters={"comments": LARGE}))
        assert refused.value.problem is StoreProblem.FULL
        status = opened.status()
        assert (status.ready, status.live) == (False, True)
        assert status.reason.startswith("takes no jobs: its store has no room on its disk")
        assert len(await opened.list()) == 1, "nothing is there of what was refused"
        ballast.drop()
        found = await first(events, is_snapshot)
        asked = await opened.pause(record.id)
        assert JobState.PAUSED in (asked.state, asked.asked)
        await first(events, lambda event: event.kind == "state" and event.data["to"] == "paused")
        await events.aclose()
        there = await opened.get(record.id)
        assert there.step > found.data["step"]
        steps = [row.step for row in await opened.losses(record.id, limit=10_000)]
        assert steps == list(range(1, there.step + 1)), "those are there, too, for which there was no room"
        await opened.cancel(record.id)
        again = [event async for event in opened.follow(record.id)]
        assert any(map(failed, again)), "what could not be written down then was written later"
        states = [event.id for event in again if event.kind == "state"]
        assert states == [each.sequence for each in await opened.history(record.id)]
    folder = disk / "jobs" / record.id / "snapshots"
    assert check_snapshots(folder)[-1] == there.step
    assert all(path.stat().st_size < sum(map(len, LARGE)) for path in folder.rglob("*") if path.is_file())


async def test_a_job_that_ends_while_the_disk_is_full_goes_back_when_there_is_room(disk):
    Gate.opened.clear()
    ballast = Ballast(disk)
    async with service(disk) as opened:
        record, _ = await opened.submit(job(2, parameters={"gated": True}))
        events = opened.follow(record.id)
        await first(events, lambda event: event.kind == "state" and event.data["to"] == "running")
        ballast.load()
        Gate.opened.set()
        await first(events, failed)
        with pytest.raises(StoreError):
            await opened.amend(record.id, tags=["x"])
        assert (await opened.get(record.id)).state is JobState.RUNNING
        ballast.drop()
        states = [event.data["to"] async for event in events if event.kind == "state"]
        assert states == ["queued", "running", "finished"]
        assert (await opened.get(record.id)).state is JobState.FINISHED
        assert [row.step for row in await opened.losses(record.id)] == [1, 2]
    assert check_snapshots(disk / "jobs" / record.id / "snapshots") == [2]


class FullStore:
    """Refuses what the store would write, as SQLite does on a full disk: for users who cannot mount one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        disk = self

        class Connection(database.OwnConnection):
            def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
                disk.check(sql)
                return super().execute(sql, *arguments)

            def executemany(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
                disk.check(sql)
                return super().executemany(sql, *arguments)

        def temporary_file(**options: Any) -> Any:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return TemporaryFile(**options)

        monkeypatch.setattr(database, "OwnConnection", Connection)
        monkeypatch.setattr(database_thread, "TemporaryFile", temporary_file)

    def check(self, sql: str) -> None:
        if self.is_full and sql.startswith(("INSERT", "UPDATE", "DELETE", "PRAGMA locking_mode = NORMAL")):
            error = sqlite3.OperationalError("no room")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE if "PRAGMA" in sql else sqlite3.SQLITE_FULL
            raise error

    def load(self) -> None:
        self.is_full = True

    def drop(self) -> None:
        self.is_full = False


@pytest.fixture(params=["a full disk", "as on one"])
def full(request: pytest.FixtureRequest) -> tuple[Path, Ballast | FullStore]:
    """The folder of a service, and what takes all room."""
    if request.param == "a full disk":
        folder = request.getfixturevalue("disk")
        return folder, Ballast(folder)
    return request.getfixturevalue("tmp_path") / "service", FullStore(request.getfixturevalue("monkeypatch"))


async def fill(service: TrainingService, ballast: Ballast | FullStore) -> None:
    """Return when the service has found that there is no room, not even where files have some of their own."""
    ballast.load()
    while service.status().ready:
        with suppress(StoreError):
            await service.submit(job(3, parameters={"comments": LARGE}))
        ballast.load()


@pytest.mark.promise(
    "The service", "On a full disk a service starts, answers, and keeps pauses and cancellations until there is room."
)
async def test_pause_and_cancel_work_while_the_store_has_no_room_and_are_saved_when_it_has(full):
    folder, ballast = full
    Gate.opened.clear()
    async with service(folder) as opened:
        gated = job(2, parameters={"gated": True})
        running = [(await opened.submit(gated))[0].id for _ in range(2)]
        queued = [(await opened.submit(gated))[0].id for _ in range(3)]
        await until(lambda: opened.status().running == 2)
        await fill(opened, ballast)
        for jobs in (running, queued):
            assert (await opened.pause(jobs[0])).asked is JobState.PAUSED
            assert (await opened.cancel(jobs[1])).asked is JobState.CANCELLED
            assert [(await opened.get(each)).asked for each in jobs[:2]] == ["paused", "cancelled"]
        with pytest.raises(JobStateError):
            await opened.pause(running[1])
        assert not opened.status().ready
        Gate.opened.set()
        ballast.drop()
        await until(lambda: opened.status().ready)
        for jobs in (running, queued):
            for each, state in zip(jobs, ("paused", "cancelled"), strict=False):
                while (await opened.get(each)).state != state:
                    pass
        assert [event.data["to"] async for event in opened.follow(queued[2]) if event.kind == "state"][-1] == "finished"


@pytest.mark.promise(
    "The service", "On a full disk a service starts, answers, and keeps pauses and cancellations until there is room."
)
async def test_a_service_starts_on_a_full_disk_shows_its_jobs_and_goes_on_when_there_is_room(full):
    folder, ballast = full
    document = check_submission(job(2), make_settings(folder), Entries({ENTRY: wide}))
    async with JobStore(folder / "jobs.sqlite3") as store:
        record, _ = await store.add(document)  # And then the service was killed.
        await store.transition(record.id, JobState.RUNNING, "it is its turn")
    ballast.load()
    async with service(folder) as opened:
        status = opened.status()
        assert (status.ready, status.live) == (False, True)
        assert status.reason.startswith("takes no jobs: its store has no room on its disk")
        assert [each.id for each in await opened.list()] == [record.id]
        assert [each.to_state for each in await opened.history(record.id)][-1] is JobState.RUNNING
        with pytest.raises(StoreError) as refused:
            await opened.submit(job(3, parameters={"comments": LARGE}))
        assert refused.value.problem is StoreProblem.FULL
        ballast.drop()
        await until(lambda: opened.status().ready)
        states = [event.data["to"] async for event in opened.follow(record.id) if event.kind == "state"]
        assert states == ["queued", "running", "queued", "running", "finished"]
        with open_beside(folder / "jobs.sqlite3") as others:
            assert others.execute("SELECT count(*) FROM jobs").fetchone() == (1,)


async def test_snapshots_that_find_no_room_are_notes_and_the_next_one_is_taken(tmp_path, monkeypatch):
    write, left = writer.write_snapshot, [2]

    def fail_at_first(*arguments: Any) -> Path:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    monkeypatch.setattr(writer, "write_snapshot", fail_at_first)
    async with service(tmp_path) as opened:
        record, _ = await opened.submit(job(20))
        told = [event async for event in opened.follow(record.id)]
        assert [bool(failed(event)) for event in told if failed(event) or is_snapshot(event)][:3] == [True, True, False]
        assert (await opened.get(record.id)).state is JobState.FINISHED
        again = [event async for event in opened.follow(record.id)]
        assert sum(map(failed, again)) == 2, "it can be read later, too"
    assert check_snapshots(tmp_path / "jobs" / record.id / "snapshots")[-1] == 20
