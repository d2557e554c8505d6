"""Runs with replicas: figures and states are those of one pipeline with as many micro-batches."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_helpers import STEPS, assert_same, disturb, make_chain, make_job
from run_helpers import Told, clean_state, plain, with_nan
from torch import nn

from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import RunStarted, StepProgress
from asyncpipe.train.run_orders import RunOrders
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Workload

pytestmark = pytest.mark.usefixtures("snapshot_each_step")

ONE = {"devices": ["cpu:0", "cpu:1"], "microbatches": 4}
ROWS = {"devices": [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]], "microbatches": 2}
OVERLAP = {"training": {"overlap": True, "clip": 0.5}, "faults": {"step_retries": 0}}
"""Each stage is updated in the step; otherwise one optimizer, which clips, updates all stages behind it."""


class Figures(Told):
    def __init__(self) -> None:
        super().__init__()
        self.figures: list[float] = []
        self.where = ""
        self.shards: set[bool] = set()

    def started(self, run: RunStarted) -> None:
        self.where = run.where

    def step_completed(self, record: StepRecord) -> None:
        self.shards.add(record.graph.wiring.shards)

    def stepped(self, progress: StepProgress) -> None:
        self.figures += [progress.loss, progress.gradient_norm, progress.learning_rate]
        super().stepped(progress)


def whole() -> Workload:
    """Draws and counts. A bias in front of a batch norm has no gradient but rounding, which AdamW makes large."""
    workload = plain()
    assert isinstance(workload.model, nn.Sequential)
    workload.model[0].bias = None
    return workload


def job_of(folder: Path, pipeline: dict[str, Any], **tables: dict[str, Any]) -> Job:
    return make_job(folder, pipeline=pipeline, snapshots={"every": 99}, **tables)


async def trained(job: Job, make: Callable[[], Workload] = whole) -> tuple[Figures, Any]:
    disturb()
    told = Figures()
    summary = await TrainingRun(job, make, progress=told, observers=[told]).run()
    assert told.shards == {job.pipeline.shard_optimizer}
    assert summary.steps == STEPS
    assert summary.snapshot is not None
    return told, clean_state(summary.snapshot)


@pytest.mark.promise(
    "Right results",
    "A job with replicas has the figures, weights and states of one pipeline, also in a service beside other jobs.",
)
@pytest.mark.parametrize(
    ("rows", "tables"),
    [
        ({}, {}),
        ({"schedule": "gpipe"}, OVERLAP),
        ({"shard_optimizer": True}, OVERLAP),
    ],
    ids=["clipped", "in the step", "sharded"],
)
async def test_a_run_has_the_figures_and_states_of_one_pipeline(tmp_path, rows, tables):
    one, states = await trained(job_of(tmp_path / "one", ONE, **tables))
    many, others = await trained(job_of(tmp_path / "many", ROWS | rows, **tables))
    assert (one.where, many.where) == ("cpu:0, cpu:1", "cpu:0, cpu:1 | cpu:2, cpu:3")
    assert many.figures == pytest.approx(one.figures, rel=1e-10)
    for name in ("model", "optimizer"):
        torch.testing.assert_close(others[name], states[name], rtol=0, atol=1e-10)


async def test_gradients_travel_in_bfloat16_if_a_job_says_so(tmp_path):
    exact, _ = await trained(job_of(tmp_path / "exact", ROWS, **OVERLAP))
    rounded, _ = await trained(job_of(tmp_path / "rounded", ROWS | {"gradient_dtype": "bfloat16"}, **OVERLAP))
    assert rounded.figures != exact.figures
    assert rounded.figures == pytest.approx(exact.figures, rel=0.02)


@pytest.mark.promise(
    "Right results",
    "A job with replicas has the figures, weights and states of one pipeline, also in a service beside other jobs.",
)
async def test_an_update_is_skipped_in_all_replicas(tmp_path):
    skip = {"faults": {"non_finite": "skip"}}

    def make() -> Workload:
        return replace(whole(), batches=with_nan(2))  # Of the second replica's first micro-batch.

    one, states = await trained(job_of(tmp_path / "one", ONE, **skip), make)
    many, others = await trained(job_of(tmp_path / "many", ROWS, **skip), make)
    assert one.skipped == many.skipped == [step == 2 for step in range(STEPS)]
    torch.testing.assert_close(others["model"], states["model"], rtol=0, atol=1e-10)


@pytest.mark.promise(
    "Bit-identical results", "Replicas on threads and in workers are bit-identical, whether steps overlap or not."
)
@pytest.mark.long
@pytest.mark.timeout(240)
async def test_threads_and_processes_have_the_same_bits(tmp_path):
    found = []
    workers = {f"cpu:{number}": f"row {number // 2}" for number in range(4)}
    for name, more in (("threads", {}), ("processes", {"workers": workers})):
        job = job_of(tmp_path / name, ROWS | {"shard_optimizer": True} | more, **OVERLAP)
        told, states = await trained(job, make_chain(tied=False))
        found.append((told.figures, *states["model"].values()))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1:], found[1][1:]))


async def test_a_schedule_that_is_chosen_suits_one_replica(tmp_path):
    told, _ = await trained(job_of(tmp_path / "auto", ROWS | {"schedule": "auto"}), make_chain(tied=False))
    assert any(phase.startswith("chosen: ") for phase in told.phases)


JOB = """
name = "rows"
[job]
entry = "resume_helpers:make_workload"
[pipeline]
devices = {devices}
microbatches = 2
[training]
steps = 6
batch_size = 8
learning_rate = 0.05
overlap = true
[faults]
step_retries = 0
[snapshots]
folder = "{folder}"
"""
RANK = """
import socket, sys
socket.gethostname = lambda: {host!r}
from asyncpipe.worker.under_torchrun import serve
serve()
"""


@pytest.mark.long
@pytest.mark.timeout(240)
def test_torchrun_has_a_row_on_each_host(tmp_path):
    """Ranks of this machine, which is taken for two, so that rows exchange gradients by TCP."""
    helpers = Path(__file__).parents[1] / "support"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    own = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "ASYNCPIPE_CONTROL_PORT": str(port),
        "ASYNCPIPE_SECRET": "s" * 16,
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "PYTHONPATH": os.pathsep.join([str(helpers), *filter(None, sys.path)]),
    }

    def train(name: str, devices: str, *options: str) -> subprocess.CompletedProcess[str]:
        job = tmp_path / f"{name}.toml"
        job.write_text(JOB.format(devices=devices, folder=tmp_path / name), encoding="utf-8")
        command = [*options, "train", str(job), "--no-progress"]
        env = {**os.environ, **own, "RANK": "0"}
        return subprocess.run(
            [sys.executable, "-m", *command], env=env, capture_output=True, text=True, timeout=200, check=False
        )

    done = train("threads", json.dumps(ROWS["devices"]), "asyncpipe")
    assert done.returncode == 0, done.stderr
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK.format(host=host)],
            env={**os.environ, **own, "RANK": str(rank), "ASYNCPIPE_MACHINE": host},
        )
        for rank, host in ((1, "a.example"), (2, "b"))
    ]
    try:
        rows = [["a/cpu:0", "a/cpu:1"], ["b/cpu:0", "b/cpu:1"]]
        done = train("torchrun", json.dumps(rows), "asyncpipe.worker")
        assert done.returncode == 0, done.stderr
        assert [rank.wait(30) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    one, other = (clean_state(tmp_path / name / "step-6") for name in ("threads", "torchrun"))
    assert_same(one, other)


class StopsAt(Figures):
    """Ends the run behind a step."""

    def __init__(self, orders: RunOrders, step: int) -> None:
        super().__init__()
        self.orders, self.last = orders, step

    def stepped(self, progress: StepProgress) -> None:
        super().stepped(progress)
        if progress.step == self.last:
            self.orders.stop()


@pytest.mark.promise("Killed and resumed", "A snapshot of any number of replicas resumes on any other number.")
@pytest.mark.parametrize("shard_optimizer", [False, True])
async def test_a_run_goes_on_with_other_replicas(tmp_path, shard_optimizer):
    """1, 2, 4 and 1 of them, on threads and in workers, over four snapshots."""
    make = make_chain(tied=False)
    legs = [(1, 1, "threads"), (2, 3, "processes"), (4, 4, "threads"), (1, STEPS, "threads")]
    told: list[float] = []
    for replicas, last, workers in legs:
        shards = shard_optimizer and replicas > 1
        devices = [[f"cpu:{2 * row}", f"cpu:{2 * row + 1}"] for row in range(replicas)]
        pipeline = {"devices": devices, "microbatches": 4 // replicas, "workers": workers, "shard_optimizer": shards}
        snapshots = {"every": 1, "resume": replicas > 1 or last > 1}
        job = make_job(tmp_path / "legs", pipeline=pipeline, snapshots=snapshots, **OVERLAP)
        orders = RunOrders()
        figures = StopsAt(orders, last)
        disturb()
        summary = await TrainingRun(job, make, progress=figures, orders=orders).run()
        told += figures.figures
    alone, states = await trained(job_of(tmp_path / "alone", ONE, **OVERLAP), make)
    assert told == pytest.approx(alone.figures, rel=1e-10)
    assert summary.snapshot is not None
    last_states = clean_state(summary.snapshot)
    for name in ("model", "optimizer"):
        torch.testing.assert_close(last_states[name], states[name], rtol=0, atol=1e-10)
