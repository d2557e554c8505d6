"""What the service and the process of a job say to each other, by their connection, in the order in which it is said.

::

    the service   RunJob                          asked: a ``TrainingSummary``, or ``EndedElsewhereError`` is raised
                  ("schedule", name)              asked: answered when the run follows it
                  ("stop",)  ("cancel",)          end after the step; end between two tasks
                  ("hosts", those to leave)  ("share", its share from the next step on)
                  Invitation                      share devices as the arbiter there says
                  ("kept", number)                what was told before ("keep", number) is in the service's files
    the process   RunStarted, StepProgress, WorkerChange, StepsSeen
                  ("entered", phase)  ("noted", level, text)  ("waiting", reason)  ("snapshot", step, path)
                  ("keep", number)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncpipe.core.policies.share import Share
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.observe.metrics.totals import Totals
from asyncpipe.service.jobs.run_log import RunLog
from asyncpipe.train.job_file import Job

__all__ = ["Confines", "RunJob", "StepsSeen"]


@dataclass(frozen=True, slots=True)
class Confines:
    """What a job's process may use."""

    devices: int
    """How many logical devices the service has."""
    memory: int | None = None
    """Bytes of its own, Python's and torch's included; ``None`` for no limit."""
    device_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each accelerator."""


@dataclass(frozen=True, slots=True)
class RunJob:
    """Train ``job``."""

    job: Job
    make_workload: bytes = field(repr=False)
    """Pickled, so that the entry's module is imported where it cannot hold up anything else."""
    confines: Confines
    hangs: Mapping[str, Any]
    """Options of its pool: when a task hangs."""
    said: RunLog
    """Where its process writes what it says."""
    share: Share
    worker_path: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Devices that the job may have in the place of its own."""
    drained: frozenset[str] = frozenset()
    """The hosts that are drained now."""


@dataclass(frozen=True, slots=True)
class StepsSeen:
    """What was seen of steps since it was told last, about once a second."""

    records: Sequence[StepRecord]
    """The last ones, and those that failed."""
    totals: Totals
    """What all of them add to the metrics."""
    hung: int
    """How many hangs the watchdog has found since the run began."""
