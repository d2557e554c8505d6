"""Jobs with deadlines, and jobs that get another share; trainings do as they are told."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from manager_helpers import Fakes, opened

from asyncpipe.service.job_states import JobState, JobStateError
from asyncpipe.service.jobs.active_jobs import ActiveJobs
from asyncpipe.service.jobs.deadlines import Deadlines
from asyncpipe.service.store.job_store import StoreError, StoreProblem

QUEUED, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED, QUARANTINED = JobState


async def test_jobs_that_have_not_ended_by_their_deadline_fail(tmp_path):
    now = 1e9
    async with opened(tmp_path, max_running=1) as service:
        control = service.control
        deadlines = Deadlines(control, 30.0, 0.01, lambda: now)
        first = await service.running("first", deadline=2e9)
        waiting, paused = await service.submit("waiting", deadline=2e9), await service.submit("paused", deadline=2e9)
        later = await service.submit("later", deadline=3e9)
        await control.pause(paused.id, "later")
        watching = asyncio.create_task(deadlines.watch())
        await service.store.count()
        assert (await service.store.get(first.id)).state is RUNNING
        now = 2e9
        control.timed.set()
        cause = "its deadline, 2033-05-18 03:33:20 UTC, has passed"
        for job in (waiting, paused):
            assert (await service.comes(job.id, FAILED)).cause == cause
        failed = await service.comes(first.id, FAILED)
        assert (failed.cause, failed.snapshot) == (f"{cause}; it stopped after step 0", None)
        assert (await service.comes(later.id, RUNNING)).deadline == 3e9
        retried = await service.store.transition(waiting.id, QUEUED, "retried")
        assert retried.deadline == 2e9 if retried.updated < 2e9 else retried.deadline is None
        watching.cancel()


async def test_a_run_that_does_not_stop_at_its_deadline_is_cancelled(tmp_path):
    fakes = Fakes()
    async with opened(tmp_path, fakes) as service:
        job = await service.running("first", deadline=2e9)
        fakes["first"].stop = lambda: None  # It hangs in its step.
        watching = asyncio.create_task(Deadlines(service.control, 0.0, 0.01, lambda: 2e9).watch())
        assert "has passed" in (await service.comes(job.id, FAILED)).cause
        watching.cancel()


async def test_deadlines_are_looked_at_again_when_the_store_works_again(tmp_path, monkeypatch):
    async with opened(tmp_path) as service:
        job = await service.submit("job", deadline=2e9)
        await service.control.pause(job.id, "later")
        due, calls = service.store.due, count()

        async def failing(at):
            if next(calls) < 3:
                raise StoreError(tmp_path, StoreProblem.FULL, "is full", "free some space")
            return await due(at)

        monkeypatch.setattr(service.store, "due", failing)
        watching = asyncio.create_task(Deadlines(service.control, 0.0, 0.0, lambda: 2e9).watch())
        await service.comes(job.id, FAILED)
        watching.cancel()


async def test_class_and_weight_are_changed_wherever_a_job_is(tmp_path):
    async with opened(tmp_path, max_running=1) as service:
        control: ActiveJobs = service.control
        first = await service.running("first", weight=2.0)
        old, new = await service.submit("old"), await service.submit("new")
        await control.amend(first.id, weight=5, priority_class="background")
        share = service.fakes["first"].share
        assert (share.job, share.weight, share.background) == (first.id, 5, True)
        changed = await control.amend(old.id, priority_class="background", tags=["slow"])
        assert (changed.is_background, changed.tags) == (True, ("slow",))
        assert service.manager.waits_for(old.id) == "max_running 1 is reached; 1 before it"
        service.fakes["first"].go()
        await service.comes(new.id, RUNNING)
        await service.comes(first.id, FINISHED)
        with pytest.raises(JobStateError, match="cannot change its schedule, priority class or weight"):
            await control.amend(first.id, weight=2)
        assert (await control.amend(first.id, tags=["done"])).tags == ("done",)
