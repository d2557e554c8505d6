"""Jobs that ask for any devices, and jobs of users, in a service: where they begin, what is told, who is next."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
from manager_helpers import make_settings, opened, submission, until
from resume_helpers import batches, disturb
from run_helpers import assert_same_end, plain

from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs.manager import Manager
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import check_submission, job_of
from asyncpipe.train.training_run import TrainingRun

pytestmark = [pytest.mark.usefixtures("no_leaks")]

FOUR = [f"cpu:{number}" for number in range(4)]


def some(steps):
    """The workload of the job, whose data ends after ``steps``."""
    return replace(plain(), batches=lambda *arguments: islice(batches(*arguments), steps))


def pipeline(devices):
    return {"devices": devices, "microbatches": 2}


async def test_any_devices_are_chosen_at_the_beginning_and_told(tmp_path):
    limits = dict.fromkeys(FOUR, "3 GiB")
    alone = {"devices": FOUR, "share_devices": False, "isolation": "thread", "max_running": 9, "memory_limit": limits}
    async with opened(tmp_path, **alone) as service:
        named = await service.running("named", pipeline=pipeline(["cpu:1"]))
        pair = await service.running("pair", pipeline=pipeline({"count": 2, "memory": "1 GiB"}))
        assert (pair.devices, pair.placed, pair.memory, str(pair.request)) == (
            ("cpu:2", "cpu:3"),
            ("cpu:2", "cpu:3"),
            1 << 30,
            "any 2",
        )
        assert pair.cause == "it is its turn, on cpu:2 and cpu:3: free neighbours, 3 GiB left on each"
        assert service.fakes["pair"].job.pipeline.devices == ("cpu:2", "cpu:3")
        wide, late = [
            await service.submit(name, pipeline=pipeline(count)) for name, count in (("wide", 2), ("late", 1))
        ]
        await until(lambda: service.fakes.made["late"])
        assert (await service.store.get(late.id)).placed == ("cpu:0",), "it passes the one that waits for two"
        outlook = service.manager.outlook(wide.id)
        assert (outlook.place, outlook.waits_for) == (1, "waits for any 2: 0 of 4 are free")
        # What is resumed, retried or forked asks again, and may be elsewhere.
        await service.control.pause(pair.id, "a break")
        await service.comes(pair.id, JobState.PAUSED)
        await until(lambda: service.fakes.made["wide"])
        assert service.fakes["wide"].job.pipeline.devices == ("cpu:2", "cpu:3")
        for job in (named.id, late.id):
            await service.control.cancel(job, "enough")
            await service.comes(job, JobState.CANCELLED)
        assert (await service.control.resume(pair.id, "go")).devices == ("cpu:2", "cpu:3")
        await until(lambda: len(service.fakes.made["pair"]) == 2)
        assert service.fakes["pair"].job.pipeline.devices == ("cpu:0", "cpu:1")
        fork = await service.manager.ended.fork(pair.id, pair.document)
        assert (fork.placed, fork.devices, str(fork.request)) == ((), (), "any 2")
        assert (await service.store.runs(0.0))[1].devices == ("cpu:2", "cpu:3")


@pytest.mark.promise(
    "The service", "A job that asks for any devices may continue on other devices, with bit-identical results."
)
async def test_a_job_that_goes_on_elsewhere_has_the_bits_of_an_undisturbed_run(tmp_path):
    entries = Entries({"tests:plain": plain})
    settings = make_settings(
        tmp_path / "service", devices=FOUR, entries=["tests:plain"], share_devices=False, isolation="thread"
    )
    forever = {"steps": 10**6, "batch_size": 8, "learning_rate": 0.05}
    asked = submission(
        entry="tests:plain", parameters={}, pipeline=pipeline(2), training=forever, snapshots={"every": 10**6}
    )
    async with JobStore(tmp_path / "jobs.sqlite3") as store, Manager(settings, entries, store) as manager:
        jobs = manager.jobs

        async def submit(**changed):
            return (await jobs.submit(check_submission(asked | changed, settings, entries), None))[0].id

        async def steps(job, count):
            while (await store.get(job)).step < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # It leaves the processor to the job.

        async def stop(job):
            await jobs.pause(job, "a break")
            while (record := await store.get(job)).state is not JobState.PAUSED:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            return record

        job = await submit()
        await steps(job, 3)
        assert (await stop(job)).placed == ("cpu:0", "cpu:1")
        other = await submit(name="other", pipeline=pipeline(["cpu:0"]))
        await until(lambda: other in jobs.running)
        before = await jobs.resume(job, "go")
        await steps(job, before.step + 3)
        record = await stop(job)
        assert record.placed == ("cpu:1", "cpu:2")
    placed = job_of(record, settings)
    folder = placed.snapshots.folder
    alone = placed.override("pipeline", devices=("cpu:0", "cpu:1")).override("snapshots", folder=tmp_path / "alone")
    disturb()
    summary = await TrainingRun(alone, partial(some, record.step)).run()
    assert_same_end(summary.snapshot, folder / summary.snapshot.name)


async def test_a_job_that_no_device_can_have_any_more_fails_and_says_so(tmp_path):
    async with opened(tmp_path, devices=FOUR, max_running=1) as service:
        await service.running("first")
        job = await service.submit("second", pipeline=pipeline(3))
    async with opened(tmp_path, devices=FOUR[:2]) as service:
        record = await service.comes(job.id, JobState.FAILED)
        assert record.cause == "cannot be built: pipeline.devices: must be at most 2, got 3"


async def test_eight_jobs_of_one_user_do_not_delay_those_of_others(tmp_path):
    async with opened(tmp_path, max_running=2) as service:

        async def submit(name, owner, **changed):
            document = check_submission(submission(name, **changed), service.manager.settings, service.entries)
            return (await service.control.submit(document, None, owner=owner))[0].id

        flood = [await submit(f"ann {number}", "ann") for number in range(8)]
        await until(lambda: service.fakes.made["ann 0"] and service.fakes.made["ann 1"])
        bob, first = await submit("bob", "bob"), await submit("bob, first", "bob", priority=5)
        cid = await submit("cid", "cid")
        places = {job: service.manager.outlook(job).place for job in (first, cid, bob, flood[2])}
        assert places == {first: 1, cid: 2, bob: 3, flood[2]: 4}
        await service.control.amend(bob, priority=9)
        service.fakes.free = True
        for name in ("ann 0", "ann 1"):
            service.fakes[name].go()
        for job in (*flood, bob, first, cid):
            await service.comes(job, JobState.FINISHED)
        # Two may begin at once: which of them is made first is a matter of threads.
        assert set(list(service.fakes.made)[:4]) == {"ann 0", "ann 1", "bob", "cid"}
        used = service.control.queue.usage.used("ann", service.manager._clock())
        assert used > 0
    async with opened(tmp_path, max_running=2) as service:
        now = service.manager._clock()
        assert service.control.queue.usage.used("ann", now) >= used * 0.99, "also after a restart"
