"""Jobs with deadlines, and jobs that get another share; trainings do as they are told."""

from __future__ import annotations

from itertools import count

import pytest
from manager_helpers import Fakes, opened

from asyncpipe.service.job_states import JobState, JobStateError
from asyncpipe.service.jobs.active_jobs import ActiveJobs
from asyncpipe.service.store.job_store import StoreError, StoreProblem

QUEUED, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED, QUARANTINED = JobState


@pytest.mark.promise("The service", "A job that has not ended by its deadline fails, in any state.")
async def test_jobs_that_have_not_ended_by_their_deadline_fail(tmp_path):
    now = 1e9
    async with opened(tmp_path, options={"clock": lambda: now}, max_running=1) as service:
        control = service.control
        first = await service.running("first", deadline=2e9)
        waiting, paused = await service.submit("waiting", deadline=2e9), await service.submit("paused", deadline=2e9)
        later = await service.submit("later", deadline=3e9)
        await control.pause(paused.id, "later")
        await service.store.count()
        assert (await service.store.get(first.id)).state is RUNNING
        now = 2e9
        control.changed.set()
        cause = "its deadline, 2033-05-18 03:33:20 UTC, has passed"
        for job in (waiting, paused):
            assert (await service.comes(job.id, FAILED)).cause == cause
        failed = await service.comes(first.id, FAILED)
        assert (failed.cause, failed.snapshot) == (f"{cause}; it stopped after step 0", None)
        assert (await service.comes(later.id, RUNNING)).deadline == 3e9


@pytest.mark.promise("The service", "A job that has not ended by its deadline fails, in any state.")
async def test_a_run_that_does_not_stop_at_its_deadline_is_cancelled(tmp_path):
    fakes, now = Fakes(), 1e9
    async with opened(tmp_path, fakes, {"clock": lambda: now}, grace_seconds=0.01) as service:
        job = await service.running("first", deadline=2e9)
        fakes["first"].stop = lambda: None  # It hangs in its step.
        now = 2e9
        service.control.changed.set()
        assert "has passed" in (await service.comes(job.id, FAILED)).cause


async def test_deadlines_are_looked_at_again_when_the_store_works_again(tmp_path, monkeypatch):
    now = 1e9
    async with opened(tmp_path, options={"clock": lambda: now}) as service:
        job = await service.submit("job", deadline=2e9)
        await service.control.pause(job.id, "later")
        due, calls = service.store.due, count()

        async def failing(at):
            if next(calls) < 3:
                raise StoreError(tmp_path, StoreProblem.FULL, "is full", "free some space")
            return await due(at)

        monkeypatch.setattr(service.store, "due", failing)
        now = 2e9
        service.control.changed.set()
        await service.comes(job.id, FAILED)


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
        assert service.manager.outlook(old.id).waits_for == "max_running 1 is reached; 1 before it"
        service.fakes["first"].go()
        await service.comes(new.id, RUNNING)
        await service.comes(first.id, FINISHED)
        with pytest.raises(JobStateError, match="cannot change its schedule, priority class or weight"):
            await control.amend(first.id, weight=2)
        assert (await control.amend(first.id, tags=["done"])).tags == ("done",)
