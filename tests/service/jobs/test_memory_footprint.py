"""The memory that a job is let in with: folded over its own schedule, and near what training really takes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Generator, nn

from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.predict.memory import StageMemory
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import JobFileError
from asyncpipe.service.jobs.memory_footprint import footprint, peaks_of
from asyncpipe.train.job_file import Job
from asyncpipe.train.workload import Workload

WIDTH, LAYERS, BATCH = 64, 4, 32


def make_job(**pipeline) -> Job:
    return Job.model_validate(
        {
            "name": "mlp",
            "job": {"entry": "tests:mlp"},
            "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 4, "checkpoint": "never", **pipeline},
            "training": {"steps": 5, "batch_size": BATCH, "learning_rate": 0.1},
        }
    )


def workload(width: int = WIDTH) -> Workload:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.Tanh())]

    def batches(batch_size: int, generator: Generator):
        while True:
            x = torch.randn(batch_size, width, generator=generator)
            yield x, x

    return Workload(nn.Sequential(*layers), nn.functional.mse_loss, batches)


def test_peaks_are_those_of_the_schedule():
    memory = StageMemory(saved=[10, 10], inputs=[1, 1], fixed=[1000, 2000])
    assert peaks_of(memory, find_schedule("gpipe"), 4, 2, CheckpointMode.NEVER) == [1040, 2040]
    # 1F1B holds as many micro-batches as there are stages behind, this one included.
    assert peaks_of(memory, find_schedule("1f1b"), 4, 2, CheckpointMode.NEVER) == [1020, 2010]
    recomputed = peaks_of(memory, find_schedule("gpipe"), 4, 2, CheckpointMode.ALWAYS)
    assert recomputed == [1013, 2013]


def test_parameters_count_with_gradients_and_adamw_and_activations_by_the_schedule():
    made = workload()
    state = torch.random.get_rng_state()
    before = [parameter.detach().clone() for parameter in made.model.parameters()]
    gpipe, interleaved = footprint(make_job(schedule="gpipe"), made), footprint(make_job(), made)
    assert gpipe.keys() == {"cpu:0", "cpu:1"}
    # Half of the layers on each device, their bytes four times; and each micro-batch's activations.
    fixed = 4 * 4 * LAYERS // 2 * (WIDTH * WIDTH + WIDTH)
    value = 4 * WIDTH * BATCH // 4
    for device, peak in gpipe.items():
        assert fixed + 4 * 3 * value <= peak <= fixed + 4 * 7 * value, device
    assert interleaved["cpu:1"] < gpipe["cpu:1"]
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_logical_devices_of_one_name_share_its_memory():
    both = footprint(make_job(devices=["cpu", "cpu"]), workload())
    apart = footprint(make_job(devices=["cpu:0", "cpu:1"]), workload())
    assert both == {"cpu": sum(apart.values())}


@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "interleaved", "stages": 4},
        {"schedule": "zb-h1"},
        {"order": "hint"},
        {"balance": [2, 6]},
        {"schedule": "auto"},
        {"microbatches": 5},
        {"devices": ["cpu:0"]},
        {"checkpoint": "always"},
    ],
    ids=str,
)
def test_whatever_the_pipeline(pipeline):
    peaks = footprint(make_job(**pipeline), workload(8))
    assert set(peaks) <= {"cpu:0", "cpu:1"}
    assert all(peak > 0 for peak in peaks.values())
    gc.collect()


def test_a_job_that_does_not_fit_its_model_is_told():
    with pytest.raises(JobFileError, match="balance"):
        footprint(make_job(balance=[1, 2]), workload(8))
    with pytest.raises(JobFileError, match="pipeline"):
        footprint(make_job(devices=["cpu:0"] * 20), workload(8))


def test_who_is_told_can_end_it():
    class Enough(Exception):
        pass

    def enough(_: str) -> None:
        raise Enough

    with pytest.raises(Enough):
        footprint(make_job(), workload(8), progress=enough)
