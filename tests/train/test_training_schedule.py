"""A run's schedule changes between two steps, or not at all; its snapshots say so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from resume_helpers import STEPS, batches, make_job
from run_helpers import Told, assert_same_end, plain
from torch import Generator

from asyncpipe.errors import ScheduleError, UnknownScheduleError
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.train.job_file import Job
from asyncpipe.train.snapshots.format import read_snapshot
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Workload

pytestmark = pytest.mark.usefixtures("no_leaks")


def job_of(folder: Path, schedule: str = "1f1b") -> Job:
    return make_job(folder, pipeline={"schedule": schedule})


class Changing:
    """A run that asks for ``schedule`` while step 3 runs: the fourth batch is made meanwhile."""

    def __init__(self, job: Job, schedule: str, told: Told, pool: DevicePool | None = None) -> None:
        self.schedule = schedule
        self.asked: list[asyncio.Future[None]] = []
        self.loop = asyncio.get_running_loop()
        self.run = TrainingRun(job, lambda: replace(plain(), batches=self.batches), progress=told, pool=pool)

    def batches(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for number, batch in enumerate(batches(batch_size, generator)):
            if number == 3:
                self.loop.call_soon_threadsafe(self.ask)
            yield batch

    def ask(self) -> None:
        self.asked.append(asyncio.ensure_future(self.run.orders.change_schedule(self.schedule)))


def about(folder: Path, step: int) -> tuple[Any, ...]:
    said = read_snapshot(folder / f"step-{step}").manifest
    return said.schedule, said.parameters["pipeline"]["schedule"], said.schedule_sha256


@pytest.mark.parametrize("pooled", [False, True], ids=["alone", "on a pool"])
async def test_steps_follow_the_new_schedule_and_snapshots_say_so(tmp_path, pooled):
    for schedule in ("1f1b", "gpipe"):
        await TrainingRun(job_of(tmp_path / schedule, schedule), plain).run()
    told, folder = Told(), tmp_path / "changed"
    async with DevicePool() as pool:
        changing = Changing(job_of(folder), "gpipe", told, pool if pooled else None)
        await changing.run.run()
    await changing.asked[0]
    assert told.notes == [(logging.INFO, "the schedule is gpipe from step 4 on")]
    last = max(step for step, _ in told.snapshots if step <= 3)
    assert about(folder, last) == about(tmp_path / "1f1b", STEPS)
    assert about(folder, STEPS) == about(tmp_path / "gpipe", STEPS)
    assert about(folder, last)[2] != about(folder, STEPS)[2]


async def test_a_run_that_changed_goes_on_with_the_same_bits(tmp_path):
    told = Told()
    summary = await Changing(job_of(tmp_path / "whole"), "gpipe", told).run.run()
    folder = tmp_path / "parts"
    parts = Told(lambda step: step == 4 and first.run.orders.stop())
    first = Changing(job_of(folder), "gpipe", parts)
    await first.run.run()
    again = Told()
    resumed = await TrainingRun(job_of(folder, "gpipe"), plain, progress=again).run()
    assert again.phases == [f"going on after step 4, from {folder / 'step-4'}"]
    assert parts.losses + again.losses == told.losses
    assert_same_end(resumed.snapshot, summary.snapshot)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("soon", "unknown schedule 'soon'; known schedules: "),
        ("auto", "unknown schedule 'auto'"),
        ("csv:/nowhere.csv", "nowhere.csv"),
        ("zbv", "stage"),
    ],
)
async def test_a_schedule_that_cannot_be_followed_changes_nothing(tmp_path, schedule, message):
    whole, told = Told(), Told()
    await TrainingRun(job_of(tmp_path / "whole"), plain, progress=whole).run()
    changing = Changing(job_of(tmp_path / "tried"), schedule, told)
    summary = await changing.run.run()
    with pytest.raises(ScheduleError, match=message):
        await changing.asked[0]
    assert told.losses == whole.losses
    assert told.notes == []
    assert about(tmp_path / "tried", STEPS) == about(tmp_path / "whole", STEPS)
    assert_same_end(summary.snapshot, tmp_path / "whole" / f"step-{STEPS}")


@pytest.mark.parametrize("when", ["before it begins", "while it is made"])
async def test_before_the_first_step_it_holds_for_that(tmp_path, when):
    reached, go_on = Event(), Event()

    def make() -> Workload:
        reached.set()
        assert go_on.wait(30)
        return plain()

    told = Told()
    run = TrainingRun(job_of(tmp_path), make, progress=told)
    if when == "before it begins":
        asked = asyncio.ensure_future(run.orders.change_schedule("gpipe"))
        await asyncio.sleep(0)
    running = asyncio.ensure_future(run.run())
    await asyncio.to_thread(reached.wait)
    if when == "while it is made":
        asked = asyncio.ensure_future(run.orders.change_schedule("gpipe"))
        await asyncio.sleep(0)
    assert not asked.done()
    go_on.set()
    await running
    await asked
    assert told.notes == [(logging.INFO, "the schedule is gpipe from step 1 on")]
    assert {about(tmp_path, step)[0] for step, _ in told.snapshots} == {"gpipe"}


async def test_the_last_of_several_holds_and_who_gave_up_is_not_heeded(tmp_path):
    run = TrainingRun(job_of(tmp_path), plain)
    asked = [asyncio.ensure_future(run.orders.change_schedule(name)) for name in ("zb-h1", "soon", "gpipe", "1f1b")]
    await asyncio.sleep(0)
    asked[3].cancel()
    await run.run()
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert (ends[0], type(ends[1]), ends[2], type(ends[3])) == (
        None,
        UnknownScheduleError,
        None,
        asyncio.CancelledError,
    )
    assert about(tmp_path, STEPS)[0] == "gpipe"


@pytest.mark.parametrize("end", ["through", "stopped", "failed", "cancelled"])
async def test_nobody_waits_for_a_run_that_has_ended(tmp_path, end):
    waiting: list[asyncio.Future[None]] = []

    def on_step(step: int) -> None:
        if step < (STEPS if end == "through" else 3):
            return
        waiting.append(asyncio.ensure_future(run.orders.change_schedule("gpipe")))
        if end == "stopped":
            run.orders.stop()
        elif end == "failed":
            raise ZeroDivisionError
        elif end == "cancelled":
            running.cancel()

    run = TrainingRun(job_of(tmp_path), plain, progress=Told(on_step))
    running = asyncio.ensure_future(run.run())
    await asyncio.wait([running])
    if end in ("failed", "cancelled"):
        assert running.cancelled() or isinstance(running.exception(), ZeroDivisionError)
    for asking in (*waiting, asyncio.ensure_future(run.orders.change_schedule("gpipe"))):
        with pytest.raises(ScheduleError, match="does no more training steps"):
            await asking
    assert waiting
