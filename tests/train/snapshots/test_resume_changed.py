"""A run that goes on may have other settings, and whatever has a state goes on with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_helpers import Sink, make_chain, make_job, make_workload, names
from torch import nn

from asyncpipe.errors import JobFileError
from asyncpipe.train.job_file import Job
from asyncpipe.train.snapshots.format import Manifest, read_snapshot
from asyncpipe.train.snapshots.resume import open_folder, with_chosen_schedule
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Workload

pytestmark = pytest.mark.usefixtures("no_leaks", "snapshot_each_step")


# A state that joins in


class Average:
    """Of the weights, over the steps; any object with these two methods will do."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.weights = model, torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


async def test_whatever_has_a_state_joins_in(tmp_path):
    made: list[Workload] = []

    def make() -> Workload:
        workload = make_workload()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        made.append(replace(workload, states={"average": Average(workload.model), "scaler": scaler}))
        return made[-1]

    def on_step(step: int) -> None:
        made[-1].states["average"].weights += step
        scaler = made[-1].states["scaler"]
        scaler.scale(torch.ones(()))
        scaler.update(float(step))

    await TrainingRun(make_job(tmp_path, training={"steps": 2}), make, progress=Sink(on_step)).run()
    assert names(tmp_path / "step-2") == [
        "average.pt",
        "model.pt",
        "optimizer.pt",
        "run.pt",
        "scaler.pt",
        "snapshot.json",
    ]
    await TrainingRun(make_job(tmp_path, training={"steps": 3}), make, progress=Sink(on_step)).run()
    assert made[-1].states["average"].weights.item() == 1 + 2 + 3
    assert made[-1].states["scaler"].get_scale() == 3.0
    read = read_snapshot(tmp_path / "step-3").states
    assert read["average"] == {"weights": torch.tensor(6.0)}

    late = replace(make_workload(), states={"late": Average(nn.Identity())})
    with pytest.raises(JobFileError, match=r"job\.toml: snapshots\.resume: .*step-3 has no state of late"):
        await TrainingRun(make_job(tmp_path), lambda: late).run()
    made.clear()


@pytest.mark.parametrize("name", ["model", "run", "../model", "a-b", ""])
async def test_a_state_needs_a_name_of_its_own(tmp_path, name):
    workload = replace(make_workload(), states={name: Average(nn.Identity())})
    with pytest.raises(
        JobFileError, match="must be letters, digits and underscores, and none of model, optimizer, run"
    ):
        await TrainingRun(make_job(tmp_path), lambda: workload).run()


# What the job says now


async def test_another_setting_is_used_and_told(tmp_path):
    def settings_of(folder: Path) -> list[tuple[float, bool]]:
        groups = read_snapshot(folder).states["optimizer"]["param_groups"]
        return [(group["weight_decay"], group["fused"]) for group in groups]

    await TrainingRun(make_job(tmp_path), make_workload).run()
    assert settings_of(tmp_path / "step-6") == [(0.1, True), (0.0, True)]
    sink = Sink()
    await TrainingRun(
        make_job(tmp_path, training={"steps": 8, "weight_decay": 0.2}), make_workload, progress=sink
    ).run()
    assert len(sink.losses) == 2
    told = "(training.steps: 8, was 6; training.weight_decay: 0.2, was 0.1)"
    assert sink.phases == [f"going on after step 6, from {tmp_path / 'step-6'} {told}"]
    assert settings_of(tmp_path / "step-8") == [(0.2, True), (0.0, True)]


async def test_another_model_or_job_is_refused_and_nothing_is_touched(tmp_path):
    await TrainingRun(make_job(tmp_path), make_workload).run()
    (tmp_path / "step-7.incomplete").mkdir()
    job = make_job(tmp_path)
    message = r"job\.toml: snapshots\.folder: .*step-6 is of the job 'linear', not of 'other'; name another folder"
    with pytest.raises(JobFileError, match=message):
        open_folder(job.model_copy(update={"name": "other"}))
    assert (tmp_path / "step-7.incomplete").exists()
    with pytest.raises(JobFileError, match=r"model\.pt of .*step-6 does not fit this job: RuntimeError: .*1\.weight"):
        await TrainingRun(job, make_chain(tied=False)).run()
    assert names(tmp_path) == [f"step-{step}" for step in range(1, 7)]


async def test_a_schedule_that_was_chosen_is_not_chosen_again(tmp_path, monkeypatch):
    await TrainingRun(make_job(tmp_path, pipeline={"balance": [2, 4], "checkpoint": "never"}), make_workload).run()
    monkeypatch.setattr("asyncpipe.train.training_run.choose_for", lambda *_, **__: pytest.fail("measured again"))
    job = make_job(tmp_path, pipeline={"schedule": "auto"}, training={"steps": 7})
    sink = Sink()
    await TrainingRun(job, make_workload, progress=sink).run()
    assert len(sink.losses) == 1
    assert "pipeline" not in sink.phases[0]
    pipeline = read_snapshot(tmp_path / "step-7").manifest.parameters["pipeline"]
    assert (pipeline["schedule"], pipeline["balance"], pipeline["checkpoint"]) == ("1f1b", [2, 4], "never")
    monkeypatch.undo()
    chosen: list[Job] = []
    monkeypatch.setattr("asyncpipe.train.training_run.choose_for", lambda job, *_, **__: chosen.append(job) or 1 / 0)
    for changed in ({"devices": ["cpu:0"]}, {"replicas": 2}):
        other = make_job(tmp_path, pipeline={"schedule": "auto", **changed})
        with pytest.raises(ZeroDivisionError):
            await TrainingRun(other, make_workload).run()
    assert len(chosen) == 2


def test_a_pipeline_that_was_chosen_keeps_what_does_not_follow_from_the_choice(tmp_path):
    before = make_job(tmp_path, pipeline={"replicas": 2, "balance": [1, 5]})
    manifest = Manifest(step=1, parameters=before.model_dump(mode="json"))
    overlap = {"training": {"overlap": True, "clip": 0.5}, "faults": {"step_retries": 0}}
    now = make_job(tmp_path, pipeline={"replicas": 2, "schedule": "auto", "shard_optimizer": True}, **overlap)
    table = with_chosen_schedule(now, manifest).pipeline
    assert (table.schedule, table.balance, table.shard_optimizer) == ("1f1b", (1, 5), True)


async def test_a_schedule_that_has_changed_behind_its_name_is_told(tmp_path, monkeypatch, caplog):
    await TrainingRun(make_job(tmp_path, training={"steps": 2}), make_workload).run()
    monkeypatch.setattr("asyncpipe.train.training_run.schedule_sha256", lambda *_: "another")
    await TrainingRun(make_job(tmp_path, training={"steps": 3}), make_workload).run()
    (record,) = caplog.records
    assert record.getMessage().startswith("the schedule '1f1b' orders its tasks differently than when ")
    assert read_snapshot(tmp_path / "step-3").manifest.schedule_sha256 == "another"
