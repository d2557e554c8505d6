"""What the job store keeps for a service: what running jobs were asked, their schedules, how many may wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_helpers import CANCELLED, FAILED, PAUSED, QUEUED, RUNNING, SPEC, numbered, submitted, ticking

from asyncpipe.errors import OptionError
from asyncpipe.service.job_states import JobState, JobStateError
from asyncpipe.service.store.job_store import JobStore, QueueFullError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "jobs.sqlite"


async def test_what_a_running_job_was_asked_survives_a_kill(path):
    async with JobStore(path, clock=ticking(), make_id=numbered()) as store:
        ids = [(await submitted(store, SPEC)).id for _ in range(4)]
        for job in ids:
            await store.transition(job, RUNNING, "because")
        asked = await store.ask(ids[0], PAUSED, "ann asked")
        assert (asked.state, asked.asked, asked.asked_cause) == (RUNNING, PAUSED, "ann asked")
        assert await store.ask(ids[0], PAUSED, "bob asked") == asked
        await store.ask(ids[1], PAUSED, "ann asked")
        await store.ask(ids[1], CANCELLED, "bob asked")
        with pytest.raises(JobStateError, match="cannot become paused, as it is being cancelled"):
            await store.ask(ids[1], PAUSED, "ann asked")
        await store.ask(ids[2], PAUSED, "ann asked")
        await store.ask(ids[2], None, "bob asked")
        with pytest.raises(OptionError, match="has a cause"):
            await store.ask(ids[3], PAUSED, " ")
        assert [len(await store.history(job)) for job in ids] == [2] * 4
    # Its process was killed.
    async with JobStore(path) as store:
        recovered = {job.id: job for job in await store.recover()}
        assert [recovered[job].state for job in ids] == [PAUSED, CANCELLED, QUEUED, QUEUED]
        assert [recovered[job].cause for job in ids[:3]] == ["ann asked", "bob asked", "the service was restarted"]
        assert all(recovered[job].asked is recovered[job].asked_cause is None for job in ids)


async def test_a_schedule_is_kept_until_the_end(path):
    async with JobStore(path) as store:
        job = await submitted(store, SPEC)
        assert job.schedule is None
        assert (await store.amend(job.id, pipeline={"schedule": "gpipe"})).schedule == "gpipe"
        await store.transition(job.id, RUNNING, "because")
        assert (await store.amend(job.id, pipeline={"schedule": "zb-h1"})).schedule == "zb-h1"
    async with JobStore(path) as store:
        assert (await store.transition(job.id, FAILED, "because")).schedule == "zb-h1"
        with pytest.raises(JobStateError, match="is failed: it cannot change its schedule"):
            await store.amend(job.id, pipeline={"schedule": "gpipe"})


async def test_a_full_queue_takes_no_more_but_answers_for_what_it_has(path):
    async with JobStore(path) as store:
        first, new = await store.add(SPEC, "key", most_queued=2)
        assert new
        await store.add(SPEC, most_queued=2)
        with pytest.raises(QueueFullError, match="the queue is full: 2 jobs wait"):
            await store.add(SPEC, most_queued=2)
        assert await store.add(SPEC, "key", most_queued=2) == (first, False)
        await store.transition(first.id, PAUSED, "because")
        assert (await store.add(SPEC, most_queued=2))[1]
        assert await store.count() == dict.fromkeys(JobState, 0) | {QUEUED: 2, PAUSED: 1}


async def test_a_full_queue_lets_no_paused_job_in(path):
    async with JobStore(path) as store:
        first, second = await submitted(store, SPEC), await submitted(store, SPEC)
        await store.transition(first.id, PAUSED, "because")
        with pytest.raises(QueueFullError, match="the queue is full: 1 jobs wait; try again"):
            await store.transition(first.id, QUEUED, "because", most_queued=1)
        assert (await store.get(first.id)).state is PAUSED
        assert len(await store.history(first.id)) == 2
        with pytest.raises(JobStateError, match="cannot become queued"):
            await store.transition(second.id, QUEUED, "because", most_queued=1)
        await store.transition(second.id, RUNNING, "because")
        assert (await store.transition(first.id, QUEUED, "because", most_queued=1)).state is QUEUED
        # What ran has its place.
        assert (await store.transition(second.id, QUEUED, "because")).state is QUEUED
