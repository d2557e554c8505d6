"""What a service does where a job fails, or its store cannot be written; with fake trainings."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manager_helpers import Fakes, opened, until

from asyncpipe.errors import HungTaskError, JobFileError, LossError, OptionError, TaskError
from asyncpipe.service.job_states import JobRecord, JobState, check_transition
from asyncpipe.service.jobs.run_log import read_said
from asyncpipe.service.jobs.run_outcome import RunEnding, RunOutcome, is_permanent, next_state
from asyncpipe.service.store.job_store import StoreError, StoreProblem
from asyncpipe.train.batches import DataError
from asyncpipe.train.snapshots.format import FolderError
from asyncpipe.train.step_failures import NonFiniteLossError, OutOfMemoryError

pytestmark = [pytest.mark.usefixtures("no_leaks")]

QUEUED, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED, QUARANTINED = JobState


def task_error(cause: BaseException) -> TaskError:
    return TaskError("F(0,1)", "F", 0, 1, "cpu:1", cause)


def full() -> StoreError:
    from pathlib import Path

    return StoreError(Path("jobs"), StoreProblem.FULL, "has no room on its disk", "free some space")


# What it becomes


@given(
    st.sampled_from(RunEnding),
    st.sampled_from([None, PAUSED, CANCELLED]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.none() | st.just("SIGTERM"),
)
def test_whatever_a_run_comes_to_the_job_goes_where_it_may(
    result, asked, failures, retries, crashes, most_crashes, shutdown
):
    document = {"name": "job", "entry": "m:f", "faults": {"snapshot_retries": retries}}
    record = JobRecord("7", document, RUNNING, "begins", 0.0, 0.0, asked=asked, asked_cause="asked for")
    record = replace(record, failures=failures, crashes=crashes)
    to, cause = next_state(RunOutcome(result, "because"), record, most_crashes, shutdown)
    check_transition("7", RUNNING, to)
    assert cause
    if result is RunEnding.FINISHED:
        assert to is FINISHED
    elif asked is CANCELLED:
        assert (to, cause) == (CANCELLED, "asked for")
    elif result is RunEnding.FAILED_PERMANENTLY or (result is RunEnding.FAILED and failures > retries):
        assert to is FAILED
        assert cause.startswith("because")
    elif result is RunEnding.CRASHED and crashes >= most_crashes:
        assert to is QUARANTINED
        assert cause.startswith("because")
    else:
        assert to is (PAUSED if asked is PAUSED else QUEUED)


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (task_error(RuntimeError("a cable")), False),
        (task_error(ValueError("of the model's own")), False),
        (task_error(LossError("no scalar")), True),
        (DataError("no file"), False),
        (OSError("no file"), False),
        (FolderError("no room"), False),
        (OptionError("width"), True),
        (JobFileError("no"), True),
        (NonFiniteLossError("NaN"), True),
        (OutOfMemoryError("no room"), False),
        (HungTaskError.__new__(HungTaskError), False),
    ],
)
def test_which_errors_a_snapshot_cannot_help(error, permanent):
    assert is_permanent(error) is permanent


# Retries


async def test_a_run_that_fails_goes_back_to_its_last_snapshot(tmp_path):
    fakes = Fakes()
    fakes.free = True
    failures = [1, 3, 3]
    fakes.fails = lambda fake: (
        task_error(OSError("a cable")) if failures and fake.step == failures[0] and failures.pop(0) else None
    )
    async with opened(tmp_path, fakes) as service:
        job = await service.submit(snapshots={"every": 2}, faults={"snapshot_retries": 1})
        await service.comes(job.id, FINISHED, FAILED)
        # One failure before the first snapshot; one after step 2's; and one more since it: one too many.
        history = await service.store.history(job.id)
        assert [str(each.to_state) for each in history] == [
            *["queued", "running", "queued", "running", "queued", "running", "failed"]
        ]
        assert [fake.first for fake in fakes.made["job"]] == [0, 0, 2]
        assert history[2].cause.startswith("tried again from its last snapshot (1 of 1): F(0,1) failed")
        assert history[4].cause.startswith("tried again from its last snapshot (1 of 1)")
        assert history[6].cause.endswith("OSError: a cable (2 times since the last snapshot)")
        again = await service.submit("other")
        await service.comes(again.id, FINISHED)


async def test_failures_are_counted_over_restarts_of_the_service(tmp_path):
    fakes = Fakes()
    fakes.fails = lambda fake: OSError("a cable")
    async with opened(tmp_path, fakes) as service:
        job = await service.running(faults={"snapshot_retries": 1})
        fakes["job"].go(1)
        await until(lambda: len(fakes.made["job"]) == 2)
    fakes.free = True
    async with opened(tmp_path, fakes) as service:
        failed = await service.comes(job.id, FAILED)
        assert (failed.failures, failed.cause) == (2, "OSError: a cable (2 times since the last snapshot)")


@pytest.mark.parametrize("error", [JobFileError("job 7: no"), NonFiniteLossError("the loss is NaN"), OptionError("no")])
async def test_what_would_fail_again_fails_at_once(tmp_path, error):
    fakes = Fakes()
    fakes.free = True
    fakes.fails = lambda fake: error
    async with opened(tmp_path, fakes) as service:
        job = await service.submit()
        failed = await service.comes(job.id, FAILED)
        assert failed.cause == str(error)
        assert len(fakes.made["job"]) == 1
    error.__traceback__ = None


@pytest.mark.promise("Security", "Passwords, tokens and URLs with credentials are hidden in errors and logs of jobs.")
async def test_no_secret_of_an_error_is_shown(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    fakes = Fakes()
    fakes.free = True

    def cannot_connect(fake):
        try:
            raise OSError("postgres://ada:hunter2@db: password=hunter2 is wrong")
        except OSError as error:
            fake.progress.noted(logging.WARNING, f"step 1 failed and is tried again: {error}")
            return error

    fakes.fails = cannot_connect
    async with opened(tmp_path, fakes) as service:
        job = await service.submit(faults={"snapshot_retries": 0})
        failed = await service.comes(job.id, FAILED)
        assert failed.cause == "OSError: postgres://***@db: password=*** is wrong"
        events = await service.store.events(job.id)
        said = read_said(service.manager.logs.folder / job.id, 0).lines
        assert any("in cannot_connect" in line.text for line in said), "the traceback is there"
        assert "hunter2" not in f"{events} {said} {failed.root}"
    assert "password=*** is wrong" in caplog.text
    assert "hunter2" not in caplog.text
    caplog.clear()


async def test_a_failing_job_that_was_asked_to_end_ends(tmp_path):
    fakes = Fakes()
    async with opened(tmp_path, fakes) as service:
        job = await service.running()
        fake = fakes["job"]
        fake.cancelled = asyncio.Event()
        fakes.fails = lambda fake: OSError("at the same moment")
        fake.go(1)
        await service.control.pause(job.id, "ann asked")
        assert (await service.comes(job.id, PAUSED, QUEUED, FAILED)).state is PAUSED


async def test_a_run_whose_code_cancels_itself_has_failed(tmp_path):
    fakes = Fakes()
    fakes.free = True
    fakes.fails = lambda fake: asyncio.CancelledError() if len(fakes.made["job"]) <= 4 else None
    async with opened(tmp_path, fakes) as service:
        job = await service.submit(faults={"snapshot_retries": 1})
        failed = await service.comes(job.id, FAILED, FINISHED)
        assert await service.path(job.id) == ["queued", "running", "queued", "running", "failed"]
        assert failed.cause.startswith("its code raised CancelledError without being cancelled (2 times")


# A store that cannot be written


@pytest.mark.parametrize("what", [RUNNING, FINISHED])
async def test_a_transition_that_the_store_does_not_take_is_made_later(tmp_path, monkeypatch, what):
    async with opened(tmp_path) as service:
        transition, refused = service.store.transition, 0

        async def failing(job, to, cause, **more):
            nonlocal refused
            if to is what and refused < 3:
                refused += 1
                raise full()
            return await transition(job, to, cause, **more)

        monkeypatch.setattr(service.store, "transition", failing)
        service.fakes.free = True
        job = await service.submit()
        await service.comes(job.id, FINISHED)
        assert refused == 3
        assert await service.path(job.id) == ["queued", "running", "finished"]


async def test_an_end_that_the_store_never_takes_is_found_at_the_next_start(tmp_path, monkeypatch):
    fakes = Fakes()
    async with opened(tmp_path, fakes, grace_seconds=0.05) as service:
        job = await service.running()

        async def failing(*_, **__):
            raise full()

        monkeypatch.setattr(service.store, "transition", failing)
        fakes["job"].go()
        await until(lambda: fakes["job"].ended)
        await service.manager.drain("SIGTERM")
        assert not service.manager.jobs.running
    fakes.free = True
    async with opened(tmp_path, fakes) as service:
        await service.comes(job.id, FINISHED)
        assert await service.path(job.id) == ["queued", "running", "queued", "running", "finished"]


async def test_a_request_that_the_store_does_not_take_changes_nothing(tmp_path, monkeypatch):
    async with opened(tmp_path) as service:
        job = await service.running()

        async def failing(*_, **__):
            raise full()

        with monkeypatch.context() as patched:
            patched.setattr(service.store, "ask", failing)
            patched.setattr(service.store, "amend", failing)
            for asking in (service.control.pause(job.id, "a"), service.control.cancel(job.id, "a")):
                with pytest.raises(StoreError):
                    await asking
            with pytest.raises(StoreError):
                await service.control.change_schedule(job.id, "gpipe")
        # It went back to the schedule that is kept.
        assert service.fakes["job"].schedules == ["gpipe", "1f1b"]
        assert not service.fakes["job"].stopping
        service.fakes["job"].go()
        await service.comes(job.id, FINISHED)
