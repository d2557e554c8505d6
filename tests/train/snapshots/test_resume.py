"""A run that goes on from a snapshot is the one that would have been, to the last bit; on other stages, to rounding."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from resume_helpers import (
    STEPS,
    Loader,
    Sink,
    assert_same,
    disturb,
    make_chain,
    make_job,
    make_workload,
    names,
)
from torch import Generator

from asyncpipe.train.adamw import learning_rate
from asyncpipe.train.snapshots.format import read_snapshot
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Workload

pytestmark = pytest.mark.usefixtures("no_leaks", "snapshot_each_step")


def shuffled(batch_size: int, generator: Generator) -> Iterator[Batch]:
    """Those of a data set, in a new order for each epoch: what the generator's state does not tell."""
    data = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    while True:
        for part in torch.randperm(len(data), generator=generator).split(batch_size):
            yield data[part], data[part].flip(1)


def left_at(step: int, folder: Path, new: Path) -> Path:
    """``new``, as if the run in ``folder`` had been killed behind ``step``."""
    new.mkdir()
    shutil.copytree(folder / f"step-{step}", new / f"step-{step}")
    (new / f"step-{step + 1}.incomplete").mkdir()
    disturb()
    return new


def assert_same_end(one: Path, other: Path) -> None:
    """Two last snapshots that differ in nothing but the time that steps took."""
    states, others = read_snapshot(one).states, read_snapshot(other).states
    for run in (states["run"], others["run"]):
        run["meter"]["seconds"] = 0
        for recent in run["meter"]["recent"]:
            recent["seconds"] = recent["bubble_ratio"] = 0
    assert_same(states, others)


MAKERS: dict[str, Callable[[], Workload]] = {
    "skipping": make_workload,
    "memoryless": lambda: replace(make_workload(), memoryless=True),
    "shuffled": lambda: replace(make_workload(), batches=shuffled),
    "with a state of its own": lambda: replace(make_workload(), batches=Loader),
}


@pytest.mark.parametrize("kind", MAKERS)
async def test_a_run_killed_behind_any_step_goes_on_to_the_same_bits(tmp_path, kind):
    sink = Sink()
    await TrainingRun(make_job(tmp_path / "whole"), MAKERS[kind], progress=sink).run()
    assert len(set(sink.losses)) == STEPS
    for step in range(1, STEPS):
        folder = left_at(step, tmp_path / "whole", tmp_path / f"from-{step}")
        went_on = Sink()
        summary = await TrainingRun(make_job(folder), MAKERS[kind], progress=went_on).run()
        assert went_on.losses == sink.losses[step:]
        assert went_on.phases == [f"going on after step {step}, from {folder / f'step-{step}'}"]
        assert (summary.steps, summary.snapshot) == (STEPS, folder / f"step-{STEPS}")
        assert summary.loss == fmean(sink.losses)
        assert_same_end(folder / f"step-{STEPS}", tmp_path / "whole" / f"step-{STEPS}")


async def test_a_run_stopped_and_resumed_again_and_again_is_the_same(tmp_path):
    async def run_a_step() -> list[float]:
        disturb()
        sink = Sink(lambda _: run.orders.stop())
        run = TrainingRun(make_job(tmp_path / "parts"), MAKERS["shuffled"], progress=sink)
        await run.run()
        return sink.losses

    disturb()
    sink = Sink()
    await TrainingRun(make_job(tmp_path / "whole"), MAKERS["shuffled"], progress=sink).run()
    assert [await run_a_step() for _ in range(STEPS)] == [[loss] for loss in sink.losses]
    assert_same_end(tmp_path / "parts" / "step-6", tmp_path / "whole" / "step-6")


async def test_a_run_that_is_through_does_no_step_more(tmp_path, caplog):
    first = await TrainingRun(make_job(tmp_path), make_workload).run()
    sink = Sink()
    summary = await TrainingRun(make_job(tmp_path), make_workload, progress=sink).run()
    assert sink.losses == []
    assert (summary.loss, summary.seconds, summary.snapshot) == (first.loss, first.seconds, first.snapshot)
    assert names(tmp_path) == [f"step-{step}" for step in range(1, 7)]
    assert not caplog.records


async def test_what_is_kept_is_counted_over_all_processes(tmp_path):
    async def run_to(step: int) -> None:
        sink = Sink(lambda done: done == step and run.orders.stop())
        run = TrainingRun(make_job(tmp_path, snapshots={"keep": 1, "keep_every": 2}), make_workload, progress=sink)
        await run.run()

    for step, there in ((3, ["step-2", "step-3"]), (5, ["step-2", "step-4", "step-5"])):
        await run_to(step)
        assert names(tmp_path) == there
    await run_to(STEPS)
    assert names(tmp_path) == ["step-2", "step-4", "step-5", "step-6"]
    assert read_snapshot(tmp_path / "step-6").manifest.number == 6


@pytest.mark.cuda
async def test_a_run_on_cuda_goes_on_with_the_same_losses(tmp_path):
    sink, went_on = Sink(), Sink()
    on_cuda = {"devices": ["cuda:0", "cuda:0"]}
    await TrainingRun(make_job(tmp_path / "whole", pipeline=on_cuda), make_workload, progress=sink).run()
    folder = left_at(3, tmp_path / "whole", tmp_path / "other")
    torch.cuda.manual_seed_all(99)
    await TrainingRun(make_job(folder, pipeline=on_cuda), make_workload, progress=went_on).run()
    assert went_on.losses == pytest.approx(sink.losses[3:], rel=1e-10)


# Another pipeline, or none


FOUR = {"devices": ["cpu:0", "cpu:1", "cpu:2", "cpu:3"], "schedule": "1f1b", "checkpoint": "except_last"}
OTHERS = {
    "2-stage GPipe": {"devices": ["cpu:0", "cpu:1"], "schedule": "gpipe", "checkpoint": "never"},
    "one stage": {"devices": ["cpu:0"], "microbatches": 2},
    "interleaved": {"devices": ["cpu:0", "cpu:1"], "schedule": "interleaved", "stages": 4},
}


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("other", OTHERS)
async def test_four_stages_go_on_as_another_pipeline_with_the_same_losses(tmp_path, other, tied):
    sink, went_on = Sink(), Sink()
    make = make_chain(tied=tied)
    await TrainingRun(make_job(tmp_path / "four", pipeline=FOUR), make, progress=sink).run()
    folder = left_at(3, tmp_path / "four", tmp_path / "other")
    await TrainingRun(make_job(folder, pipeline=OTHERS[other]), make, progress=went_on).run()
    assert went_on.losses == pytest.approx(sink.losses[3:], rel=1e-10)
    assert "pipeline.devices: " in went_on.phases[0]


PLAIN = """\
import sys, torch
from torch import nn

folder, rate, clip = sys.argv[1], float(sys.argv[2]), 0.5
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3))
model.load_state_dict(torch.load(f"{folder}/model.pt", weights_only=True))
matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others}])
optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt", weights_only=True))
data = torch.Generator()
data.set_state(torch.load(f"{folder}/run.pt", weights_only=True)["data"]["generator"])
for _ in range(2):
    x = torch.randn(8, 3, generator=data)
    loss = nn.functional.mse_loss(model(x), x.flip(1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = rate
    optimizer.step(), optimizer.zero_grad()
    print(loss.item())
"""
"""Goes on from a snapshot without asyncpipe: the model is the one that was given to it."""


async def test_some_lines_of_plain_pytorch_go_on_with_the_same_losses(tmp_path):
    sink, job = Sink(), make_job(tmp_path, pipeline=FOUR)
    await TrainingRun(job, make_chain(tied=False), progress=sink).run()
    command = [sys.executable, "-c", PLAIN, str(tmp_path / "step-4"), str(learning_rate(4, job.training))]
    done = await asyncio.to_thread(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    )
    assert done.stderr == ""
    assert [float(line) for line in done.stdout.splitlines()] == pytest.approx(sink.losses[4:], rel=1e-10)
