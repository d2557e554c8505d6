"""The log of a job: what is kept through kills and full disks, and what those see who watch."""

from __future__ import annotations

import asyncio
import json
import math
import random
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.service.job_states import JobRecord, JobSpec, JobState, Transition
from asyncpipe.service.jobs import job_log, loss_file
from asyncpipe.service.jobs.job_log import JobEvent, JobLog, JobLogs, LossRow, read_losses
from asyncpipe.service.jobs.loss_file import LossFile

QUEUED, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED, QUARANTINED = JobState


def row(step: int, loss: float | None = None) -> LossRow:
    return LossRow(step, 1 / (step + 2) if loss is None else loss, 0.1 * step, 0.25, 4096)


def history(*states: JobState) -> list[Transition]:
    before = [None, *states]
    return [Transition(n, "7", before[n], to, float(n), f"cause {n}") for n, to in enumerate(states)]


def record(state: JobState, at: float) -> JobRecord:
    return JobRecord("7", JobSpec("job", "m:f"), state, f"became {state}", 0.0, at)


def opened(folder: Path, *troubles: list[str], states: tuple[JobState, ...] = ()) -> JobLog:
    log = JobLog(folder, troubles[0].append if troubles else lambda text: pytest.fail(text), clock=lambda: 50.0)
    log.open()
    log.reconcile(history(*states))
    return log


def events(log: JobLog) -> list[JobEvent]:
    return [event for _, event in log.since(0, 0, 0)]


def kept(folder: Path, *states: JobState) -> list[JobEvent]:
    log = opened(folder, states=states)
    log.close()
    return events(log)


# The curve


def test_numbers_come_back_to_the_last_bit(tmp_path):
    chance = random.Random(3)
    rows = [LossRow(n, chance.random() / 3, chance.random(), chance.random(), n) for n in range(1, 200)]
    odd = [math.inf, -math.inf, 5e-324, 1.7976931348623157e308, -0.0]
    rows += [LossRow(200 + n, loss, 0.1, 0.2, 1) for n, loss in enumerate(odd)]
    file = LossFile(tmp_path)
    for each in rows:
        file.append(each)
    file.append(LossRow(300, math.nan, 0.1, 0.2, 1))
    file.close()
    *found, last = read_losses(tmp_path, 0, 1000)
    assert list(map(repr, found)) == list(map(repr, rows))
    assert math.isnan(last.loss)
    for line in (tmp_path / "losses.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


@settings(max_examples=60)
@given(data=st.data())
def test_a_run_killed_and_gone_on_any_number_of_times_has_each_step_once(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("job")
    path = folder / "losses.jsonl"
    done = 0
    for _ in range(data.draw(st.integers(1, 6), "runs")):
        file = LossFile(folder)
        snapshot = data.draw(st.integers(0, done), "snapshot")
        done = snapshot + data.draw(st.integers(1, 30), "steps")
        for step in range(snapshot + 1, done + 1):
            file.append(row(step))
        file.close()
        assert read_losses(folder, 0, 1000) == [row(step) for step in range(1, done + 1)]
        # Killed in the middle of the next line; a step that no snapshot has may be lost.
        with path.open("ab") as torn:
            torn.write(row(done + 1).line()[: data.draw(st.integers(0, 40), "torn")])
        assert read_losses(folder, 0, 1000) == [row(step) for step in range(1, done + 1)]
    after, limit = data.draw(st.integers(0, done + 2)), data.draw(st.integers(1, 10))
    rows = [row(step) for step in range(after + 1, done + 1)]
    assert read_losses(folder, after, limit) == rows[:limit]


def test_a_curve_that_was_damaged_is_read_as_far_as_it_goes(tmp_path):
    assert read_losses(tmp_path, 0, 10) == []
    lines = [row(step).line() for step in range(1, 6)]
    (tmp_path / "losses.jsonl").write_bytes(b"".join([*lines, b"\0" * 5000]))
    assert read_losses(tmp_path, 0, 10) == [row(step) for step in range(1, 6)]
    (tmp_path / "losses.jsonl").write_bytes(b"".join([*lines, b"\0" * 5000, b"\n", b"[1]\n"]))
    file = LossFile(tmp_path)
    file.append(row(6))
    file.close()
    assert read_losses(tmp_path, 0, 10) == [row(step) for step in range(1, 7)]


def test_what_a_full_disk_did_not_take_is_written_when_there_is_room(tmp_path, monkeypatch):
    file = LossFile(tmp_path)
    write, room = loss_file.os.write, 250

    def limited(descriptor, data):
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        taken = write(descriptor, data[:room])
        room -= taken
        return taken

    monkeypatch.setattr(loss_file.os, "write", limited)
    refused = 0
    for step in range(1, 8):
        try:
            file.append(row(step))
        except OSError:
            refused += 1
    assert refused >= 4
    assert read_losses(tmp_path, 0, 100) == [row(step) for step in range(1, 8 - refused)]
    room = 10**6
    # Gone back to step 5 meanwhile.
    file.append(row(6))
    file.close()
    assert read_losses(tmp_path, 0, 100) == [row(step) for step in range(1, 7)]


# Events


def test_what_happened_is_there_again_and_numbers_go_on(tmp_path):
    log = opened(tmp_path, states=(QUEUED, RUNNING))
    log.note(20, "began")
    log.snapshot(5, "step-5")
    log.close()
    first = events(log)
    log = opened(tmp_path, states=(QUEUED, RUNNING))
    assert events(log) == first
    assert [(event.id, event.kind) for event in first] == [(1, "state"), (2, "state"), (3, "note"), (4, "snapshot")]
    assert first[1].data == {"number": 2, "from": "queued", "to": "running", "cause": "cause 1"}
    assert first[3].data == {"step": 5, "name": "step-5"}
    log.state(record(FINISHED, 9.0))
    assert events(log)[-1] == JobEvent(
        5, 9.0, "state", {"number": 3, "from": "running", "to": "finished", "cause": "became finished"}
    )
    log.close()


def test_transitions_that_a_killed_process_did_not_write_down_are_added(tmp_path):
    log = opened(tmp_path, states=(QUEUED,))
    log.note(20, "before the kill")
    log.close()
    with (tmp_path / "events.jsonl").open("ab") as torn:
        torn.write(b'{"id": 3, "at": 1')
    log = opened(tmp_path, states=(QUEUED, RUNNING, QUEUED))
    kinds = [event.data.get("to", event.data.get("text")) for event in events(log)]
    assert kinds == ["queued", "before the kill", "running", "queued"]
    assert [event.id for event in events(log)] == [1, 2, 3, 4]
    log.close()
    assert kept(tmp_path, QUEUED, RUNNING, QUEUED)[-1].data["to"] == "queued"


def test_a_transition_that_was_told_already_is_not_told_twice(tmp_path):
    log = opened(tmp_path, states=(QUEUED, RUNNING))
    log.state(record(RUNNING, 1.0))
    assert len(events(log)) == 2
    log.state(record(QUEUED, 2.0))
    assert len(events(log)) == 3
    log.close()


def test_the_file_is_bounded_and_keeps_states(tmp_path, monkeypatch):
    monkeypatch.setattr(job_log, "MOST_EVENTS", 20)
    log = opened(tmp_path, states=(QUEUED, RUNNING))
    for number in range(500):
        log.note(20, str(number))
    log.close()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) <= 20
    log = opened(tmp_path, states=(QUEUED, RUNNING))
    found = events(log)
    assert [event.data["to"] for event in found if event.kind == "state"] == ["queued", "running"]
    assert found[-1].data["text"] == "499"
    assert [event.id for event in found] == sorted({event.id for event in found})
    log.state(record(FINISHED, 3.0))
    assert events(log)[-1].data["number"] == 3
    log.close()


def test_a_disk_that_fails_is_told_once_and_what_was_lost_is_written_later(tmp_path, monkeypatch):
    troubles: list[str] = []
    log = opened(tmp_path, troubles, states=(QUEUED,))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job_log, "write_whole", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    for number in range(5):
        log.note(20, str(number))
    assert troubles == ["the job's events cannot be written: No space left on device"]
    assert len(events(log)) == 6
    monkeypatch.undo()
    log.note(20, "there is room")
    log.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 7


def test_a_folder_that_cannot_be_made_costs_the_file_and_nothing_else(tmp_path):
    (tmp_path / "job").write_text("a file in its place")
    troubles: list[str] = []
    log = opened(tmp_path / "job", troubles, states=(QUEUED,))
    log.note(20, "told all the same")
    log.step(row(1))
    assert len(events(log)) == 3
    assert any("losses cannot be written" in text for text in troubles)
    log.close()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"id": 1, "at": 2, "kind": "x", "data": {}}',
        b'{"id": 1, "at": 2, "kind": "state", "data": {}}',
        b"[" * 100_000,
    ],
)
def test_damaged_lines_are_left_out(tmp_path, line):
    (tmp_path / "events.jsonl").write_bytes(line + b"\n")
    log = opened(tmp_path, states=(QUEUED,))
    assert [event.kind for event in events(log)] == ["state"]
    log.close()
    assert len(kept(tmp_path, QUEUED)) == 1


# Those who watch


@pytest.mark.usefixtures("no_leaks")
async def test_followers_get_what_was_then_what_is_and_end_with_the_job(tmp_path):
    log = opened(tmp_path, states=(QUEUED, RUNNING))
    log.step(row(1))
    follower, late = log.follow(), log.follow(after=2)
    assert [event.id for event in await follower.next()] == [1, 2]
    waiting = asyncio.create_task(follower.next())
    await asyncio.sleep(0)
    log.step(row(2))
    (step,) = await waiting
    assert (step.kind, step.id, step.data["step"]) == ("step", 2, 2)
    log.note(20, "note")
    log.step(row(3))
    log.state(record(FINISHED, 8.0))
    assert [event.kind for event in await follower.next()] == ["note", "step", "state"]
    assert await follower.next() == []
    assert [event.kind for event in await late.next()] == ["step", "note", "step", "state"]
    assert await late.next() == []
    log.close()


async def test_a_slow_follower_misses_steps_and_no_state(tmp_path):
    log = opened(tmp_path, states=(QUEUED, RUNNING))
    follower = log.follow()
    for step in range(1, 2001):
        log.step(row(step))
        if step % 100 == 0:
            log.state(record(QUEUED, step))
            log.state(record(RUNNING, step + 0.5))
    log.state(record(FAILED, 9999.0))
    found = [event async for event in everything(follower)]
    assert len([event for event in found if event.kind == "state"]) == 43
    steps = [event.data["step"] for event in found if event.kind == "step"]
    assert steps == list(range(2001 - job_log.MOST_STEPS, 2001))
    log.close()


async def everything(follower):
    while batch := await follower.next():
        assert len(batch) <= job_log.BATCH
        for event in batch:
            yield event


@pytest.mark.usefixtures("no_leaks")
async def test_a_log_is_open_while_somebody_uses_it(tmp_path):
    asked = count(1)

    async def of_store():
        next(asked)
        return history(QUEUED, RUNNING)

    logs = JobLogs(tmp_path)
    one, other = logs.use("7", of_store), logs.use("7", of_store)
    log, same = await asyncio.gather(one.__aenter__(), other.__aenter__())
    assert log is same is logs.of("7")
    assert next(asked) == 2
    await one.__aexit__(None, None, None)
    assert logs.of("7") is log
    waiting = asyncio.create_task(follow_on(log))
    await asyncio.sleep(0)
    await other.__aexit__(None, None, None)
    assert logs.of("7") is None
    await waiting

    async def broken():
        raise RuntimeError

    for _ in range(2):
        with pytest.raises(RuntimeError):
            async with logs.use("8", broken):
                pass
    async with logs.use("8", of_store):
        pass


async def test_a_log_that_opens_while_all_close_ends_its_followers(tmp_path):
    logs = JobLogs(tmp_path)

    async def of_store():
        logs.close()
        return history(QUEUED, RUNNING)

    async with logs.use("7", of_store) as log:
        assert [event.kind async for event in everything(log.follow())] == ["state", "state"]


async def follow_on(log: JobLog) -> None:
    follower = log.follow()
    while await follower.next():
        pass


def test_causes_that_are_no_text_are_written_all_the_same(tmp_path):
    log = opened(tmp_path, states=(QUEUED,))
    log.note(20, "no file \udcff")
    log.state(replace(record(FAILED, 1.0), cause="é" * 100))
    log.close()
    assert kept(tmp_path)[1].data["text"] == "no file \\udcff"
