"""The job store: what it keeps, and its thread, which commits many requests at once."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from store_helpers import (
    CANCELLED,
    FINISHED,
    PAUSED,
    QUEUED,
    RUNNING,
    SPEC,
    numbered,
    progress,
    submitted,
    ticking,
)

from asyncpipe.errors import OptionError
from asyncpipe.service.job_states import JobRecord, JobState, JobStateError
from asyncpipe.service.store.job_store import (
    IdempotencyConflictError,
    JobFilter,
    JobStore,
    StoreError,
    StoreProblem,
    UnknownJobError,
    make_id,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "jobs.sqlite"


# One client


@pytest.mark.usefixtures("no_leaks")
async def test_a_job_is_there_again_with_all_that_happened_to_it(path):
    async with JobStore(path, clock=ticking(), make_id=numbered()) as store:
        queued = await submitted(store, SPEC)
        assert queued == JobRecord("job-1", SPEC, QUEUED, "submitted", 1000.0, 1000.0)
        running = await store.transition("job-1", RUNNING, "the devices are free", expect=QUEUED)
        assert running == replace(queued, state=RUNNING, cause="the devices are free", updated=1001.0, attempts=1)
        await progress(store, "job-1", 50, "step-50")
        await progress(store, "job-1", 60)
        paused = await store.transition("job-1", PAUSED, "asked for")
    async with JobStore(path) as store:
        assert await store.get("job-1") == paused == replace(paused, step=60, snapshot="step-50", attempts=1)
        history = await store.history("job-1")
    assert [(step.from_state, step.to_state, step.at, step.cause) for step in history] == [
        (None, QUEUED, 1000.0, "submitted"),
        (QUEUED, RUNNING, 1001.0, "the devices are free"),
        (RUNNING, PAUSED, 1004.0, "asked for"),
    ]
    assert [step.sequence for step in history] == [1, 2, 4]  # The snapshot is an event, too.


async def test_a_refused_transition_changes_nothing(path):
    async with JobStore(path) as store:
        job = await submitted(store, SPEC)
        with pytest.raises(JobStateError, match="is queued: it cannot become finished"):
            await store.transition(job.id, FINISHED, "because")
        with pytest.raises(JobStateError, match="as a job that is running"):
            await store.transition(job.id, CANCELLED, "because", expect=RUNNING)
        await progress(store, job.id, 1, "step-1")  # Of a run that has ended: what the job is does not change.
        with pytest.raises(OptionError, match="has a cause"):
            await store.transition(job.id, CANCELLED, "")
        assert await store.get(job.id) == job
        assert len(await store.history(job.id)) == 1


@pytest.mark.parametrize("unknown", ["7", "", "\udcff", "a\0b", None, 3, "'; DROP TABLE jobs; --"])
async def test_a_job_that_is_not_there_is_a_typed_error_everywhere(path, unknown):
    async with JobStore(path) as store:
        for asking in (
            store.get(unknown),
            store.history(unknown),
            store.transition(unknown, RUNNING, "because"),
            progress(store, unknown, 1),
            store.list(after=unknown) if unknown is not None else store.get(None),
        ):
            with pytest.raises(UnknownJobError, match="there is no job"):
                await asking


async def test_a_key_makes_one_job(path):
    other = {**SPEC, "weight": 2.0}
    async with JobStore(path) as store:
        jobs = await asyncio.gather(*(submitted(store, SPEC, "key") for _ in range(10)))
        assert len({job.id for job in jobs}) == 1
        with pytest.raises(IdempotencyConflictError, match="'key' belongs to job") as caught:
            await submitted(store, other, "key")
        assert caught.value.job == jobs[0].id
        running = await store.transition(jobs[0].id, RUNNING, "because")
    async with JobStore(path) as store:
        assert await submitted(store, SPEC, "key") == running
        assert (await submitted(store, other, "another key")).id != running.id
        assert len({(await submitted(store, SPEC)).id for _ in range(3)}) == 3


def test_ids_sort_by_time_and_differ():
    ids = [make_id(at) for at in (0.0, 0.001, 1.0, 1.8e9, 1.8e9 + 0.01, 4e9)]
    assert ids == sorted(ids)
    assert {len(job) for job in ids} == {26}
    assert ids[0].startswith("0000000000")
    same_time = {make_id(1.8e9) for _ in range(1000)}
    assert (len(same_time), len({job[:10] for job in same_time})) == (1000, 1)
    assert all(len(set(digits)) == 32 for digits in list(zip(*same_time, strict=True))[10:])


# The thread. Tests pass it functions that no method has: ones that stand still or fail half way.


class Held(JobStore):
    """A store whose thread stands still inside a request until it is let go, so that others wait together."""

    async def hold(self) -> tuple[asyncio.Task[None], threading.Event]:
        loop, begun, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def stand_still(connection: sqlite3.Connection) -> None:
            loop.call_soon_threadsafe(begun.set)
            assert release.wait(30)

        holding = asyncio.create_task(self._thread.run(stand_still))
        await begun.wait()
        return holding, release


async def held(store: Held, *requests) -> list[object]:
    """What becomes of ``requests`` (results or errors), which come to the thread at once."""
    holding, release = await store.hold()
    waiting = [asyncio.ensure_future(request) for request in requests]
    await asyncio.sleep(0)
    release.set()
    await holding
    return await asyncio.gather(*waiting, return_exceptions=True)


async def test_what_waits_is_committed_together_and_each_has_its_own_answer(path):
    async with Held(path) as store:
        job = await submitted(store, SPEC, "key")
        before = store.commits
        answers = await held(
            store,
            *(submitted(store, SPEC) for _ in range(10)),
            store.transition(job.id, FINISHED, "because"),
            submitted(store, {**SPEC, "name": "other"}, "key"),
            store.transition(job.id, RUNNING, "because"),
            progress(store, job.id, 3),
            *(submitted(store, SPEC) for _ in range(10)),
        )
        assert store.commits == before + 1
        assert [type(answer).__name__ for answer in answers] == [
            *["JobRecord"] * 10, "JobStateError", "IdempotencyConflictError", "JobRecord", "NoneType",
            *["JobRecord"] * 10,
        ]  # fmt: skip
        assert len(await store.list()) == 21
        assert (await store.get(job.id)).step == 3


@pytest.mark.parametrize("raised", [KeyError, StopIteration, SystemExit])
async def test_a_request_that_fails_half_way_is_undone_alone(path, raised):
    def broken(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE jobs SET cause = 'torn'")
        raise raised

    async with Held(path) as store:
        good = await submitted(store, SPEC)
        answers = await held(store, submitted(store, SPEC), store._thread.run(broken), submitted(store, SPEC))
        assert raised.__name__ in repr(answers[1])
        assert isinstance(answers[1], KeyError | RuntimeError)
        assert [job.cause for job in await store.list()] == ["submitted"] * 3
        assert await store.get(good.id) == good


async def test_an_error_of_sqlite_fails_only_the_request_that_made_it(path):
    make_id, same = numbered(), list[str]()
    async with Held(path, make_id=lambda at: same[0] if same else make_id(at)) as store:
        await submitted(store, SPEC)
        answers = await held(
            store,
            submitted(store, SPEC),
            store._thread.run(lambda connection: connection.execute("no SQL")),
            submitted(store, SPEC),
            store._thread.run(lambda connection: connection.execute("ROLLBACK")),
            store.get("job-1"),
        )
        assert [type(answer).__name__ for answer in answers] == [
            "JobRecord", "StoreError", "JobRecord", "StoreError", "JobRecord",
        ]  # fmt: skip
        assert len(await store.list()) == 3
        # An id that is there already is refused, not doubled.
        same.append("job-1")
        with pytest.raises(StoreError, match="refused a request"):
            await submitted(store, SPEC)


@pytest.mark.usefixtures("no_leaks")
async def test_cancelling_who_waits_tears_nothing(path):
    async with Held(path, make_id=numbered()) as store:
        holding, release = await store.hold()
        cancelled = asyncio.create_task(submitted(store, SPEC))
        stays = asyncio.create_task(submitted(store, SPEC))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        release.set()
        await holding
        assert (await stays).id == "job-2"
        assert [job.id for job in await store.list()] == ["job-1", "job-2"]


@pytest.mark.usefixtures("no_leaks")
async def test_closing_finishes_what_waits_and_takes_no_more(path):
    store = Held(path)
    with pytest.raises(StoreError, match="is not open") as caught:
        await submitted(store, SPEC)
    assert caught.value.problem is StoreProblem.CLOSED
    async with store:
        _, release = await store.hold()
        waiting = [asyncio.create_task(submitted(store, SPEC)) for _ in range(5)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(store.__aexit__(None, None, None))
        await asyncio.sleep(0)
        with pytest.raises(StoreError, match="is not open"):
            await store.list()
        closing.cancel()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not store.is_alive
        ids = {(await job).id for job in waiting}
    with pytest.raises(StoreError, match="is not open"):
        await store.__aenter__()
    async with JobStore(path) as again:
        assert {job.id for job in await again.list()} == ids


@pytest.mark.usefixtures("no_leaks")
async def test_whoever_is_cancelled_while_it_opens_leaves_no_thread(path):
    opening = asyncio.create_task(JobStore(path).__aenter__())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with JobStore(path, busy_seconds=0) as store:
        await submitted(store, SPEC)


def test_a_store_that_is_dropped_lets_its_thread_end(path, new_threads):
    async def drop() -> threading.Thread:
        store = await JobStore(path).__aenter__()
        await submitted(store, SPEC)
        (thread,) = [each for each in threading.enumerate() if each.name.startswith("asyncpipe job store")]
        return thread

    thread = asyncio.run(drop())
    thread.join(10)
    assert not thread.is_alive()
    assert new_threads() == 0


async def test_runs_say_who_had_which_devices_also_of_a_job_that_is_deleted(path):
    now = [0.0]
    async with JobStore(path, clock=lambda: now[0]) as store:
        job, _ = await store.add(SPEC, None, owner="alice", teams=("vision",), code="c0de")
        assert (job.owner, job.teams, job.code, job.placed) == ("alice", ("vision",), "c0de", ())
        now[0] = 10.0
        await store.transition(job.id, JobState.RUNNING, "its turn", placed=("cpu:1", "cpu:3"))
        assert [(run.owner, run.devices, run.began, run.ended) for run in await store.runs(0)] == [
            ("alice", ("cpu:1", "cpu:3"), 10.0, None)
        ]
        now[0] = 30.0
        ended = await store.transition(job.id, JobState.FAILED, "boom", failures=1, root="ValueError at a.py:1")
        assert ended == await store.get(job.id)
        assert (ended.placed, ended.root) == (("cpu:1", "cpu:3"), "ValueError at a.py:1")
        assert await store.list(JobFilter(owner="alice")) == (ended,)
        assert await store.list(JobFilter(owner="bob")) == ()
        await store.delete(job.id)
        assert [(run.job, run.began, run.ended) for run in await store.runs(30.0)] == [(job.id, 10.0, 30.0)]
        assert await store.runs(30.5) == []


async def test_a_run_that_a_kill_has_ended_ended_when_it_was_heard_of_last(path):
    now = [0.0]
    async with JobStore(path, clock=lambda: now[0]) as store:
        job = await submitted(store, SPEC)
        await store.transition(job.id, JobState.RUNNING, "its turn")
        now[0] = 5.0
        await progress(store, job.id, 1)
        now[0] = 1000.0
        await store.recover()
        assert [run.ended for run in await store.runs(0)] == [5.0]


async def test_the_history_says_after_which_step_a_run_ended_and_from_which_the_next_goes_on(path):
    async with JobStore(path) as store:
        job = (await submitted(store, SPEC)).id
        await store.transition(job, JobState.RUNNING, "its turn")
        await progress(store, job, 4, "step-4")
        await progress(store, job, 6)
        for to in (JobState.PAUSED, JobState.QUEUED, JobState.RUNNING):
            await store.transition(job, to, "because")
        assert [each.step for each in await store.history(job)] == [0, 0, 6, 6, 4]


async def test_only_jobs_that_ran_have_a_crash_more_after_a_restart(path):
    async with JobStore(path, make_id=numbered()) as store:
        waits, ran = await submitted(store, SPEC), await submitted(store, SPEC)
        await store.transition(ran.id, RUNNING, "the devices are free")
        changed = await store.recover(resume=False)
        assert {each.id: (each.state, each.crashes) for each in changed} == {waits.id: (PAUSED, 0), ran.id: (PAUSED, 1)}
