"""Figures of steps in the real TensorBoard and MLflow, and what happens while their stores cannot be written."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from resume_helpers import make_job, make_workload

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.observe import scalars
from asyncpipe.observe.mlflow import MLflowObserver
from asyncpipe.observe.tensorboard import TensorBoardObserver
from asyncpipe.train.job_file import Job
from asyncpipe.train.training_run import TrainingRun

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    # The packages' own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]

FIGURES = {"loss", "learning_rate", "gradient_norm", "seconds", "tokens_per_second", "bubble_ratio"}


def record() -> StepRecord:
    return simulate(lower(find_schedule("gpipe"), Shape(2, 4, 2)))


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads in ``folder``: (step, value) by name."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in found.Tags()["scalars"]}


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a store in a folder."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    tracking = pytest.importorskip("mlflow.tracking")
    return tracking.MlflowClient(f"file://{tmp_path}/mlflow")


async def trained(job: Job) -> None:
    await TrainingRun(job, make_workload).run()


def test_steps_of_a_pipeline_are_scalars_of_tensorboard(tmp_path):
    made = record()
    with TensorBoardObserver(tmp_path) as observer:
        observer.step_completed(made)
        observer.add(7, {"mine": 2.5}, at=5.0)
    found, expected = shown(tmp_path), report(made)
    assert found["mine"] == [(7, 2.5)]
    assert found["bubble_ratio"] == [(made.step, pytest.approx(expected.bubble_ratio))]
    assert {name for name in found if "/" in name} == {f"utilization/{device}" for device in made.graph.devices}


async def test_a_job_that_goes_on_has_each_step_once_in_tensorboard(tmp_path):
    def job(steps: int) -> Job:
        made = make_job(tmp_path / "snapshots", training={"steps": steps})
        return made.override("observe", tensorboard=tmp_path / "board")

    await trained(job(6))
    await trained(job(9))
    found = shown(tmp_path / "board")
    assert found.keys() >= FIGURES
    assert [step for step, _ in found["loss"]] == list(range(1, 10))
    assert all(math.isfinite(value) for _, value in found["loss"])


async def test_a_job_that_goes_on_is_one_run_of_mlflow(tmp_path, mlflow):
    def job(steps: int) -> Job:
        made = make_job(tmp_path / "snapshots", training={"steps": steps})
        return made.override("observe", mlflow=f"file://{tmp_path}/mlflow")

    await trained(job(6))
    await trained(job(9))
    experiment = mlflow.get_experiment_by_name("asyncpipe").experiment_id
    (run,) = mlflow.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.steps"] == "6"
    history = mlflow.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in history] == list(range(1, 10))
    assert run.data.metrics.keys() >= FIGURES


async def test_a_run_that_fails_has_failed(tmp_path, mlflow):
    job = make_job(tmp_path / "snapshots").override("observe", mlflow=f"file://{tmp_path}/mlflow")

    def fails() -> Any:
        raise OptionError("no data")

    with pytest.raises(OptionError, match="no data"):
        await TrainingRun(job, fails).run()
    with MLflowObserver("mine", uri=f"file://{tmp_path}/mlflow", experiment="other") as observer:
        observer.add(1, {"a?b": math.nan})
    two = MLflowObserver("two", uri=f"file://{tmp_path}/mlflow")
    two.add(1, {"x": 1.0})
    two.__exit__(KeyboardInterrupt)
    other = mlflow.get_experiment_by_name("other").experiment_id
    (run,) = mlflow.search_runs([other])
    assert (run.info.run_name, run.info.status, list(run.data.metrics)) == ("mine", "FINISHED", ["a_b"])
    (killed,) = mlflow.search_runs([mlflow.get_experiment_by_name("asyncpipe").experiment_id])
    assert (killed.info.run_name, killed.info.status) == ("two", "KILLED")


def test_steps_that_a_server_never_got_are_counted(monkeypatch, caplog):
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # Nobody listens there once it is closed.
    observer = MLflowObserver("x", uri=f"http://127.0.0.1:{port}", failed=told.append)
    for step in range(7):
        observer.add(step, {"x": 1.0})
    observer.close()
    assert told == ["raised"]
    assert "MLflow lacks 7 steps" in caplog.messages
    observer.add(8, {"x": 1.0})
    observer.close()


def test_steps_that_wait_for_a_server_are_bounded(monkeypatch, caplog):
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setattr(scalars, "MOST_ROWS", 20)
    monkeypatch.setattr(scalars, "CLOSE_SECONDS", 0.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It accepts connections and answers none.
        observer = MLflowObserver("x", uri=f"http://127.0.0.1:{silent.getsockname()[1]}", failed=told.append)
        observer.add(0, {"x": 1.0})
        connection, _ = silent.accept()
        for step in range(1, 31):
            observer.add(step, {"x": 1.0})
        assert told == ["dropped"]
        observer.close()
        assert "MLflow does not answer; its thread is left behind" in caplog.messages
        connection.close()
    observer._thread.join(30)  # The test leaves no thread behind.
    assert "MLflow lacks 31 steps" in caplog.messages


def test_a_folder_that_cannot_be_written_ends_only_the_figures(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    told: list[str] = []
    (tmp_path / "file").touch()
    observer = TensorBoardObserver(tmp_path / "file", failed=told.append)
    observer.add(1, {"x": 1.0})
    observer.close()
    assert told == ["raised"]
    assert sum("TensorBoard does not get every step: it cannot be written" in line for line in caplog.messages) == 1


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(OptionError, match=r"\.\[tensorboard\]"):
        TensorBoardObserver(tmp_path)
    with pytest.raises(OptionError, match=r"\.\[mlflow\]"):
        MLflowObserver("x")
    job = make_job(tmp_path / "snapshots").override("observe", tensorboard=tmp_path)
    with pytest.raises(OptionError, match=r"\.\[tensorboard\]"):
        asyncio.run(trained(job))
