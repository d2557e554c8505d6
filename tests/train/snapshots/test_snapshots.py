"""Snapshots: what is in them, what training waits for, and which are kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from resume_helpers import STEPS, Part, Sink, batches, names
from resume_helpers import make_job as make_run
from torch import Generator, Tensor, nn

from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.train.adamw import BETAS, learning_rate
from asyncpipe.train.job_file import Job
from asyncpipe.train.snapshots.run_state import schedule_sha256
from asyncpipe.train.snapshots.writer import SnapshotWriter
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Workload

pytestmark = pytest.mark.usefixtures("no_leaks")


def make_job(folder: Path, **snapshots: Any) -> Job:
    return make_run(folder, training={"clip": None}, snapshots={"resume": False, **snapshots})


def make_workload() -> Workload:
    model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()
    return Workload(model, nn.functional.mse_loss, batches)


class Gate:
    """Holds up ``fsync`` until it is opened."""

    def __init__(self) -> None:
        self.reached = Event()
        self.open = Event()
        self.real = os.fsync

    def __call__(self, descriptor: int) -> None:
        self.reached.set()
        assert self.open.wait(30)
        self.real(descriptor)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(os, "fsync", made)
    yield made
    made.open.set()


def load(folder: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"{name}.pt", weights_only=True)
    return loaded


# What is in one


async def test_plain_torch_goes_on_from_a_snapshot_with_the_same_losses(tmp_path):
    sink, job = Sink(), make_job(tmp_path, every=3)
    summary = await TrainingRun(job, make_workload, progress=sink).run()
    assert names(tmp_path) == ["step-3", "step-6"]
    assert summary.snapshot == tmp_path / "step-6"
    assert plain_losses(tmp_path / "step-3", job, first=3) == pytest.approx(sink.losses[3:], rel=1e-12)


def plain_losses(snapshot: Path, job: Job, first: int) -> list[float]:
    """Those of the steps from ``first`` on, without a pipeline."""
    workload = make_workload()
    model = workload.model
    model.load_state_dict(load(snapshot, "model"))
    parameters = list(model.parameters())
    groups = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], betas=BETAS, fused=True)
    optimizer.load_state_dict(load(snapshot, "optimizer"))
    data = islice(workload.batches(8, Generator().manual_seed(3)), first, STEPS)
    losses = []
    for step, (x, target) in enumerate(data, first):
        # A batch norm sees micro-batches, and so does its counterpart here.
        parts = list(zip(x.chunk(4), target.chunk(4), strict=True))
        loss = torch.stack([workload.loss_fn(model(part), wanted) for part, wanted in parts]).mean()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, job.training)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


async def test_a_snapshot_says_what_it_is_and_has_the_sums_of_its_files(tmp_path):
    await TrainingRun(make_job(tmp_path, every=100), make_workload).run()
    folder = tmp_path / "step-6"
    assert names(folder) == ["model.pt", "optimizer.pt", "run.pt", "snapshot.json"]
    about = json.loads((folder / "snapshot.json").read_text(encoding="utf-8"))
    assert (about["format"], about["job"], about["step"], about["schedule"]) == (1, "linear", 6, "1f1b")
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"].keys() == {"asyncpipe", "torch", "python"}
    assert (about["number"], about["parameters"]["training"]["seed"]) == (1, 3)
    assert about["parameters"]["pipeline"]["devices"] == ["cpu:0", "cpu:1"]
    schedule = find_schedule("1f1b")
    assert (
        about["schedule_sha256"]
        == schedule_sha256(schedule, Shape(2, 4, 2))
        != schedule_sha256(schedule, Shape(4, 4, 4))
    )
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names(folder)[:3]}
    assert about["sha256"] == sums
    assert all(tensor.device.type == "cpu" for tensor in load(folder, "model").values())


async def test_what_is_shared_stays_shared_and_nothing_else_is_saved(tmp_path):
    large = torch.arange(1_000_000)
    state = {"a": large[:4], "b": large[:4], "c": large[1:5], "nested": [(large[:4], "x", None)], "none": large[:0]}
    sparse = torch.eye(3).to_sparse()
    async with SnapshotWriter(make_job(tmp_path)) as snapshots:
        await snapshots.after_step(1, {"part": Part(**state, sparse=sparse)})
        large.zero_()
    loaded = load(tmp_path / "step-1", "part")
    assert (loaded["a"].tolist(), loaded["c"].tolist(), loaded["none"].tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4], [])
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() == loaded["nested"][0][0].data_ptr()
    assert loaded["nested"][0][1:] == ("x", None)
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert (tmp_path / "step-1" / "part.pt").stat().st_size < 10_000


async def test_what_could_not_be_read_back_safely_is_not_written(tmp_path, caplog):
    async with SnapshotWriter(make_job(tmp_path)) as snapshots:
        await snapshots.after_step(1, {"part": Part(generator=Path("a pickled object"))})
    assert names(tmp_path) == []
    (record,) = caplog.records
    assert re.search(r"TypeError: part holds pathlib.*; use tensors and plain Python values only", record.getMessage())


async def test_a_models_versions_are_saved_with_it(tmp_path):
    model = nn.BatchNorm1d(2)
    async with SnapshotWriter(make_job(tmp_path)) as snapshots:
        await snapshots.after_step(1, {"model": model})
    assert load(tmp_path / "step-1", "model")._metadata == model.state_dict()._metadata


# When


async def test_training_goes_on_while_a_snapshot_is_written_which_is_that_of_its_step(tmp_path, gate):
    weights: dict[int, Tensor] = {}
    built: list[Workload] = []

    def make() -> Workload:
        built.append(make_workload())
        return built[0]

    def on_step(step: int) -> None:
        weights[step] = built[0].model[0].weight.detach().clone()
        if step == 5:
            assert gate.reached.wait(30)
            gate.open.set()

    await TrainingRun(make_job(tmp_path, every=2), make, progress=Sink(on_step)).run()
    # The one of step 4 was due while the first was in flight; the last one is not left out for it.
    assert names(tmp_path) in (["step-2", "step-5", "step-6"], ["step-2", "step-6"])
    for folder in tmp_path.iterdir():
        saved = load(folder, "model")["0.weight"]
        assert torch.equal(saved, weights[int(folder.name.removeprefix("step-"))])
    assert not torch.equal(weights[2], weights[5])


async def test_a_snapshot_that_is_due_too_early_is_taken_late(tmp_path, gate):
    async with SnapshotWriter(make_job(tmp_path, every=2)) as snapshots:
        for step in (1, 2, 3, 4):
            await snapshots.after_step(step, {"part": Part(step=step)})
        gate.open.set()
        await snapshots.finish()
        assert snapshots.last == tmp_path / "step-2"
        for step in (5, 6):
            await snapshots.after_step(step, {"part": Part(step=step)})
    assert names(tmp_path) == ["step-2", "step-5"]
    assert load(tmp_path / "step-5", "part") == {"step": 5}


async def test_the_last_step_has_a_snapshot_for_which_the_end_waits(tmp_path, gate):
    copied_when_free: list[bool] = []

    class Noting(Part):
        def state_dict(self) -> dict[str, Any]:
            copied_when_free.append(gate.open.is_set())
            return self.state

    async with SnapshotWriter(make_job(tmp_path, every=4)) as snapshots:
        await snapshots.after_step(4, {"part": Part()})
        last = asyncio.ensure_future(snapshots.after_last_step(5, {"part": Noting()}))
        await asyncio.to_thread(gate.reached.wait)
        for _ in range(10):
            await asyncio.to_thread(int)
        gate.open.set()
        await last
    assert copied_when_free == [True]
    assert names(tmp_path) == ["step-4", "step-5"]


async def test_there_are_not_two_of_one_step(tmp_path):
    async with SnapshotWriter(make_job(tmp_path)) as snapshots:
        await snapshots.after_last_step(0, {"part": Part()})
        await snapshots.after_step(1, {"part": Part()})
        await snapshots.after_last_step(1, {"part": Part()})
    assert names(tmp_path) == ["step-1"]


async def test_a_run_that_is_cancelled_waits_for_the_snapshot_in_flight(tmp_path, gate):
    def on_step(step: int) -> None:
        if step == 4:
            running.cancel()

    running = asyncio.ensure_future(
        TrainingRun(make_job(tmp_path, every=2), make_workload, progress=Sink(on_step)).run()
    )
    await asyncio.to_thread(gate.reached.wait)
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert names(tmp_path) == ["step-2"]


async def test_only_the_last_ones_are_kept_and_what_is_not_ours_stays(tmp_path, caplog):
    (tmp_path / "notes.txt").write_text("mine")
    async with SnapshotWriter(make_job(tmp_path, keep=2)) as snapshots:
        for step in range(1, 6):
            await snapshots.after_step(step, {"part": Part()})
            await snapshots.finish()
    assert names(tmp_path) == ["notes.txt", "step-4", "step-5"]
    assert not caplog.records


async def test_every_nth_is_kept_for_good_and_does_not_count_among_the_last(tmp_path):
    async with SnapshotWriter(make_job(tmp_path, keep=2, keep_every=3)) as snapshots:
        for step in range(10, 90, 10):
            await snapshots.after_step(step, {"part": Part()})
            await snapshots.finish()
    assert names(tmp_path) == ["step-30", "step-60", "step-70", "step-80"]


@pytest.mark.cuda
async def test_states_on_cuda_are_saved_from_the_cpu(tmp_path):
    weight = torch.arange(1000.0, device="cuda")
    async with SnapshotWriter(make_job(tmp_path)) as snapshots:
        await snapshots.after_step(1, {"part": Part(weight=weight)})
        weight.zero_()
    loaded = load(tmp_path / "step-1", "part")["weight"]
    assert loaded.device.type == "cpu"
    assert torch.equal(loaded, torch.arange(1000.0))
