"""The figures of a job's steps for TensorBoard and MLflow, as its ``[observe]`` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from asyncpipe.observe.scalars import ScalarObserver, report_scalars
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import StepProgress

__all__ = ["scalar_observers", "scalars_of"]


def scalar_observers(job: Job, step: int, failed: Callable[[str], object]) -> list[ScalarObserver]:
    """The observers that ``job`` wants, which goes on after ``step``; 0 if it begins. Blocks, to import them.

    Raises ``OptionError`` if what it wants is not installed.
    """
    observe = job.observe
    found: list[ScalarObserver] = []
    if observe.tensorboard is not None:
        from asyncpipe.observe.tensorboard import TensorBoardObserver

        found.append(TensorBoardObserver(observe.tensorboard, first=step + 1, failed=failed))
    if observe.mlflow is not None:
        from asyncpipe.observe.mlflow import MLflowObserver

        found.append(
            MLflowObserver(
                job.name,
                uri=observe.mlflow,
                experiment=observe.mlflow_experiment,
                params=dict(_flat(job.model_dump(mode="json", include={"job", "pipeline", "training"}))),
                key=None if job.snapshots is None else str(job.snapshots.folder.resolve()),
                goes_on=step > 0,
                failed=failed,
            )
        )
    return found


def scalars_of(progress: StepProgress) -> dict[str, float]:
    """The figures of a step, by name."""
    return {
        **report_scalars(progress.report),
        "loss": progress.loss,
        "learning_rate": progress.learning_rate,
        "gradient_norm": progress.gradient_norm,
        "tokens_per_second": progress.tokens_per_second,
        "seconds": progress.seconds,
    }


def _flat(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{where}{key}.")
        elif value is not None:
            yield f"{where}{key}", value
