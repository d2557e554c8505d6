"""The parts of a run's own state: the place in the data, random numbers, figures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from resume_helpers import Loader, assert_same, batches, disturb
from torch import Generator, nn

from asyncpipe.service.progress import Meter
from asyncpipe.service.resume import Resumed
from asyncpipe.service.run_state import Data, RunState, random_state, set_random_state
from asyncpipe.service.settings import Training
from asyncpipe.service.workload import Batch, Workload

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


def data_of(workload: Workload, *, seed: int = 3, stopping: Callable[[], bool] = lambda: False) -> Data:
    return Data(workload, Training(steps=6, batch_size=8, learning_rate=0.05, seed=seed), stopping)


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


def test_a_loader_with_a_state_skips_nothing_and_goes_on_where_it_was():
    data = data_of(workload_of(Loader))
    for _ in range(5):
        data.next()
    state, wanted = data.state_dict(), data.next()
    again = data_of(workload_of(Loader))
    again.load_state_dict(state)
    assert_same(again.next(), wanted)
    assert again._source.made == 1


def test_batches_that_are_other_ones_are_told(caplog):
    data = data_of(workload_of())
    data.next()
    data_of(workload_of(), seed=4).load_state_dict(data.state_dict())
    (record,) = caplog.records
    assert record.getMessage().startswith("the job's batches are not those of the snapshot's run (another seed, ")


def test_skipping_ends_when_the_run_is_stopped(caplog):
    counted = Counted()
    data = data_of(workload_of())
    for _ in range(5):
        data.next()
    again = data_of(workload_of(counted), stopping=lambda: counted.made == 2)
    again.load_state_dict(data.state_dict())
    assert counted.made == 2
    assert not caplog.records


# Random numbers and figures


def test_every_default_generator_goes_on_where_it_was():
    numpy.random.standard_normal()
    state = random_state()

    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), random.gauss(), numpy.random.standard_normal(3).tolist()]

    wanted = draw()
    disturb()
    assert draw() != wanted
    set_random_state(state)
    assert draw() == wanted


@pytest.mark.cuda
def test_every_cuda_device_goes_on_where_it_was():
    draws = [torch.rand(3, device=f"cuda:{index}") for index in range(torch.cuda.device_count())]
    state = random_state()
    wanted = [torch.rand_like(draw) for draw in draws]
    torch.cuda.manual_seed_all(99)
    set_random_state(state)
    assert_same([torch.rand_like(draw) for draw in draws], wanted)


def test_a_place_without_steps_can_be_saved(tmp_path):
    meter, data = Meter(3), data_of(workload_of())
    state = RunState(meter, data).state_dict()
    torch.save(state, tmp_path / "run.pt")
    RunState(meter, data_of(workload_of())).load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True))
    assert meter.step == 0


def test_what_a_run_goes_on_from_is_told_in_a_line(tmp_path):
    changed = ("training.steps: 8, was 6", "pipeline.microbatches: 4, was 2")
    resumed = Resumed(tmp_path, 6, 2, changed, {}, None, (), {})
    assert str(resumed) == f"going on after step 6, from {tmp_path} ({'; '.join(changed)})"
