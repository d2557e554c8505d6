"""Measurement of a job's model, and the choice of a pipeline for ``schedule = "auto"``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Generator

from asyncpipe.core.hosts import DeviceName
from asyncpipe.core.predict.layer_profile import ADAMW_SCALE, Profile
from asyncpipe.core.predict.planner import Plan
from asyncpipe.ops.model.feed import Feed
from asyncpipe.pipeline.profiling import STEPS, SampleBatch, choose, measure
from asyncpipe.pipeline.step_inputs import NO_TARGET
from asyncpipe.train.adamw import StagedAdamW
from asyncpipe.train.job_file import Job, blaming_key, job_file_error
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

    Devices of other hosts are taken to be like those of this machine that are called so.
    Blocks until the measurement is done; the workload does not change. Raises ``JobFileError`` if the job does not fit
    the workload or this machine, and ``TaskError`` if the model fails.
    """
    with blaming_key(job, "pipeline"):
        return measure(
            workload.model,
            _devices_here(job.pipeline.row),
            _sample(job, workload),
            microbatches,
            steps=steps,
            progress=progress,
        )


def choose_for(job: Job, workload: Workload, *, ahead: int = 0, progress: Callable[[str], None] | None = None) -> Plan:
    """The fastest plan by prediction, with the job's micro-batches and recomputation, and its balance if it has one.

    ``ahead`` is that of the planner: how many steps are submitted behind the one under way.
    Blocks and raises as ``measure_job`` does.
    """
    table = job.pipeline
    with blaming_key(job, "pipeline"):
        return choose(
            workload.model,
            _devices_here(table.row),
            _sample(job, workload),
            table.microbatches,
            balance=table.balance,
            checkpoints=[table.checkpoint],
            parameter_scale=ADAMW_SCALE,
            ahead=ahead,
            replicas=table.replicas,
            shards=table.shard_optimizer,
            progress=progress,
        )


def _devices_here(devices: Sequence[str]) -> list[str]:
    """Devices of this machine in the place of those of other hosts, since profiling needs no workers."""
    return [str(DeviceName.parse(device)._replace(host="")) for device in devices]


def with_plan(job: Job, plan: Plan) -> Job:
    """The job with the pipeline that ``plan`` describes."""
    return job.override(
        "pipeline",
        schedule=plan.schedule,
        balance=plan.balance,
        microbatches=plan.microbatches,
        checkpoint=plan.checkpoint,
    )


def _sample(job: Job, workload: Workload) -> SampleBatch:
    """The first mini-batch of the training."""
    training = job.training
    optimizer = StagedAdamW(training).make if training.overlap else None
    if isinstance(workload.batches, Feed):
        x, *target = workload.batches.batch(0)
        return SampleBatch(x, target[0] if target else NO_TARGET, workload.loss_fn, optimizer=optimizer)
    batch = next(iter(workload.batches(training.batch_size, Generator().manual_seed(training.seed))), None)
    if batch is None:
        raise job_file_error(job.path, f"job.entry: {job.job.entry} makes no batches; there is nothing to measure with")
    return SampleBatch(*batch, workload.loss_fn, optimizer=optimizer)
