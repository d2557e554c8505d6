"""Lines in the log about jobs: one for each change of state, and for each step that is tried again.

::

    job 01j… (charlm) begins, attempt 2, from step-40: it is its turn
    job 01j… (charlm) failed at step 43, attempt 2: the loss of step 43 is nan

Every record has what the line says as attributes (``job``, ``job_name``, ``event``, ``state``, ``step`` …), for formats
that show them (``asyncpipe serve --log-format json``).
"""

from __future__ import annotations

import logging

from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobState

__all__ = ["log_change", "log_note", "log_recovered"]

_logger = logging.getLogger("asyncpipe.service.jobs")

_LEVELS = {JobState.FAILED: logging.ERROR, JobState.QUARANTINED: logging.ERROR}


def log_change(before: JobState | None, record: JobRecord, *, is_retry: bool = False) -> None:
    """The line about a job that has changed its state; ``before`` is ``None`` for a submission.

    ``is_retry`` if a run has failed and the job goes on from its last snapshot.
    """
    event, words = _event(before, record, is_retry=is_retry)
    level = logging.WARNING if is_retry else _LEVELS.get(record.state, logging.INFO)
    _log(level, record, event, f"{words}: {record.cause}")


def log_recovered(record: JobRecord) -> None:
    """The line about a job that was unfinished when the previous service ended, with the state that it has now."""
    level = _LEVELS.get(record.state, logging.WARNING)
    _log(
        level, record, "recovered", f"is {record.state}{_from(record)}, as the last service has left it: {record.cause}"
    )


def log_note(level: int, record: JobRecord, text: str) -> None:
    """The line about something that happened to a job without a change of its state."""
    _log(level, record, "note", text)


def _event(before: JobState | None, record: JobRecord, *, is_retry: bool) -> tuple[str, str]:
    """A word for programs, and words for people."""
    at = f" at step {record.step}" if record.step else ""
    match record.state:
        case JobState.QUEUED if before is None:
            return "submitted", f"is submitted, for {record.entry}"
        case JobState.QUEUED if is_retry:
            return "retry", f"has failed in attempt {record.attempts}"
        case JobState.QUEUED if before in FINAL_STATES:
            return "retry", f"was {before} and is tried again{_from(record)}"
        case JobState.QUEUED:
            return "queued", f"is queued{_from(record)}"
        case JobState.RUNNING:
            return "begin", f"begins, attempt {record.attempts}{_from(record, ', ')}"
        case JobState.PAUSED:
            return "paused", f"is paused{at}"
        case _:
            attempt = f", attempt {record.attempts}" if record.attempts else ""
            is_past = record.state in (JobState.FINISHED, JobState.FAILED)
            return "end", f"{'' if is_past else 'is '}{record.state}{at}{attempt}"


def _from(record: JobRecord, separator: str = " ") -> str:
    return "" if record.snapshot is None else f"{separator}from {record.snapshot}"


def _log(level: int, record: JobRecord, event: str, text: str) -> None:
    more = {
        "job": record.id,
        "job_name": record.name,
        "event": event,
        "state": str(record.state),
        "attempt": record.attempts,
        "step": record.step,
        "snapshot": record.snapshot,
        "cause": record.cause,
    }
    # A line is a line, whatever a job's code has raised.
    _logger.log(level, "job %s (%s) %s", record.id, record.name, " ".join(text.split()), extra=more)
