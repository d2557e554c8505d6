"""Runs whose stages live in worker processes: the numbers of threads, and snapshots that either goes on from."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from resume_helpers import STEPS, disturb, make_chain, make_job, names
from run_helpers import Told, assert_same_end, plain
from torch import Tensor

from asyncpipe.errors import BatchError, JobFileError, WorkerLostError
from asyncpipe.ops.model.feed import Feed
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.pipeline.remote_stages import RemoteStages
from asyncpipe.train.entry import find_entry
from asyncpipe.train.job_file import Job, load_job
from asyncpipe.train.progress import StepProgress, TrainingSummary
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Workload

pytestmark = [pytest.mark.usefixtures("snapshot_each_step"), pytest.mark.timeout(120)]

TRAINING = {"overlap": True, "clip": 0.5, "warmup_steps": 3}
LAYOUTS = {
    "two workers": ["cpu:0", "cpu:1"],
    "one worker": ["cpu:1", "cpu:2"],
    "three stages": ["cpu:0", "cpu:1", "cpu:2"],
}


@pytest.fixture(scope="module")
def pool() -> Iterator[DevicePool]:
    """cpu:0 in one worker, cpu:1 and cpu:2 in another one."""
    pool = DevicePool(workers={"cpu:0": "a", "cpu:1": "b", "cpu:2": "b"})
    asyncio.run(pool.__aenter__())
    yield pool
    asyncio.run(pool.aclose())


def job_of(folder: Path, *, every: int = 99, **pipeline: Any) -> Job:
    return make_job(
        folder, pipeline=pipeline, training=TRAINING, snapshots={"every": every}, faults={"step_retries": 0}
    )


class Figures(Told):
    def __init__(self, on_step: Callable[[int], object] = lambda step: None) -> None:
        super().__init__(on_step)
        self.figures: list[tuple[float, float, float]] = []

    def stepped(self, progress: StepProgress) -> None:
        self.figures.append((progress.loss, progress.learning_rate, progress.gradient_norm))
        super().stepped(progress)


def whole() -> Workload:
    """Its model draws and counts; it is evaluated, and says something."""

    async def sample(forward: Callable[[Tensor], Awaitable[Tensor]]) -> str:
        return str((await forward(torch.ones(2, 3, dtype=torch.float64))).sum().item())

    def held_out(batch_size: int) -> list[Batch]:
        x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(10, 3)
        return [(x, x.flip(1)), (x[:4], x[:4])]

    return replace(plain(), held_out=held_out, sample=sample)


async def run(
    job: Job, pool: DevicePool | None, make: Callable[[], Workload] = whole, told: Told | None = None
) -> TrainingSummary:
    disturb()
    return await TrainingRun(job, make, progress=told or Told(), pool=pool).run()


@pytest.mark.promise("Bit-identical results", "A job in workers has the figures and states of one on threads.")
@pytest.mark.parametrize("tied", [False, True], ids=["overlapping", "one by one"])
async def test_a_run_has_the_figures_and_the_states_of_one_on_threads(tmp_path, pool, tied):
    ends = []
    make, options = (make_chain(tied=True), {"balance": [3, 3]}) if tied else (whole, {"schedule": "zb-h2"})
    for name, where in (("threads", None), ("workers", pool)):
        told = Figures()
        summary = await run(job_of(tmp_path / name, every=2, **options), where, make, told)
        ends.append((told.figures, told.notes, summary.evaluation, summary.sample))
        assert [step for step, _ in told.snapshots] == [2, 4, 6]
        assert len(told.figures) == STEPS
    assert ends[0] == ends[1]
    assert_same_end(tmp_path / "threads" / "step-6", tmp_path / "workers" / "step-6")
    assert names(tmp_path / "workers" / "step-6") == [
        *("model-0.pt", "model-1.pt", "optimizer-0.pt", "optimizer-1.pt", "optimizer.pt", "run.pt", "snapshot.json")
    ]


@pytest.mark.promise(
    "Killed and resumed",
    "A snapshot of workers or of threads resumes on either, with any number of workers and stages.",
)
@pytest.mark.parametrize("first", ["threads", "workers"])
async def test_a_run_goes_on_anywhere(tmp_path, pool, first):
    await run(job_of(tmp_path / "first", every=3), pool if first == "workers" else None)
    for name, devices in LAYOUTS.items():
        ends = []
        for where in (None, pool):
            folder = tmp_path / f"{name} {where is None}"
            folder.mkdir()
            copytree(tmp_path / "first" / "step-3", folder / "step-3")
            told = Figures()
            summary = await run(job_of(folder, devices=devices), where, told=told)
            ends.append((told.figures, summary.evaluation, summary.snapshot))
            assert len(told.figures) == STEPS - 3
        assert ends[0][:2] == ends[1][:2]
        assert_same_end(ends[0][2], ends[1][2])


@pytest.mark.parametrize("end", ["stop", "cancel"])
async def test_a_run_that_ends_early_goes_on(tmp_path, pool, end):
    told = Figures()
    await run(job_of(tmp_path / "whole"), None, told=told)

    def on_step(step: int) -> None:
        if step == 3:
            first.orders.stop() if end == "stop" else running.cancel()

    disturb()
    job = job_of(tmp_path / "parts", every=2)
    first = TrainingRun(job, whole, progress=Told(on_step), pool=pool)
    running = asyncio.ensure_future(first.run())
    await asyncio.wait([running])
    assert running.cancelled() == (end == "cancel")
    again = Figures()
    summary = await run(job, pool, told=again)
    assert again.figures == told.figures[-len(again.figures) :]
    assert_same_end(tmp_path / "whole" / "step-6", summary.snapshot)


def fed_batch(step: int, batch_size: int = 8) -> Batch:
    x = torch.randn(batch_size, 3, dtype=torch.float64) + step
    return x, x.flip(1)


@pytest.mark.promise("Killed and resumed", "A job with a feed resumes at its step.")
async def test_a_run_with_a_feed_goes_on_at_its_step(tmp_path, pool):
    """The workers make the mini-batches, whose numbers are those of the steps."""
    feed, told, again = Feed(fed_batch), Figures(), Figures()

    def with_feed() -> Workload:
        return replace(whole(), batches=feed)

    def given() -> Workload:
        return replace(whole(), batches=lambda *_: map(feed.batch, count()))

    def on_step(step: int) -> None:
        if step == 3:
            first.orders.stop()

    wanted = await run(job_of(tmp_path / "given"), None, given, told)
    job = job_of(tmp_path / "fed", every=2)
    disturb()
    first = TrainingRun(job, with_feed, progress=Told(on_step), pool=pool)
    await first.run()
    summary = await run(job, pool, with_feed, again)
    assert 0 < len(again.figures) < STEPS
    assert again.figures == told.figures[-len(again.figures) :]
    assert_same_end(wanted.snapshot, summary.snapshot)
    wrong = replace(whole(), batches=Feed(fed_batch, {"batch_size": 9}))
    with pytest.raises(BatchError, match="makes a mini-batch of 9 samples, where 8 are wanted"):
        await run(job_of(tmp_path / "wrong"), pool, lambda: wrong)


@pytest.mark.promise(
    "Killed and resumed",
    "A worker that is lost while it writes a snapshot leaves the former snapshot whole and nothing of the new one.",
)
async def test_a_worker_that_is_lost_while_it_writes_leaves_nothing_of_that_snapshot(tmp_path, pool, monkeypatch):
    write, left = RemoteStages.write_copies, [1]

    def lose(self: RemoteStages, folder: Path) -> dict[str, str]:
        if not left:
            os.kill(pool.workers.up["b"].pid, signal.SIGKILL)
        left.clear()
        return write(self, folder)

    whole_run = await run(job_of(tmp_path / "whole"), None)
    told, job = Told(), job_of(tmp_path / "lost", every=2)
    with monkeypatch.context() as patched:
        patched.setattr(RemoteStages, "write_copies", lose)
        with pytest.raises(WorkerLostError, match="'b' was killed by SIGKILL"):
            await run(job, pool, told=told)
    assert names(tmp_path / "lost") == ["step-2"]
    assert told.notes[0][1].startswith("no snapshot of step 4: WorkerLostError: worker 'b' was")
    summary = await run(job, pool)
    assert_same_end(whole_run.snapshot, summary.snapshot)


@pytest.mark.promise("Bit-identical results", "A job in workers has the figures and states of one on threads.")
async def test_the_example_trains_to_the_same_states_in_workers_of_its_own(tmp_path):
    """Its module is next to the job file, where only the run knows that workers must look."""
    file = load_job(Path(__file__).parents[2] / "examples" / "charlm" / "charlm.toml")
    small = {"width": 16, "heads": 2, "blocks": 2, "max_bytes": 50_000, "sample_length": 5, "context": 16}
    file = file.override("job", parameters=small).override("training", steps=4, batch_size=8, warmup_steps=2)
    ends = []
    for workers in ("threads", "processes"):
        job = file.override("pipeline", devices=("cpu:0", "cpu:1"), workers=workers)
        job = job.override("snapshots", folder=tmp_path / workers)
        job = job.override("observe", trace=tmp_path / f"{workers}.json", timeline=tmp_path / f"{workers}.svg")
        told = Figures()
        summary = await TrainingRun(job, find_entry(job), progress=told).run()
        ends.append((told.figures, summary.evaluation, summary.sample))
        assert (summary.trace is None, summary.timeline is None) == (False, False)
        assert ("starting workers" in told.phases) == (workers == "processes")
    assert ends[0] == ends[1]
    assert len(set(ends[0][0])) == 4
    assert_same_end(tmp_path / "threads" / "step-4", tmp_path / "processes" / "step-4")


async def test_a_job_that_updates_here_what_is_there_is_refused(tmp_path, pool):
    message = 'pipeline.workers: gradients stay in the workers.*: set training.overlap = true, or workers = "threads"'
    with pytest.raises(ValidationError, match=message):
        make_job(tmp_path, pipeline={"workers": "processes"})
    with pytest.raises(JobFileError, match=message):
        TrainingRun(make_job(tmp_path), plain, pool=pool)
