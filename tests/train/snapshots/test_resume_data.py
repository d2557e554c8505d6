"""The parts of a run's own state: the place in the data, random numbers, figures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from resume_helpers import assert_same, batches, disturb
from torch import Generator, nn

from asyncpipe.train.batches import BatchPrefetcher, BatchSource
from asyncpipe.train.blocking_calls import DedicatedThread
from asyncpipe.train.job_file import TrainingTable
from asyncpipe.train.progress import Meter
from asyncpipe.train.randomness import RunRandom
from asyncpipe.train.snapshots.format import Manifest
from asyncpipe.train.snapshots.resume import ResumePoint
from asyncpipe.train.snapshots.run_state import RunState
from asyncpipe.train.workload import Batch, Workload

pytestmark = pytest.mark.usefixtures("no_leaks")


# The place in the data


@dataclass
class Counted:
    """Batches that are counted as they are made."""

    made: int = 0

    def __call__(self, batch_size: int, generator: Generator) -> Iterator[Batch]:
        for batch in batches(batch_size, generator):
            self.made += 1
            yield batch


def workload_of(make: Callable[[int, Generator], Any] = batches, *, memoryless: bool = False) -> Workload:
    return Workload(nn.Linear(3, 3), nn.functional.mse_loss, make, memoryless=memoryless)


def data_of(workload: Workload, *, seed: int = 3, stopping: Callable[[], bool] = lambda: False) -> BatchSource:
    return BatchSource(workload, TrainingTable(steps=6, batch_size=8, learning_rate=0.05, seed=seed), stopping)


@pytest.mark.parametrize(("memoryless", "made"), [(True, 1), (False, 6)])
def test_batches_are_skipped_only_where_they_must(memoryless, made):
    data = data_of(workload_of(memoryless=memoryless))
    for _ in range(5):
        data.next()
    state = data.state_dict()
    wanted, counted = data.next(), Counted()
    again = data_of(workload_of(counted, memoryless=memoryless))
    again.load_state_dict(state)
    assert_same(again.next(), wanted)
    assert counted.made == made
    assert again.state_dict()["taken"] == 6


def test_batches_that_are_other_ones_are_told(caplog):
    data = data_of(workload_of())
    data.next()
    data_of(workload_of(), seed=4).load_state_dict(data.state_dict())
    (record,) = caplog.records
    assert record.getMessage().startswith("the job's batches differ from those of the snapshot's run (another seed, ")


def test_skipping_ends_when_the_run_is_stopped(caplog):
    counted = Counted()
    data = data_of(workload_of())
    for _ in range(5):
        data.next()
    again = data_of(workload_of(counted), stopping=lambda: counted.made == 2)
    again.load_state_dict(data.state_dict())
    assert counted.made == 2
    assert not caplog.records


# One batch ahead


async def test_a_batch_that_nobody_waits_for_is_waited_for_and_its_error_is_nobodys(caplog):
    def make(batch_size: int, generator: Generator) -> Iterator[Batch]:
        yield next(batches(batch_size, generator))
        raised.append(OSError("gone"))
        raise raised[0]

    raised: list[OSError] = []
    async with DedicatedThread("test") as thread:
        feed = BatchPrefetcher(thread, data_of(workload_of(make)), RunRandom(shared=True))
        await feed.next()
        feed.advance(more=True)
    assert len(raised) == 1
    raised.clear()
    del feed
    assert not caplog.records


# Random numbers and figures


def draw(numbers: RunRandom) -> list[Any]:
    with numbers.drawing():
        mine = torch.rand(3).tolist()
    return [mine, torch.rand(3).tolist(), random.random(), random.gauss(), numpy.random.standard_normal(3).tolist()]


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_where_the_run_is_alone_every_default_generator_goes_on_where_it_was(shared):
    numpy.random.standard_normal()
    numbers = RunRandom(shared=shared)
    numbers.build(3, int)
    torch.set_rng_state(numbers.position)
    state = {**numbers.state_dict(), **numbers.device_state()}
    mine, *wanted = draw(numbers)
    disturb()
    torch.manual_seed(98)
    numbers.load_state_dict(state)
    went_on, *others = draw(numbers)
    assert went_on == mine
    assert (others == wanted) is not shared
    assert set(state) == ({"cpu"} if shared else {"cpu", "python", "numpy"} | ({"cuda"} & set(state)))


def test_where_others_run_what_one_that_was_alone_has_kept_of_the_process_is_left_there():
    alone, shared = RunRandom(shared=False), RunRandom(shared=True)
    alone.build(3, int)
    state = alone.state_dict()
    wanted = draw(alone)
    disturb()
    _, *others = draw(alone)
    disturb()
    shared.load_state_dict(state)
    assert draw(shared) == [wanted[0], *others]


@pytest.mark.cuda
def test_every_cuda_device_goes_on_where_it_was():
    numbers = RunRandom(shared=False)
    numbers.build(3, int)
    draws = [torch.rand(3, device=f"cuda:{index}") for index in range(torch.cuda.device_count())]
    state = {**numbers.state_dict(), **numbers.device_state()}
    wanted = [torch.rand_like(draw) for draw in draws]
    torch.cuda.manual_seed_all(99)
    numbers.load_state_dict(state)
    assert_same([torch.rand_like(draw) for draw in draws], wanted)


def test_a_place_without_steps_can_be_saved_and_read(tmp_path):
    meter, numbers = Meter(3), RunRandom(shared=False)
    with Idle() as thread:
        state = RunState(meter, BatchPrefetcher(thread, data_of(workload_of()), numbers)).state_dict()
        torch.save(state, tmp_path / "run.pt")
        read = torch.load(tmp_path / "run.pt", weights_only=True)
        RunState(meter, BatchPrefetcher(thread, data_of(workload_of()), numbers)).load_state_dict(read)
    assert (meter.step, meter.skipped) == (0, 0)


class Idle(DedicatedThread):
    """A thread that nothing is asked of."""

    def __init__(self) -> None:
        super().__init__("none")

    def __enter__(self) -> DedicatedThread:
        return self

    def __exit__(self, *_: object) -> None:
        assert not self._executor._threads


def test_what_a_run_goes_on_from_is_told_in_a_line(tmp_path):
    changed = ("training.steps: 8, was 6", "pipeline.microbatches: 4, was 2")
    resumed = ResumePoint(tmp_path, Manifest(step=6), {}, changed, ())
    assert str(resumed) == f"going on after step 6, from {tmp_path} ({'; '.join(changed)})"
