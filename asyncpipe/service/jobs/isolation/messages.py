"""What the service and the process of a job say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncpipe.core.records.worker_notes import WorkerChange
from asyncpipe.service.jobs.isolation.told_record import ToldRecord
from asyncpipe.train.job_file import Job

__all__ = [
    "CancelRun",
    "FollowSchedule",
    "Collected",
    "Confines",
    "Hung",
    "Keep",
    "Kept",
    "LeaveHosts",
    "Progressed",
    "RunJob",
    "RecordsSeen",
    "StepDone",
    "StepTold",
    "StopRun",
    "Terminate",
    "WorkerTold",
]


# The service


@dataclass(frozen=True, slots=True)
class Confines:
    """What a job's process may use."""

    devices: int
    """How many logical devices the service has."""
    memory: int | None = None
    """Bytes of its own, Python's and torch's included; ``None`` for no limit."""
    device_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each accelerator."""
    is_background: bool = False
    """Whether it has only the processor time that others leave."""


@dataclass(frozen=True, slots=True)
class RunJob:
    """Train ``job``. Asked: answered with a ``TrainingSummary``, or ``EndedElsewhereError`` is raised."""

    job: Job
    make_workload: bytes = field(repr=False)
    """Pickled, so that the entry's module is imported where it cannot hold up anything else."""
    confines: Confines
    watchdog: tuple[float, float]
    """Its factor and floor."""
    worker_path: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Devices that the job may have in the place of its own."""
    left: frozenset[str] = frozenset()
    """The hosts that are to be left now."""


@dataclass(frozen=True, slots=True)
class StopRun:
    """End after the current step, with a snapshot."""


@dataclass(frozen=True, slots=True)
class CancelRun:
    """End between two tasks."""


@dataclass(frozen=True, slots=True)
class FollowSchedule:
    """Asked: follow the schedule ``name`` from the next step on."""

    name: str


@dataclass(frozen=True, slots=True)
class LeaveHosts:
    """These hosts are to be left, and no others."""

    hosts: frozenset[str]


@dataclass(frozen=True, slots=True)
class RecordsSeen:
    """So many records were taken in."""

    records: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What was told before ``Keep`` of this number is in the service's files."""

    number: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """A query: write down what all threads do, and end at once, with all children."""


# The process


@dataclass(frozen=True, slots=True)
class StepTold:
    """The record of a completed step."""

    record: ToldRecord


@dataclass(frozen=True, slots=True)
class StepDone:
    """The figures of a training step, as ``StepListener`` gets them."""

    loss: float
    samples: int
    tokens: int
    duration: float


@dataclass(frozen=True, slots=True)
class WorkerTold:
    """A worker of the job's own came up, or was lost."""

    change: WorkerChange


@dataclass(frozen=True, slots=True)
class Collected:
    """A method of ``PipelineCollector`` was called."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Progressed:
    """A method of ``ProgressSink`` was called."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """Answer with ``Kept`` when what was told before is in the service's files."""

    number: int


@dataclass(frozen=True, slots=True)
class Hung:
    """The watchdog of the process has found so many hangs."""

    hung: int
