"""What a run tells of its snapshots, to whom it told of its steps."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from shutil import rmtree

import pytest
from resume_helpers import STEPS, make_job
from run_helpers import Told, plain

from asyncpipe.train.progress import StepProgress
from asyncpipe.train.training_run import TrainingRun

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_the_sink_is_told_of_snapshots_when_they_are_on_disk_and_before_the_run_ends(tmp_path):
    class Looking(Told):
        def snapshot(self, step: int, path: Path) -> None:
            super().snapshot(step, path)
            assert (path / "snapshot.json").exists()
            assert asyncio.get_running_loop() is loop
            assert not running.done()

    loop, sink = asyncio.get_running_loop(), Looking()
    job = make_job(tmp_path)
    running = asyncio.ensure_future(TrainingRun(job, plain, progress=sink).run())
    await running
    steps = [step for step, _ in sink.snapshots]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 6)
    assert [path for _, path in sink.snapshots] == [tmp_path / f"step-{step}" for step in steps]


async def test_a_snapshot_that_cannot_be_written_is_noted_and_the_run_goes_on(tmp_path, caplog):
    told = Told(lambda _: rmtree(tmp_path / "gone", ignore_errors=True))
    job = make_job(tmp_path / "gone", snapshots={"every": STEPS})
    assert (await TrainingRun(job, plain, progress=told).run()).snapshot is None
    assert not (tmp_path / "gone").exists()
    # The log names the folder; the note, which others may read, does not.
    assert str(tmp_path) in caplog.text
    assert (told.snapshots, told.notes) == ([], [(logging.ERROR, "no snapshot of step 6: No such file or directory")])


@pytest.mark.parametrize("every", [1, 6])
async def test_what_the_sink_raises_about_a_snapshot_ends_the_run(tmp_path, every):
    class Failing(Told):
        def snapshot(self, step: int, path: Path) -> None:
            raise ZeroDivisionError

    job = make_job(tmp_path, snapshots={"every": every})
    with pytest.raises(ZeroDivisionError):
        await TrainingRun(job, plain, progress=Failing()).run()


async def test_a_sink_that_fails_with_the_run_does_not_hide_why_that_failed(tmp_path):
    class Failing(Told):
        def snapshot(self, step: int, path: Path) -> None:
            raise ZeroDivisionError

        def stepped(self, progress: StepProgress) -> None:
            if progress.step == 2:
                raise ArithmeticError("shown")

    job = make_job(tmp_path)
    with pytest.raises((ArithmeticError, ZeroDivisionError)) as caught:
        await TrainingRun(job, plain, progress=Failing()).run()
    # Which one comes first is the disk's business; the second is not raised over it.
    assert caught.value.__context__ is None
