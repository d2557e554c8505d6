"""The log of a job: what is kept through kills and failures of the store, and what those see who watch."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_helpers import FAILED, FINISHED, PAUSED, QUEUED, RUNNING, SPEC, submitted

from asyncpipe.service.jobs import job_log
from asyncpipe.service.jobs.job_log import JobLog, JobLogs
from asyncpipe.service.store import job_records
from asyncpipe.service.store.job_records import JobEvent, LossRow
from asyncpipe.service.store.job_store import JobStore, StoreError, StoreProblem, UnknownJobError

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[JobStore]:
    async with JobStore(tmp_path / "jobs.sqlite3") as opened:
        yield opened


def row(step: int, loss: float | None = None) -> LossRow:
    return LossRow(step, 1 / (step + 2) if loss is None else loss, 0.1 * step, 0.25, 4096)


def logs_of(store: JobStore, *troubles: list[str]) -> JobLogs:
    def trouble(job: str, text: str) -> None:
        if not troubles:
            pytest.fail(text)
        troubles[0].append(text)

    return JobLogs(store, store.path.parent / "jobs", trouble)


async def running(store: JobStore) -> str:
    """The id of a job that runs."""
    job = (await submitted(store, SPEC)).id
    await store.transition(job, RUNNING, "begins")
    return job


# The curve


async def test_numbers_come_back_to_the_last_bit(store):
    job, chance = await running(store), random.Random(3)
    rows = [LossRow(n, chance.random() / 3, chance.random(), chance.random(), n) for n in range(1, 200)]
    odd = [math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 0.0]
    rows += [LossRow(200 + n, loss, 0.1, 0.2, 1) for n, loss in enumerate(odd)]
    async with logs_of(store).use(job) as log:
        for each in [*rows, LossRow(300, math.nan, 0.1, 0.2, 1)]:
            log.step(each)
    *found, last = await store.losses(job)
    assert list(map(repr, found)) == list(map(repr, rows))
    assert math.isnan(last.loss)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_run_killed_and_gone_on_any_number_of_times_has_each_step_once(tmp_path_factory, data):
    async def check() -> None:
        done = 0
        async with JobStore(tmp_path_factory.mktemp("store") / "jobs.sqlite3") as store:
            job = await running(store)
            for _ in range(data.draw(st.integers(1, 5), "runs")):
                snapshot = data.draw(st.integers(0, done), "snapshot")
                done = snapshot + data.draw(st.integers(1, 12), "steps")
                async with logs_of(store).use(job) as log:
                    for step in range(snapshot + 1, done + 1):
                        log.step(row(step))
                        if data.draw(st.booleans(), "flush"):
                            await log.flush()
                assert await store.losses(job) == [row(step) for step in range(1, done + 1)]
            after, limit = data.draw(st.integers(0, done + 2)), data.draw(st.integers(1, 10))
            rows = [row(step) for step in range(after + 1, done + 1)]
            assert await store.losses(job, after, limit) == rows[:limit]

    asyncio.run(check())


async def test_a_flush_returns_when_all_steps_are_on_disk(store, tmp_path):
    job = await running(store)
    async with logs_of(store).use(job) as log:
        for step in (1, 2, 3):
            log.step(row(step))
        assert await store.losses(job) == []  # Nothing on the loop has waited for the disk.
        await log.flush()
        assert len(await store.losses(job)) == 3
        assert store.commits == 3  # All steps share one.


async def test_what_a_full_disk_did_not_take_is_written_when_there_is_room(store, monkeypatch):
    job, troubles = await running(store), list[str]()
    write, is_full = store.write_records, True

    async def limited(*arguments: object) -> None:
        if is_full:
            raise StoreError(store.path, StoreProblem.FULL, "has no room", "free some space")
        await write(*arguments)

    monkeypatch.setattr(store, "write_records", limited)
    async with logs_of(store, troubles).use(job) as log:
        for step in range(1, 6):
            log.step(row(step))
            log.note(20, str(step))
            log.snapshot(step, f"step-{step}")
            await log.flush()
        assert len(troubles) == 1
        assert "the job's losses and events cannot be written" in troubles[0]
        log.step(row(4))  # Gone back meanwhile.
        is_full = False
    assert await store.losses(job) == [row(step) for step in range(1, 5)]
    notes = [event.data["text"] for event in await store.events(job) if event.kind == "note"]
    assert notes == ["1", "2", "3", "4", "5"]
    record = await store.get(job)
    assert (record.step, record.snapshot) == (4, "step-5")


async def test_a_folder_that_cannot_be_made_is_told_and_costs_nothing_else(store, tmp_path):
    (tmp_path / "jobs").write_text("a file in its place")
    troubles = list[str]()
    job = await running(store)
    async with logs_of(store, troubles).use(job) as log:
        log.step(row(1))
    assert len(await store.losses(job)) == 1
    assert len(troubles) == 1


@pytest.mark.parametrize(("steps", "most"), [(0, 5), (1, 5), (3, 5), (5, 5), (1000, 7), (1000, 1)])
async def test_a_curve_of_few_points_goes_from_the_first_step_to_the_last(store, steps, most):
    job = await running(store)
    await store.write_records(job, [row(step) for step in range(1, steps + 1)], [])
    found = [each.step for each in await store.spread_losses(job, most)]
    assert len(found) == min(most, steps)
    assert found == sorted(set(found))
    if steps and most > 1:
        assert (found[0], found[-1]) == (1, steps)


# Events


async def test_events_are_in_the_order_in_which_they_happened_and_bounded(store, monkeypatch):
    monkeypatch.setattr(job_records, "MOST_NOTES", 20)
    job = await running(store)
    async with logs_of(store).use(job) as log:
        log.note(20, "no file \udcff")
        await log.flush()
        log.snapshot(5, "step-5")
        await log.flush()
        await store.transition(job, PAUSED, "asked for")
        found = await store.events(job)
        assert [event.data for event in found] == [
            {"from": None, "to": "queued", "cause": "submitted", "step": 0},
            {"from": "queued", "to": "running", "cause": "begins", "step": 0},
            {"level": 20, "text": "no file \\udcff"},
            {"step": 5, "name": "step-5"},
            {"from": "running", "to": "paused", "cause": "asked for", "step": 0},
        ]
        assert [event.id for event in found] == sorted({event.id for event in found})
        for number in range(100):
            log.note(20, str(number))
    found = await store.events(job)
    assert [event.data["to"] for event in found if event.kind == "state"] == ["queued", "running", "paused"]
    assert [event.data["text"] for event in found if event.kind == "note"] == [str(n) for n in range(80, 100)]


# Those who watch


async def test_followers_get_what_was_then_what_is_and_end_with_the_job(store):
    job = await running(store)
    async with logs_of(store).use(job) as log:
        log.step(row(1))
        follower, late = log.follow(), log.follow(after=2)
        assert [event.id for event in await anext(follower)] == [1, 2]
        waiting = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0)
        log.step(row(2))
        (step,) = await waiting
        assert (step.kind, step.id, step.data["step"]) == ("step", 2, 2)
        log.note(20, "note")
        await log.flush()
        log.step(row(3))
        log.state(await store.transition(job, FINISHED, "done"))
        kinds = [event.kind async for event in everything(follower)]
        assert sorted(kinds) == ["note", "state", "step"]
        kinds = [event.kind async for event in everything(late)]
        assert sorted(kinds) == ["note", "state", "step", "step"]


async def test_a_slow_follower_misses_steps_and_no_state(store):
    job = await running(store)
    async with logs_of(store).use(job) as log:
        follower = log.follow()
        for step in range(1, 2001):
            log.step(row(step))
            if step % 100 == 0:
                log.state(await store.transition(job, QUEUED, "back"))
                log.state(await store.transition(job, RUNNING, "again"))
        log.state(await store.transition(job, FAILED, "no more"))
        found = [event async for event in everything(follower)]
    assert len([event for event in found if event.kind == "state"]) == 43
    steps = [event.data["step"] for event in found if event.kind == "step"]
    assert steps == list(range(2001 - job_log.MOST_STEPS, 2001))


async def everything(follower: AsyncIterator[list[JobEvent]]) -> AsyncIterator[JobEvent]:
    async for batch in follower:
        for event in batch:
            yield event


async def test_a_log_is_open_while_somebody_uses_it(store):
    job, logs = await running(store), logs_of(store)
    one, other = logs.use(job), logs.use(job)
    log, same = await asyncio.gather(one.__aenter__(), other.__aenter__())
    assert log is same is logs.of(job)
    await one.__aexit__(None, None, None)
    assert logs.of(job) is log
    waiting = asyncio.create_task(follow_on(log))
    await asyncio.sleep(0)
    await other.__aexit__(None, None, None)
    assert logs.of(job) is None
    await waiting
    for _ in range(2):
        with pytest.raises(UnknownJobError):
            async with logs.use("nobody"):
                pass


async def test_a_log_that_opens_while_all_close_ends_its_followers(store, monkeypatch):
    job, logs = await running(store), logs_of(store)
    get = store.get

    async def closing(each: str) -> object:
        logs.close()
        return await get(each)

    monkeypatch.setattr(store, "get", closing)
    async with logs.use(job) as log:
        assert [event.kind async for event in everything(log.follow())] == ["state", "state"]


async def follow_on(log: JobLog) -> None:
    async for _ in log.follow():
        pass
