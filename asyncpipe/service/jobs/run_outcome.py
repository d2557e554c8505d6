"""How a run of a job ended, and what becomes of the job then: pure functions of what was raised, asked and counted.

::

    an error ─▶ failure ─▶ RunOutcome ─▶ next_state ─▶ queued again, failed, quarantined …

A ``RunOutcome`` holds the text of an error, not the error: an exception keeps the frames, and with them the tensors, of
the step that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from asyncpipe.errors import AsyncpipeError, HostLostError, JobFileError, TaskError
from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.jobs.failure_texts import full_traceback, root_line
from asyncpipe.train.batches import DataError
from asyncpipe.train.step_failures import NonFiniteLossError

__all__ = ["FAILURES", "EndedElsewhereError", "RunEnding", "RunOutcome", "failure", "is_permanent", "next_state"]


class RunEnding(Enum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """After a step, with a snapshot, on request."""
    CANCELLED = "cancelled"
    """Between two tasks, on request."""
    FAILED = "failed"
    """May succeed from a snapshot: a task failed, hung, or ran out of memory; data could not be read."""
    FAILED_PERMANENTLY = "failed permanently"
    """Would fail again, or has waited for its hosts long enough: the job does not fit its entry or this machine, its
    loss is NaN or infinite, or it cannot go on without what it has lost."""
    CRASHED = "crashed"
    """Its process is gone, and nobody here has ended it: the OOM killer has, or it has crashed, or answered nothing."""


FAILURES = frozenset({RunEnding.FAILED, RunEnding.FAILED_PERMANENTLY, RunEnding.CRASHED})


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended, and why."""

    ending: RunEnding
    cause: str
    root: str | None = None
    """The root line of a failure."""


class EndedElsewhereError(AsyncpipeError, RuntimeError):
    """A run in a process of its own has ended as its ``outcome`` says."""

    def __init__(self, outcome: RunOutcome) -> None:
        super().__init__(outcome.cause)
        self.outcome = outcome


def next_state(outcome: RunOutcome, record: JobRecord, most_crashes: int, shutdown: str | None) -> tuple[JobState, str]:
    """The next state of a job whose run ended with ``outcome``, and the transition's cause.

    ``record`` counts this run among its failures or crashes; with ``most_crashes`` it is quarantined. ``shutdown`` is
    why the service ends, if it does.
    """
    ending, cause, asked_cause = outcome.ending, outcome.cause, record.asked_cause or "requested"
    if ending is RunEnding.FINISHED:
        return JobState.FINISHED, cause
    if record.asked is JobState.CANCELLED:
        return JobState.CANCELLED, asked_cause
    if ending is RunEnding.FAILED_PERMANENTLY:
        return JobState.FAILED, cause
    if ending is RunEnding.FAILED and record.failures > record.retries:
        times = f" ({record.failures} times since the last snapshot)" if record.failures > 1 else ""
        return JobState.FAILED, cause + times
    attempt = f"attempt {record.crashes} of {most_crashes}"
    if ending is RunEnding.CRASHED and record.crashes >= most_crashes:
        return JobState.QUARANTINED, f"{cause}; {attempt} since its last snapshot"
    if record.asked is JobState.PAUSED:
        return JobState.PAUSED, asked_cause
    if ending is RunEnding.CRASHED:
        return JobState.QUEUED, f"tried again from its last snapshot, since {cause}; that was {attempt}"
    if ending is RunEnding.FAILED:
        return JobState.QUEUED, f"tried again from its last snapshot ({record.failures} of {record.retries}): {cause}"
    return JobState.QUEUED, shutdown or "resumed before its run had stopped"


def is_permanent(error: BaseException) -> bool:
    """Whether a run that failed with ``error`` would fail again from any snapshot.

    True for the package's own errors about a job's values and types, for a loss that is NaN or infinite, and for lost
    hosts that the run has waited for. False for
    a loader that fails, a task that raises or hangs, and a lack of memory: these may succeed next time.
    """
    if isinstance(error, EndedElsewhereError):
        return error.outcome.ending is RunEnding.FAILED_PERMANENTLY
    cause = error.__cause__ if isinstance(error, TaskError) else error
    if isinstance(cause, DataError):
        return False
    if isinstance(cause, JobFileError | NonFiniteLossError | HostLostError):
        return True
    return isinstance(cause, AsyncpipeError) and isinstance(cause, ValueError | TypeError)


def failure(error: BaseException, said: Callable[[str, str], object]) -> RunOutcome:
    """The outcome of a run that has raised ``error``, whose traceback ``said`` gets."""
    if isinstance(error, EndedElsewhereError):
        return error.outcome
    text = full_traceback(error)
    said("traceback", text)
    cause = str(error) if isinstance(error, AsyncpipeError) else f"{type(error).__name__}: {error}"
    ending = RunEnding.FAILED_PERMANENTLY if is_permanent(error) else RunEnding.FAILED
    return RunOutcome(ending, cause or type(error).__name__, root_line(text))
