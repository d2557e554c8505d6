"""The manager of jobs: begins them in order, does what is asked, and forgets nothing; with trainings that are fakes."""

from __future__ import annotations

import asyncio
import random

import pytest
from manager_helpers import Fakes, opened, tasks_named, until
from store_helpers import check_history

from asyncpipe.errors import ScheduleError
from asyncpipe.service.job_states import JobState, JobStateError, PriorityClass
from asyncpipe.service.store.job_store import QueueFullError, UnknownJobError
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import SubmissionError

pytestmark = [pytest.mark.usefixtures("no_leaks")]

QUEUED, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED, QUARANTINED = JobState


async def test_a_job_runs_to_its_end(tmp_path):
    async with opened(tmp_path) as service:
        job = await service.running(snapshots={"every": 2})
        fake = service.fakes["job"]
        assert (fake.share.job, fake.share.weight, fake.share.background) == (job.id, 1.0, False)
        assert service.manager.jobs.running[job.id].view.job == "job"
        fake.go(3)
        await until(lambda: fake.step == 3)
        fake.go()
        done = await service.comes(job.id, FINISHED)
        assert (done.cause, done.step, done.snapshot, done.attempts) == ("all 5 steps are done", 5, "step-5", 1)
        assert await service.path(job.id) == ["queued", "running", "finished"]
        assert not service.manager.jobs.running


async def test_jobs_begin_in_order_and_no_more_than_may(tmp_path):
    async with opened(tmp_path, max_running=1) as service:
        await service.running("first")
        for name, priority in (("old", "background"), ("new", "foreground"), ("newer", "foreground")):
            record = await service.submit(name, priority_class=priority)
            assert record.priority_class is PriorityClass(priority)
        ids = {record.name: record.id for record in await service.store.list()}
        assert service.manager.outlook(ids["new"]).waits_for == "max_running 1 is reached"
        assert service.manager.outlook(ids["old"]).waits_for == "max_running 1 is reached; 2 before it"
        assert service.manager.outlook(ids["first"]).waits_for is None
        for name in ("first", "new", "newer", "old"):
            await until(lambda name=name: service.fakes.made[name])
            assert [run.record.name for run in service.manager.jobs.running.values()] == [name]
            service.fakes[name].go()
        await service.comes(ids["old"], FINISHED)
        assert service.fakes["old"].share.background


async def test_a_running_job_pauses_after_its_step_and_goes_on_from_there(tmp_path):
    async with opened(tmp_path) as service:
        job = await service.running()
        fake = service.fakes["job"]
        fake.go(2)
        await until(lambda: fake.step == 2)
        asked = await service.control.pause(job.id, "ann asked")
        assert (asked.state, asked.asked) == (RUNNING, PAUSED)
        paused = await service.comes(job.id, PAUSED)
        assert (paused.cause, paused.asked, paused.step, paused.snapshot) == ("ann asked", None, 2, "step-2")
        with pytest.raises(JobStateError, match="is paused: it cannot become paused"):
            await service.control.pause(job.id, "ann asked")
        assert (await service.control.resume(job.id, "bob asked")).state is QUEUED
        await until(lambda: len(service.fakes.made["job"]) == 2)
        assert service.fakes["job"].first == 2
        service.fakes["job"].go()
        await service.comes(job.id, FINISHED)
        assert await service.path(job.id) == ["queued", "running", "paused", "queued", "running", "finished"]


async def test_who_asks_to_go_on_before_it_has_stopped_does_not_wait_for_ever(tmp_path):
    async with opened(tmp_path) as service:
        job = await service.running()
        assert (await service.control.pause(job.id, "ann asked")).asked is PAUSED
        assert (await service.control.resume(job.id, "bob asked")).asked is None
        with pytest.raises(JobStateError, match="it cannot"):
            await service.control.resume(job.id, "bob asked")
        await until(lambda: len(service.fakes.made["job"]) == 2)
        service.fakes["job"].go()
        await service.comes(job.id, FINISHED)
        assert (await service.store.history(job.id))[2].cause == "resumed before its run had stopped"


async def test_cancelling_ends_a_job_wherever_it_is(tmp_path):
    async with opened(tmp_path, max_running=1) as service:
        running = await service.running("running")
        queued, paused = await service.submit("queued"), await service.submit("paused")
        assert (await service.control.pause(paused.id, "ann asked")).state is PAUSED
        for job in (queued, paused):
            assert (await service.control.cancel(job.id, "bob asked")).state is CANCELLED
        asked = await service.control.cancel(running.id, "bob asked")
        assert (asked.state, asked.asked) == (RUNNING, CANCELLED)
        with pytest.raises(JobStateError, match="as it is being cancelled"):
            await service.control.pause(running.id, "ann asked")
        record = await service.comes(running.id, CANCELLED)
        assert (record.cause, record.snapshot) == ("bob asked", None)
        for job in (queued, paused, running):
            for request in (service.control.pause, service.control.resume, service.control.cancel):
                with pytest.raises(JobStateError, match=r"that state is final|it has ended|can become queued$"):
                    await request(job.id, "ann asked")
        assert service.fakes["running"].ended
        assert not service.fakes.made["queued"]


async def test_unknown_jobs_are_told(tmp_path):
    async with opened(tmp_path) as service:
        control = service.control
        for asking in (control.pause, control.resume, control.cancel, control.change_schedule):
            with pytest.raises(UnknownJobError):
                await asking("7", "gpipe")


async def test_only_so_many_may_wait(tmp_path):
    async with opened(tmp_path, max_running=1, max_queued=2) as service:
        await service.running("first")
        await service.submit("second")
        await service.submit("third")
        with pytest.raises(QueueFullError):
            await service.submit("fourth")
        service.fakes.free = True
        service.fakes["first"].go()
        await until(lambda: not len(service.manager.jobs.queue))
        await service.submit("fourth")


async def test_a_paused_job_waits_like_a_new_one_and_a_running_one_goes_on(tmp_path):
    async with opened(tmp_path, max_running=1, max_queued=1) as service:
        running = await service.running("first")
        paused = await service.submit("second")
        await service.control.pause(paused.id, "ann asked")
        await service.submit("third")
        with pytest.raises(QueueFullError):
            await service.control.resume(paused.id, "ann asked")
        assert (await service.store.get(paused.id)).state is PAUSED
        assert paused.id not in service.manager.jobs.queue
        await service.control.pause(running.id, "ann asked")
        await service.control.resume(running.id, "bob asked")
        await until(lambda: len(service.fakes.made["first"]) == 2)
        service.fakes.free = True
        service.fakes["first"].go()
        await until(lambda: not len(service.manager.jobs.queue))
        assert (await service.control.resume(paused.id, "ann asked")).state is QUEUED
        await service.comes(running.id, FINISHED)


async def test_a_job_that_cannot_be_built_any_more_fails_with_the_reason(tmp_path):
    async with opened(tmp_path, max_running=1) as service:
        await service.running("first")
        job = await service.submit("second")
        service.entries.make = Entries({}).make  # As after a restart with other settings.
        service.fakes["first"].go()
        failed = await service.comes(job.id, FAILED)
        assert "cannot be built" in failed.cause
        assert "tests:mlp" in failed.cause


# The schedule


async def test_a_schedule_is_changed_in_any_state_and_kept(tmp_path):
    async with opened(tmp_path, max_running=1) as service:
        running = await service.running("running")
        queued = await service.submit("queued")
        assert (await service.control.change_schedule(running.id, "gpipe")).schedule == "gpipe"
        assert service.fakes["running"].schedules == ["gpipe"]
        assert (await service.control.change_schedule(queued.id, "gpipe")).schedule == "gpipe"
        for schedule in ("nothing", "csv:/etc/passwd", "os:system", "auto"):
            with pytest.raises(SubmissionError):
                await service.control.change_schedule(queued.id, schedule)
        service.fakes["running"].refused = ScheduleError("places stage 1 elsewhere")
        with pytest.raises(ScheduleError, match="places stage 1 elsewhere"):
            await service.control.change_schedule(running.id, "zb-h1")
        assert (await service.store.get(running.id)).schedule == "gpipe"
        service.fakes["running"].go()
        await until(lambda: service.fakes.made["queued"])
        assert service.fakes["queued"].job.pipeline.schedule == "gpipe"
        with pytest.raises(JobStateError, match="is finished: it cannot change its schedule"):
            await service.control.change_schedule(running.id, "1f1b")


async def test_a_job_can_be_cancelled_while_its_schedule_waits_for_a_long_step(tmp_path):
    async with opened(tmp_path) as service:
        job = await service.running()
        fake = service.fakes["job"]

        async def never(name):
            await asyncio.Event().wait()

        fake.change_schedule = never
        changing = asyncio.create_task(service.control.change_schedule(job.id, "gpipe"))
        await asyncio.sleep(0)
        await service.control.cancel(job.id, "ann asked")
        await service.comes(job.id, CANCELLED)
        await asyncio.wait([changing])
        # Kept just before the end, or refused because of it: never forgotten and never a hang.
        record = await service.store.get(job.id)
        assert (changing.exception() is None) == (record.schedule == "gpipe")


# Restarts


async def test_what_ran_goes_on_by_itself_after_a_restart(tmp_path):
    fakes = Fakes()
    async with opened(tmp_path, fakes) as service:
        job = await service.running()
        fakes["job"].go(2)
        await until(lambda: fakes["job"].step == 2)
        waiting = [await service.submit(name) for name in ("b", "c")]
        await service.manager.drain("SIGTERM")
        assert await service.path(job.id) == ["queued", "running", "queued"]
        record = await service.store.get(job.id)
        assert (record.cause, record.snapshot) == ("SIGTERM", "step-2")
        assert service.manager.outlook(job.id).waits_for == "SIGTERM"
        assert not service.manager.jobs.running
        late = await service.submit("late")
        await asyncio.sleep(0)
        assert (await service.store.get(late.id)).state is QUEUED
    fakes.free = True
    async with opened(tmp_path, fakes) as service:
        for each in (job, *waiting, late):
            await service.comes(each.id, FINISHED)
        assert [fake.first for fake in fakes.made["job"]] == [0, 2]


async def test_what_was_asked_is_done_after_a_kill(tmp_path):
    fakes = Fakes()
    async with opened(tmp_path, fakes, max_running=4, grace_seconds=0.01) as service:
        jobs = {name: (await service.running(name)).id for name in ("paused", "cancelled", "asked nothing")}
        # As if the process had been killed behind the commit: nobody hears of it.
        await service.store.ask(jobs["paused"], PAUSED, "ann asked")
        await service.store.ask(jobs["cancelled"], CANCELLED, "bob asked")
        service.manager.jobs.store = Deaf()  # type: ignore[assignment]
    async with opened(tmp_path, fakes) as service:
        assert (await service.store.get(jobs["paused"])).cause == "ann asked"
        states = [(await service.store.get(job)).state for job in jobs.values()]
        assert states[:2] == [PAUSED, CANCELLED]
        await service.comes(jobs["asked nothing"], RUNNING)
        assert (await service.store.history(jobs["asked nothing"]))[2].cause == "the service was restarted"


class Deaf:
    """A store that keeps nothing."""

    is_alive = True

    def __getattr__(self, name):
        async def refuse(*_, **__):
            from asyncpipe.service.store.job_store import StoreError, StoreProblem

            raise StoreError("jobs", StoreProblem.FULL, "has no room on its disk", "free some")

        return refuse


async def test_what_does_not_end_in_its_grace_period_is_cancelled(tmp_path):
    fakes = Fakes()
    async with opened(tmp_path, fakes, grace_seconds=0.05) as service:
        job = await service.running()
        fakes["job"].stop = lambda: None
        await service.manager.drain("SIGTERM")
        assert fakes["job"].ended
        assert await service.path(job.id) == ["queued", "running", "queued"]
    async with opened(tmp_path, fakes) as service:
        await service.comes(job.id, RUNNING)
        assert (await service.store.history(job.id))[2].cause == "SIGTERM"


# All at once


async def test_fifty_jobs_and_five_clients_who_want_something_else_all_the_time(tmp_path, new_threads):
    chance = random.Random(50)
    refused = done = 0

    async def client(service, jobs):
        nonlocal refused, done
        for _ in range(60):
            job = chance.choice(jobs)
            what = chance.choice(["pause", "pause", "resume", "resume", "resume", "cancel"])
            try:
                await getattr(service.control, what)(job.id, f"{what} was asked")
                done += 1
            except JobStateError:
                refused += 1
            if service.fakes.made:
                chance.choice(list(service.fakes.made.values()))[-1].go(2)
            await asyncio.sleep(0)

    async with opened(tmp_path, max_running=4) as service:
        before = new_threads()
        jobs = [
            await service.submit(f"job {n}", priority_class=chance.choice(["foreground", "background"]))
            for n in range(50)
        ]
        await asyncio.gather(*(client(service, jobs) for _ in range(5)))
        assert done > 50
        assert refused > 20
        service.fakes.free = True
        for job in jobs:
            record = await service.store.get(job.id)
            if record.state is PAUSED or record.asked is PAUSED:
                await service.control.resume(job.id, "the end")
        for fakes in list(service.fakes.made.values()):
            fakes[-1].go()
        for job in jobs:
            await service.comes(job.id, FINISHED, CANCELLED)
        ended = [await service.store.get(job.id) for job in jobs]
        assert {record.state for record in ended} == {FINISHED, CANCELLED}
        for record in ended:
            history = await service.store.history(record.id)
            check_history(history)
            assert record.attempts == sum(each.to_state is RUNNING for each in history)
            assert record.attempts == len(service.fakes.made[record.name])
        assert not service.manager.jobs.running
        assert not len(service.manager.jobs.queue)
        await until(lambda: not tasks_named("asyncpipe run"))
        counted = {
            sample.labels["state"]: sample.value
            for family in service.manager.metrics.collect()
            if family.name == "asyncpipe_jobs"
            for sample in family.samples
        }
        assert counted == {state: sum(record.state is state for record in ended) for state in JobState}
        assert new_threads() <= before + 40  # The loop's pool of threads.
