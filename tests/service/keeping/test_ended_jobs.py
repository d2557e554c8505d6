"""Jobs that have ended go on from their snapshots, are copied and deleted, and never begin anew unless that is said."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from killing import curve, same
from manager_helpers import ENTRY, Fakes, make_settings, mlp, submission, until
from torch import Generator, Tensor, nn

from asyncpipe.errors import OptionError
from asyncpipe.service.job_states import JobRecord, JobState, JobStateError
from asyncpipe.service.jobs.job_folder import snapshot_steps, tidy_folders
from asyncpipe.service.store.job_store import UnknownJobError
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import SubmissionError
from asyncpipe.service.training_service import TrainingService
from asyncpipe.train.snapshots.format import read_snapshot
from asyncpipe.train.workload import Workload

pytestmark = [pytest.mark.usefixtures("no_leaks")]


@asynccontextmanager
async def service(folder: Path) -> AsyncIterator[tuple[TrainingService, Fakes]]:
    fakes = Fakes()
    settings = make_settings(folder, max_running=1)
    async with TrainingService(settings, entries=Entries({ENTRY: mlp}), make_trainer=fakes) as opened:
        yield opened, fakes


async def go(opened: TrainingService, fakes: Fakes, steps: int | None = None) -> None:
    """Have the training do its steps, or all of them, on the loop that it is on."""

    async def going() -> None:
        fakes["job"].go() if steps is None else fakes["job"].go(steps)

    await opened.loop.hop(going())


async def comes(opened: TrainingService, job: str, state: JobState) -> JobRecord:
    while (record := await opened.get(job)).state is not state:
        pass
    return record


async def cancelled(opened: TrainingService, fakes: Fakes, steps: int = 4) -> JobRecord:
    """A job with a snapshot of every second step that was cancelled."""
    record, _ = await opened.submit(submission(snapshots={"every": 2}))
    if steps:
        await until(lambda: fakes.made["job"])
        await go(opened, fakes, steps)
        while ((job := await opened.get(record.id)).step, job.snapshot) != (steps, f"step-{steps // 2 * 2}"):
            pass
    await opened.cancel(record.id)
    return await comes(opened, record.id, JobState.CANCELLED)


async def test_a_retried_job_goes_on_from_the_snapshot_that_was_said_with_what_was_changed(tmp_path):
    async with service(tmp_path) as (opened, fakes):
        job = (await cancelled(opened, fakes)).id
        folder = tmp_path / "jobs" / job
        with pytest.raises(OptionError, match="has no snapshot of step 3; it has those of 2, 4"):
            await opened.retry(job, 3)
        with pytest.raises(SubmissionError) as wrong:
            await opened.retry(job, changes={"training.stepz": 9, "name": "other", "training.steps": 0})
        assert "name: cannot be changed" in str(wrong.value)
        assert (await opened.get(job)).state is JobState.CANCELLED
        fakes.snapshots["job"] = 2
        after = await opened.retry(job, 2, {"training.steps": 6, "weight": 2.5, "training.clip": None})
        assert (after.state, after.step, after.snapshot, after.crashes) == (JobState.QUEUED, 2, "step-2", 0)
        await until(lambda: len(fakes.made["job"]) == 2)
        assert (fakes["job"].job.training.steps, fakes["job"].share.weight) == (6, 2.5)
        assert snapshot_steps(folder) == [2]
        assert (folder / "snapshots" / "step-4.replaced").is_dir()
        assert (await opened.get(job)).from_step is None
        await go(opened, fakes)
        await comes(opened, job, JobState.FINISHED)
        with pytest.raises(JobStateError, match="that state is final"):
            await opened.retry(job)
        assert [each.to_state for each in await opened.history(job)] == [
            "queued", "running", "cancelled", "queued", "running", "finished",
        ]  # fmt: skip


async def test_a_retried_job_and_a_fork_are_at_the_step_of_the_newest_snapshot(tmp_path):
    async with service(tmp_path) as (opened, fakes):
        job = (await cancelled(opened, fakes, 3)).id
        for record in (await opened.fork(job), await opened.retry(job)):
            assert (record.step, record.snapshot) == (2, "step-2")


async def test_a_retry_keeps_what_was_changed_before(tmp_path):
    async with service(tmp_path) as (opened, fakes):
        job, later = (await cancelled(opened, fakes, 0)).id, 4e9
        await opened.amend(job, tags=["night"])
        first = await opened.retry(job, changes={"deadline": later, "weight": 2.5})
        await opened.cancel(job)
        await comes(opened, job, JobState.CANCELLED)
        for record in (first, await opened.retry(job)):
            assert (record.tags, record.deadline, record.weight) == (("night",), later, 2.5)


@pytest.mark.promise("The service", "A job whose snapshots are missing starts from scratch only if you ask for it.")
async def test_a_job_whose_snapshots_are_gone_begins_anew_only_if_that_is_said(tmp_path):
    async with service(tmp_path) as (opened, fakes):
        job = (await cancelled(opened, fakes)).id
        for path in (tmp_path / "jobs" / job / "snapshots").iterdir():
            path.rmdir()
        for ask in (opened.retry, opened.fork):
            with pytest.raises(OptionError, match=r"are gone \(the last was step-4\); give 0 to begin anew"):
                await ask(job)
        assert (await opened.fork(job, 0)).snapshot is None
        assert (await opened.retry(job, 0)).snapshot is None
        never_ran = (await cancelled(opened, fakes, steps=0)).id
        assert (await opened.retry(never_ran)).state is JobState.QUEUED


async def test_a_job_is_deleted_with_all_that_it_has_and_is_shown_first(tmp_path):
    async with service(tmp_path) as (opened, fakes):
        job = (await cancelled(opened, fakes)).id
        folder = tmp_path / "jobs" / job
        (folder / "snapshots" / "step-4" / "model.pt").write_bytes(bytes(1000))
        _, found = await opened.delete(job, dry_run=True)
        assert (found.snapshots, found.bytes >= 1000) == ((2, 4), True)
        assert folder.is_dir()
        record, deleted = await opened.delete(job)
        assert (record.id, deleted) == (job, found)
        assert not list((tmp_path / "jobs").iterdir())
        with pytest.raises(UnknownJobError):
            await opened.get(job)
        running, _ = await opened.submit(submission())
        with pytest.raises(JobStateError, match="be deleted before it has ended"):
            await opened.delete(running.id)
        with pytest.raises(JobStateError, match="be retried"):
            await opened.retry(running.id)


def test_what_a_kill_has_left_half_done_is_ended(tmp_path):
    here, gone, forked, unknown = (letter * 26 for letter in "abcd")
    for name in (f"{here}.deleted", f"{gone}.deleted", f"{forked}.forking", f"{unknown}.forking", "other"):
        (tmp_path / name / "snapshots").mkdir(parents=True)
    for _ in range(2):
        tidy_folders(tmp_path, {here, forked})
        assert sorted(os.listdir(tmp_path)) == [here, forked, "other"]


# Bits


def batches(batch_size: int, generator: Generator) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        x = torch.randn(batch_size, 8, generator=generator)
        yield x, x.flip(1)


def small() -> Workload:
    return Workload(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8)), nn.functional.mse_loss, batches)


@pytest.mark.promise(
    "The service", "A fork of a job ends with the same results bit for bit and does not change the job."
)
async def test_a_fork_from_a_step_ends_with_the_bits_of_its_origin(tmp_path):
    async def finished(opened: TrainingService, job: str) -> str:
        states = [event.data["to"] async for event in opened.follow(job) if event.kind == "state"]
        assert states[-1] == "finished", await opened.get(job)
        return job

    training = {"steps": 9, "batch_size": 4, "learning_rate": 0.01}
    job = submission(training=training, snapshots={"every": 1, "keep": 9})
    async with TrainingService(make_settings(tmp_path), entries=Entries({ENTRY: small})) as opened:
        origin = await finished(opened, (await opened.submit(job))[0].id)
        step = snapshot_steps(tmp_path / "jobs" / origin)[0]
        fork = await opened.fork(origin, step, {"name": "again"})
        assert (fork.forked_from, fork.step, fork.name) == (origin, step, "again")
        assert fork.cause == f"forked from {origin} after step {step}"
        await finished(opened, fork.id)
    assert curve(tmp_path, fork.id) == curve(tmp_path, origin)
    assert same((tmp_path, fork.id), (tmp_path, origin)) > 4
    # The copy of the snapshot is the fork's; that of the other job stays as it was.
    jobs = [
        read_snapshot(tmp_path / "jobs" / each / "snapshots" / f"step-{step}").manifest.job
        for each in (origin, fork.id)
    ]
    assert jobs == ["job", "again"]
