"""Batches that take their time, end or fail: the run waits, ends or fails, and the loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread

import pytest
from resume_helpers import STEPS, batches, make_job, names
from run_helpers import Told, assert_same_end, plain
from torch import Generator

from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.train.batches import DataError
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import TrainingSummary
from asyncpipe.train.snapshots.format import read_snapshot
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Workload

pytestmark = pytest.mark.usefixtures("no_leaks")


def job_of(folder: Path) -> Job:
    """With a snapshot at its end alone: behind a step, nothing comes before the next batch."""
    return make_job(folder, snapshots={"every": 99})


class Slow:
    """Batches, of which one is not there before the gate is open."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reached, self.open = Event(), Event()
        self.made = 0
        self.threads: set[str] = set()

    def __call__(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for batch in batches(batch_size, generator):
            self.threads.add(current_thread().name)
            if self.made == self.number:
                self.reached.set()
                assert self.open.wait(30)
            self.made += 1
            yield batch

    def make(self) -> Workload:
        return replace(plain(), batches=self)

    @asynccontextmanager
    async def waiting(self, run: TrainingRun, told: Told) -> AsyncIterator[asyncio.Task[TrainingSummary]]:
        """``run``, which takes no snapshots, while it waits for that batch; ``told`` is its sink."""
        running = asyncio.create_task(run.run())
        try:
            await asyncio.to_thread(self.reached.wait, 30)
            while len(told.losses) < self.number:  # noqa: ASYNC110 - the run is at work on this loop
                await asyncio.sleep(0)
            yield running
        finally:
            self.open.set()


async def test_a_slow_loader_holds_up_its_own_run_alone(tmp_path):
    slow, told, other = Slow(3), Told(), Told()
    async with DevicePool() as pool:
        run = TrainingRun(job_of(tmp_path / "slow"), slow.make, progress=told, pool=pool)
        async with slow.waiting(run, told) as running:
            summary = await TrainingRun(job_of(tmp_path / "other"), plain, progress=other, pool=pool).run()
            assert not running.done()
        waited = await running
    assert told.losses == other.losses
    assert_same_end(waited.snapshot, summary.snapshot)
    assert len(slow.threads) == 1
    assert slow.threads.pop().startswith("asyncpipe-linear")


async def test_a_run_that_is_stopped_while_it_waits_ends_with_the_batch_and_goes_on_with_that(tmp_path):
    whole = Told()
    summary = await TrainingRun(make_job(tmp_path / "whole"), plain, progress=whole).run()
    slow, told = Slow(3), Told()
    run = TrainingRun(job_of(tmp_path / "parts"), slow.make, progress=told)
    async with slow.waiting(run, told) as running:
        run.orders.stop()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not running.done()
    stopped = await running
    assert (stopped.steps, stopped.stopped, slow.made) == (3, True, 4)
    assert read_snapshot(stopped.snapshot).states["run"]["data"]["taken"] == 3
    again = Told()
    resumed = await TrainingRun(make_job(tmp_path / "parts"), plain, progress=again).run()
    assert told.losses + again.losses == whole.losses
    assert_same_end(resumed.snapshot, summary.snapshot)


async def test_a_cancelled_run_waits_for_the_batch_that_is_being_made(tmp_path):
    slow, told = Slow(3), Told()
    async with slow.waiting(TrainingRun(job_of(tmp_path), slow.make, progress=told), told) as running:
        for _ in range(3):
            running.cancel()
            for _ in range(100):
                await asyncio.sleep(0)
            assert not running.done()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert slow.made == 4


async def test_the_next_batch_is_made_while_the_step_runs(tmp_path):
    slow, seen = Slow(2), []

    def loss_fn(output, target):
        if len(seen) == 4:  # The second step's first micro-batch: its loss waits until the third batch is begun.
            assert slow.reached.wait(30)
            slow.open.set()
        seen.append(1)
        return ((output - target) ** 2).mean()

    told, job = Told(), make_job(tmp_path, pipeline={"checkpoint": "never"})
    await TrainingRun(job, lambda: replace(slow.make(), loss_fn=loss_fn), progress=told).run()
    assert len(told.losses) == STEPS
    assert slow.made == STEPS  # None is made that no step wants.


def raising(after: int) -> Callable[[int, Generator], Iterator[Batch]]:
    def make(batch_size: int, generator: Generator) -> Iterator[Batch]:
        for number, batch in enumerate(batches(batch_size, generator)):
            if number == after:
                raise OSError("the share is gone")
            yield batch

    return make


@pytest.mark.parametrize("after", [0, 3])
async def test_a_loader_that_raises_ends_the_run_behind_the_steps_whose_batches_it_made(tmp_path, after, caplog):
    told = Told()
    job = make_job(tmp_path)
    message = f"^the job's data failed after {after} batches: OSError: the share is gone$"
    with pytest.raises(DataError, match=message) as caught:
        await TrainingRun(job, lambda: replace(plain(), batches=raising(after)), progress=told).run()
    assert caught.value.batches == after
    assert isinstance(caught.value.__cause__, OSError)
    assert len(told.losses) == after
    assert all(path == tmp_path / f"step-{step}" and step <= after for step, path in told.snapshots)
    assert names(tmp_path) == [path.name for _, path in told.snapshots]
    assert not caplog.records


async def test_data_that_fails_on_the_way_to_its_place_is_told_as_that(tmp_path):
    first = TrainingRun(make_job(tmp_path), plain, progress=Told(lambda step: step == 4 and first.orders.stop()))
    await first.run()
    with pytest.raises(DataError, match=r"^the job's data failed after 2 batches: OSError: the share is gone$"):
        await TrainingRun(make_job(tmp_path), lambda: replace(plain(), batches=raising(2), memoryless=False)).run()


async def test_held_out_data_that_fails_is_told(tmp_path):
    def held_out(batch_size: int) -> Iterator[Batch]:
        yield from [next(batches(batch_size, Generator()))] * 2
        raise OSError("the share is gone")

    with pytest.raises(
        DataError, match=r"^the job's held-out data failed after 2 batches: OSError: the share is gone$"
    ):
        await TrainingRun(make_job(tmp_path), lambda: replace(plain(), held_out=held_out)).run()
