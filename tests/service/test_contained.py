"""What a job's code raises to end the process, or what no future can hold: it ends that job, and nothing else."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from manager_helpers import ENTRY, make_settings, submission
from resume_helpers import batches, make_job
from run_helpers import plain
from torch import Generator

from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.service.job_states import JobState
from asyncpipe.service.settings.service_settings import SettingsError
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.training_service import TrainingService
from asyncpipe.train.blocking_calls import DedicatedThread, in_thread
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Forward, Workload

pytestmark = pytest.mark.usefixtures("no_leaks")


async def own_run(function: Callable[[], Any]) -> Any:
    async with DedicatedThread("test") as thread:
        return await thread.run(function)


async def own_submit(function: Callable[[], Any]) -> Any:
    async with DedicatedThread("test") as thread:
        return await in_thread(thread.submit(function).result)


@pytest.mark.parametrize("run", [in_thread, own_run, own_submit])
@pytest.mark.parametrize(
    "error",
    [
        SystemExit(2),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopIteration("none"),
        asyncio.CancelledError(),
        concurrent.futures.CancelledError(),
    ],
    ids=repr,
)
async def test_what_no_loop_could_take_from_a_thread_comes_as_an_ordinary_error(run, error):
    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError) as caught:
        await run(fail)
    assert str(caught.value) == f"{error!r} was raised in a thread"
    assert caught.value.__cause__ is error
    error.__traceback__ = None  # The parameter outlives the test.


@pytest.mark.parametrize("run", [in_thread, own_run, own_submit])
async def test_any_other_error_comes_as_it_is(run):
    error = ZeroDivisionError("mine")

    def fail() -> None:
        raise error

    with pytest.raises(ZeroDivisionError) as caught:
        await run(fail)
    assert caught.value is error
    error.__traceback__ = None


# Runs


def exits(*_: object) -> Any:
    raise SystemExit("usage: prog [-h] --data DATA")


def exiting_batches(batch_size: int, generator: Generator) -> Iterator[Batch]:
    source = batches(batch_size, generator)
    yield next(source)
    exits()


async def exiting_sampler(forward: Forward) -> str:
    await forward(torch.ones(1, 3, dtype=torch.float64))
    exits()
    return ""


def first_of_nothing() -> Workload:
    return next(iter([]))


PLACES: dict[str, Callable[[], Workload]] = {
    "entry": exits,
    "entry, of nothing": first_of_nothing,
    "batches": lambda: replace(plain(), batches=exits),
    "the second batch": lambda: replace(plain(), batches=exiting_batches),
    "held out": lambda: replace(plain(), held_out=exits),
    "sampler": lambda: replace(plain(), sample=exiting_sampler),
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_run_whose_code_exits_ends_with_an_ordinary_error(tmp_path, place):
    async with DevicePool() as pool:
        with pytest.raises(RuntimeError, match=r"SystemExit.*usage|StopIteration") as caught:
            await TrainingRun(make_job(tmp_path), PLACES[place], pool=pool).run()
    assert isinstance(caught.value.__cause__, SystemExit | StopIteration)


@pytest.mark.parametrize("place", ["entry", "entry, of nothing", "sampler"])
async def test_a_service_outlives_a_job_whose_code_exits(tmp_path, caplog, place):
    async with TrainingService(make_settings(tmp_path), entries=Entries({ENTRY: PLACES[place]})) as service:
        job, _ = await service.submit(submission(faults={"snapshot_retries": 1}))
        states = [event.data for event in [event async for event in service.follow(job.id)] if event.kind == "state"]
        assert len(states) == 5  # It was tried twice.
        failed = await service.get(job.id)
        assert failed.state is JobState.FAILED
        assert "SystemExit" in failed.cause or "StopIteration" in failed.cause
        assert service.status().live
    caplog.clear()  # The traceback's frames hold the run.


async def test_a_service_whose_entry_parses_a_command_line_does_not_start(tmp_path):
    (tmp_path / "parsing.py").write_text(
        "import argparse\nargparse.ArgumentParser(prog='mine').parse_args(['--unknown'])\ndef build(): pass\n"
    )
    settings = make_settings(tmp_path / "service", entries=["parsing:build"], entry_path=tmp_path)
    with pytest.raises(SettingsError, match=r"entries\.parsing:build: module 'parsing' could not be .*: SystemExit: 2"):
        async with TrainingService(settings):
            pass
