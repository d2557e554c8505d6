"""Figures of steps in the real TensorBoard and MLflow, and what happens while their stores cannot be written."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Iterator, Sequence
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
from asyncpipe.observe.scalars import RunEnd, ScalarObserver, ScalarRow
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


class Store(ScalarObserver):
    """Fails as long as ``works`` is not set."""

    def __init__(self, **options: Any) -> None:
        super().__init__("a store", **options)
        self.works = threading.Event()
        self.tried = threading.Event()
        self.rows: list[ScalarRow] = []
        self.ended: list[RunEnd] = []

    def _write(self, rows: Sequence[ScalarRow]) -> None:
        self.tried.set()
        if not self.works.is_set():
            raise OSError("nobody is there")
        self.rows += rows

    def _finish(self, end: RunEnd) -> None:
        self.ended.append(end)


def test_a_store_that_comes_back_gets_what_it_has_missed(monkeypatch, caplog):
    monkeypatch.setattr(scalars, "FIRST_PAUSE", 0.001)
    told: list[str] = []
    store = Store(failed=told.append)
    for step in range(250):
        store.add(step, {"x": 1.0})
    assert store.tried.wait(30)
    store.works.set()
    store.close()
    assert [row.step for row in store.rows] == list(range(250))
    assert (store.ended, told) == (["finished"], ["raised"])
    assert [line for line in caplog.messages if "nobody is there" in line] == [
        "a store cannot be written, will try again: nobody is there"
    ]
    store.add(1, {"x": 1.0})
    store.close()
    assert len(store.rows) == 250


def test_a_store_that_fails_while_the_end_comes_is_tried_again():
    store, ending = Store(), threading.Event()
    write = store._write

    def late(rows: Sequence[ScalarRow]) -> None:
        if not store.tried.is_set():
            store.tried.set()
            assert ending.wait(30)  # It fails when the end has come.
        write(rows)

    store._write = late
    store.add(1, {"x": 1.0})
    assert store.tried.wait(30)
    closing = threading.Thread(target=store.close)
    closing.start()
    with store._changed:
        assert store._changed.wait_for(lambda: store._end is not None, 30)
    failed = store._failed
    store._failed = lambda reason: (store.works.set(), failed(reason))
    ending.set()
    closing.join(30)
    assert [row.step for row in store.rows] == [1]


def test_what_a_store_never_got_is_said(caplog):
    store = Store()
    for step in range(7):
        store.add(step, {"x": 1.0})
    assert store.tried.wait(30)
    store.close("failed")
    assert store.ended == ["failed"]
    assert "a store lacks 7 steps" in caplog.messages


def test_rows_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(scalars, "MOST_ROWS", 20)
    monkeypatch.setattr(scalars, "MOST_RECORDS", 3)
    told: list[str] = []
    store = Store(failed=told.append)
    store.add(0, {"x": 1.0})
    assert store.tried.wait(30)
    made = record()
    for step in range(1, 11):
        store.add(step, {"x": 1.0})
        store.step_completed(made)
    for step in range(11, 31):
        store.add(step, {"x": 1.0})
    store.works.set()
    store.close()
    steps = [row.step for row in store.rows if "x" in row.values]
    assert steps[0] == 0, "it was being written"
    assert steps[-20:] == list(range(11, 31))
    assert len(store.rows) == 21
    assert told.count("dropped") == 1


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(OptionError, match=r"\.\[tensorboard\]"):
        TensorBoardObserver(tmp_path)
    with pytest.raises(OptionError, match=r"\.\[mlflow\]"):
        MLflowObserver("x")
    job = make_job(tmp_path / "snapshots").override("observe", tensorboard=tmp_path)
    with pytest.raises(OptionError, match=r"\.\[tensorboard\]"):
        asyncio.run(trained(job))
