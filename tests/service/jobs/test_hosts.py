"""Draining: jobs leave a host after their step, go on elsewhere, come back, and have the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
from manager_helpers import make_settings, submission
from resume_helpers import batches, disturb
from run_helpers import assert_same_end, plain

from asyncpipe.core.records.worker_notes import WorkerChange, WorkerState
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs.hosts import Hosts, UnknownHostError
from asyncpipe.service.jobs.manager import Manager
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import check_submission, job_of
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Workload

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(240)]


def workload(steps: int | None = None) -> Workload:
    """One that draws and counts; its data ends after ``steps``."""

    def some(*arguments: Any) -> Iterator[Batch]:
        yield from islice(batches(*arguments), steps)

    return replace(plain(), batches=some)


@pytest.mark.promise(
    "A lost worker",
    "A run that loses workers and continues, with others or with replacements, ends with bit-identical results.",
)
async def test_jobs_leave_a_drained_host_after_their_step_and_come_back(tmp_path):
    entries = Entries({"tests:plain": workload})
    settings = make_settings(
        tmp_path / "service", workers="processes", devices=["cpu:0", "cpu:1", "cpu:2"], entries=["tests:plain"]
    )
    asked = submission(
        entry="tests:plain",
        parameters={},
        training={"steps": 10**6, "batch_size": 8, "learning_rate": 0.05, "overlap": True},
        snapshots={"every": 10**6},
        faults={"step_retries": 0},
    )
    async with JobStore(tmp_path / "jobs.sqlite3") as store, Manager(settings, entries, store) as manager:
        hosts = manager.hosts
        assert [(each.name, each.up, each.jobs) for each in await hosts.workers()] == [
            (name, False, ()) for name in settings.devices
        ]
        job = (await manager.jobs.submit(check_submission(asked, settings, entries), None))[0].id

        async def trains_in(*names: str) -> None:
            """Wait until the job has done a step there."""
            while (run := manager.jobs.running.get(job)) is None or run.workers != names:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # It leaves the processor to the workers.
            version = run.view.version
            while run.view.version == version:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

        await trains_in("cpu:0", "cpu:1")
        (drained,) = await hosts.drain("cpu:1")
        assert (drained.draining, drained.up, drained.jobs) == (True, True, (job,))
        await trains_in("cpu:0", "cpu:2")
        assert [each.jobs for each in await hosts.workers()] == [(job,), (), (job,)]
        assert (hosts.heartbeats().keys(), hosts.drained()["cpu:1"]) == ({"cpu:0", "cpu:1", "cpu:2"}, True)
        await hosts.undrain("cpu:1")
        await trains_in("cpu:0", "cpu:1")
        # Nothing is left: it waits, and says so.
        for name in settings.devices:
            await hosts.drain(name)
        while manager.outlook(job).waits_for is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert manager.outlook(job).waits_for == "waits: cpu:0, cpu:1 are not to be used"
        await hosts.undrain("cpu:2")
        await trains_in("cpu:2", "cpu:2#1")
        await manager.jobs.pause(job, "enough")
        while (record := await store.get(job)).state is not JobState.PAUSED:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert [str(each.to_state) for each in await store.history(job)] == ["queued", "running", "paused"]
        with pytest.raises(UnknownHostError, match="no host 'cpu:9'; the service has cpu:0, cpu:1, cpu:2"):
            await hosts.drain("cpu:9")
    job = job_of(record, settings)
    folder = job.snapshots.folder
    alone = job.override("pipeline", workers="threads").override("snapshots", folder=tmp_path / "alone")
    disturb()
    summary = await TrainingRun(alone, partial(workload, record.step)).run()
    assert_same_end(summary.snapshot, folder / summary.snapshot.name)


async def test_workers_that_a_job_has_for_itself_are_shown_while_its_process_lives():
    async with DevicePool(workers="processes") as pool:
        hosts = Hosts(pool, ["cpu:0", "cpu:1"], lambda: {"job": ("cpu:0",)})
        hosts.tell("job", WorkerChange("cpu:0", WorkerState.UP, 7))
        hosts.tell("job", WorkerChange("cpu:1", WorkerState.UP, 8))
        hosts.tell("job", WorkerChange("cpu:1", WorkerState.LOST, 8))
        assert [(each.name, each.up, each.pid, each.jobs) for each in await hosts.workers()] == [
            ("cpu:0", True, 7, ("job",)),
            ("cpu:1", False, 0, ()),
        ]
        hosts.forget("job")
        assert not any(each.up for each in await hosts.workers())
