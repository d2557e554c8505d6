"""What ``schedule = "auto"`` in a job file stands for, and the measurements of a job's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Generator

from asyncpipe.core.predict.layer_profile import ADAMW_SCALE, Profile
from asyncpipe.core.predict.planner import Plan
from asyncpipe.errors import OptionError
from asyncpipe.pipeline.profiling import STEPS, SampleBatch, choose, measure
from asyncpipe.train.job_file import AUTO, Job, job_file_error
from asyncpipe.train.workload import Workload

__all__ = ["choose_for", "measure_job", "with_plan"]


def measure_job(
    job: Job,
    workload: Workload,
    microbatches: Sequence[int],
    *,
    steps: int = STEPS,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """The measured costs of the job's model on its devices, with mini-batches of its size.

    Blocks until it is done; nothing of the workload changes. Raises ``JobFileError`` where the job does not fit the
    workload or this machine, ``TaskError`` where the model fails.
    """
    try:
        return measure(
            workload.model, job.pipeline.devices, _sample(job, workload), microbatches, steps=steps, progress=progress
        )
    except OptionError as error:
        raise job_file_error(job.path, f"pipeline: {error}") from error


def choose_for(job: Job, workload: Workload, *, progress: Callable[[str], None] | None = None) -> Plan:
    """The plan that ``schedule = "auto"`` stands for: with the job's micro-batches, recomputation and balance, if it
    has one. Blocks, and raises, as ``measure_job``."""
    table = job.pipeline
    if table.order != "strict":
        raise job_file_error(job.path, f'pipeline.order: must be "strict" with schedule "{AUTO}", got "{table.order}"')
    if table.stages is not None:
        raise job_file_error(job.path, f'pipeline.stages: leave it out with schedule "{AUTO}", which chooses it')
    try:
        return choose(
            workload.model,
            table.devices,
            _sample(job, workload),
            table.microbatches,
            balance=table.balance,
            checkpoints=[table.checkpoint],
            parameter_scale=ADAMW_SCALE,
            progress=progress,
        )
    except OptionError as error:
        raise job_file_error(job.path, f"pipeline: {error}") from error


def with_plan(job: Job, plan: Plan) -> Job:
    """The job with what ``plan`` says of its pipeline."""
    options = plan.options()
    return job.override("pipeline", **{**options, "balance": plan.balance, "checkpoint": plan.checkpoint})


def _sample(job: Job, workload: Workload) -> SampleBatch:
    """The first mini-batch of the training."""
    training = job.training
    batch = next(iter(workload.batches(training.batch_size, Generator().manual_seed(training.seed))), None)
    if batch is None:
        raise job_file_error(job.path, f"job.entry: {job.job.entry} makes no batches; there is nothing to measure with")
    return SampleBatch(*batch, workload.loss_fn)
