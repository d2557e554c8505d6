"""Jobs that were running when the service died: how often they are tried, beside whom, and when they are not."""

from __future__ import annotations

import pytest
from manager_helpers import Fakes, make_settings, opened, until

from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs import job_queue
from asyncpipe.service.settings.service_settings import SettingsError
from asyncpipe.service.store.job_store import JobStore

pytestmark = [pytest.mark.usefixtures("no_leaks")]

QUEUED, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED, QUARANTINED = JobState

LONG = {"training": {"steps": 100, "batch_size": 4, "learning_rate": 0.05}, "snapshots": {"every": 4}}


async def dies(folder, jobs, most_crashes=3, **options):
    """A service that is killed while it runs ``jobs``; their states when the next one starts."""
    async with JobStore(folder / "jobs.sqlite3") as store:
        for job in jobs:
            await store.transition(job, RUNNING, "it is its turn")
    async with JobStore(folder / "jobs.sqlite3") as store:
        await store.recover(most_crashes=most_crashes, **options)
        return [(await store.get(job)).state for job in jobs]


@pytest.mark.promise(
    "The service",
    "A job that keeps killing the service is tried `max_attempts` times, and no other job is blamed for it.",
)
async def test_the_last_attempt_is_alone_until_its_snapshot_so_that_no_other_job_is_blamed(tmp_path):
    async with opened(tmp_path) as service:
        greedy, innocent = [(await service.submit(name, **LONG)).id for name in ("greedy", "innocent")]
        await until(lambda: len(service.manager.jobs.running) == 2)
    assert await dies(tmp_path, [greedy, innocent]) == [QUEUED, QUEUED]
    assert await dies(tmp_path, [greedy, innocent]) == [QUEUED, QUEUED]
    fakes = Fakes()
    async with opened(tmp_path, fakes, max_running=4) as service:
        jobs = service.manager.jobs
        await until(lambda: greedy in jobs.running)
        other = (await service.submit("other", **LONG)).id
        # The other one has done nothing, and begins before the second suspect, but not beside the first.
        await until(lambda: service.manager.outlook(other).waits_for)
        assert "which runs alone until its next snapshot" in service.manager.outlook(other).waits_for
        assert list(jobs.running) == [greedy]
        await until(lambda: fakes.made["greedy"])
        fakes["greedy"].go(5)
        await until(lambda: other in jobs.running)
        assert "waits to run alone" in service.manager.outlook(innocent).waits_for
        await until(lambda: jobs.running[greedy].record.crashes == 2)
    async with JobStore(tmp_path / "jobs.sqlite3") as store:
        assert [(await store.get(job)).crashes for job in (greedy, innocent)] == [0, 2]
    # The one that has a snapshot has three attempts again.
    assert await dies(tmp_path, [greedy, innocent]) == [QUEUED, QUARANTINED]
    async with opened(tmp_path) as service:
        record = await service.store.get(innocent)
        assert record.cause.startswith("the service died 3 times while it ran")
        with pytest.raises(RuntimeError, match="quarantined"):
            await service.manager.jobs.pause(innocent, "a break")


@pytest.mark.promise("The service", "A job that waits to run alone is not overtaken for ever.")
async def test_a_job_that_waits_to_run_alone_is_not_overtaken_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(job_queue, "PATIENCE_SECONDS", 0.0)
    async with opened(tmp_path) as service:
        suspect, other = [(await service.submit(name, **LONG)).id for name in ("suspect", "other")]
    for _ in range(2):
        await dies(tmp_path, [suspect])
    fakes = Fakes()
    async with opened(tmp_path, fakes, max_running=4) as service:
        jobs = service.manager.jobs
        await until(lambda: fakes.made["other"])
        later = [(await service.submit("later", **LONG)).id for _ in range(3)]
        await until(lambda: all(service.manager.outlook(job).waits_for for job in later))
        assert "waits to run alone" in service.manager.outlook(suspect).waits_for
        assert list(jobs.running) == [other], "who came before it runs, and nobody who came later passes"
        await jobs.cancel(other, "enough")
        await until(lambda: suspect in jobs.running and fakes.made["suspect"])
        assert list(jobs.running) == [suspect]
        fakes["suspect"].go(5)
        await until(lambda: len(jobs.running) == 4)


async def test_pauses_before_the_first_step_are_no_attempts(tmp_path):
    async with opened(tmp_path, max_attempts=2) as service:
        jobs, job = service.manager.jobs, (await service.submit(**LONG)).id
        for run in range(1, 4):
            await until(lambda run=run: len(service.fakes.made["job"]) == run)
            await jobs.pause(job, "a break")
            paused = await service.comes(job, PAUSED, QUARANTINED)
            assert (paused.state, paused.crashes, paused.failures) == (PAUSED, 0, 0)
            await jobs.resume(job, "go")


async def test_a_job_that_was_asked_to_end_is_not_quarantined_and_nothing_goes_on_where_nothing_shall(tmp_path):
    async with opened(tmp_path) as service:
        asked, ran, waited = [(await service.submit(name, **LONG)).id for name in ("asked", "ran", "waited")]
    async with JobStore(tmp_path / "jobs.sqlite3") as store:
        for job in (asked, ran):
            await store.transition(job, RUNNING, "it is its turn")
        await store.ask(asked, CANCELLED, "enough")
    async with opened(tmp_path, max_attempts=1, resume=False, max_running=4) as service:
        states = [(await service.store.get(job)).state for job in (asked, ran, waited)]
        assert states == [CANCELLED, QUARANTINED, PAUSED]
        assert "nothing goes on by itself" in (await service.store.get(waited)).cause
        await service.manager.jobs.resume(waited, "go")
        await until(lambda: waited in service.manager.jobs.running)


async def test_a_job_waits_for_the_memory_that_others_have_declared(tmp_path, monkeypatch):
    async with opened(tmp_path, memory_limit={"cpu:0": "3 GiB"}, max_running=4) as service:
        first, second = [(await service.submit(name, memory="2 GiB", **LONG)).id for name in ("first", "second")]
        await until(lambda: first in service.control.running)
        monkeypatch.setattr(job_queue, "PASSES", 1)
        passing, small = [(await service.submit(name, memory="512 MiB", **LONG)).id for name in ("passing", "small")]
        await until(lambda: passing in service.control.running)
        reason = "waits for memory on cpu:0: needs 2 GiB, 512 MiB of 3 GiB are free"
        assert service.manager.outlook(second).waits_for == reason
        assert "before it waits for" in service.manager.outlook(small).waits_for
        await service.control.cancel(first, "enough")
        await until(lambda: {second, small} <= service.control.running.keys())


async def test_jobs_that_share_no_device_wait_until_all_of_theirs_are_free(tmp_path, monkeypatch):
    monkeypatch.setattr(job_queue, "PASSES", 0)
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    async with opened(tmp_path, devices=devices, share_devices=False, max_running=4) as service:
        pipelines = [
            {"devices": devices, "microbatches": 2} for devices in (["cpu:0"], ["cpu:0", "cpu:1"], ["cpu:1"], ["cpu:2"])
        ]
        first, both, last, free = [
            (await service.submit(f"job {n}", pipeline=each, **LONG)).id for n, each in enumerate(pipelines)
        ]
        jobs = service.manager.jobs
        await until(lambda: first in jobs.running)
        assert service.manager.outlook(both).waits_for == f"waits for cpu:0, which job {first} has to itself"
        assert service.manager.outlook(last).waits_for == f"waits for cpu:1, which job {both} before it waits for"
        await until(lambda: free in jobs.running)
        assert last not in jobs.running  # Its device is free, and belongs to the one before it.
        await jobs.cancel(first, "enough")
        await until(lambda: both in jobs.running)
        assert service.manager.outlook(last).waits_for == f"waits for cpu:1, which job {both} has to itself"


def test_jobs_have_processes_of_their_own_unless_their_stages_are_in_workers(tmp_path):
    def isolated(**changed):
        return make_settings(tmp_path, **{"isolation": None} | changed).is_isolated

    assert isolated()
    assert not isolated(isolation="thread")
    assert not isolated(workers="processes")
    assert isolated(workers="processes", isolation="process")
    with pytest.raises(SettingsError, match=r"isolation: .*has one controller"):
        isolated(workers="torchrun", isolation="process")
    assert isolated(job_memory="2 GiB")
    with pytest.raises(SettingsError, match="job_memory: holds for a process"):
        isolated(job_memory="2 GiB", isolation="thread")
