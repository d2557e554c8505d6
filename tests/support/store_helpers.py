"""What tests of stored jobs share: submitting one, and what every history must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

from asyncpipe.service.job_states import TRANSITIONS, JobRecord, JobState, Transition
from asyncpipe.service.store.job_records import JobEvent, LossRow
from asyncpipe.service.store.job_store import JobStore

__all__ = [
    "CANCELLED",
    "FAILED",
    "FINISHED",
    "LEGAL",
    "PAUSED",
    "QUARANTINED",
    "QUEUED",
    "RUNNING",
    "SPEC",
    "check_history",
    "numbered",
    "progress",
    "submitted",
    "ticking",
]

SPEC: dict[str, Any] = {"name": "job", "entry": "package.module:factory", "parameters": {"width": 16}, "tags": []}
"""The document of a job."""
QUEUED, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED, QUARANTINED = JobState

LEGAL = {
    QUEUED: {RUNNING, PAUSED, FAILED, CANCELLED, QUARANTINED},
    RUNNING: {QUEUED, PAUSED, FINISHED, FAILED, CANCELLED, QUARANTINED},
    PAUSED: {QUEUED, FAILED, CANCELLED, QUARANTINED},
    FINISHED: set(),
    FAILED: {QUEUED},
    CANCELLED: {QUEUED},
    QUARANTINED: {QUEUED},
}
"""By state: those into which a job may go from it."""


def ticking() -> Callable[[], float]:
    """A clock that goes on by a second each time it is looked at."""
    numbers = count(1000)
    return lambda: float(next(numbers))


def numbered() -> Callable[[float], str]:
    """Ids that say in which order they were made."""
    numbers = count(1)
    return lambda at: f"job-{next(numbers)}"


async def submitted(store: JobStore, spec: Mapping[str, Any], key: str | None = None) -> JobRecord:
    """The job that ``store`` adds, or has added before for the same key."""
    return (await store.add(spec, key))[0]


async def progress(store: JobStore, job: str, step: int, snapshot: str | None = None) -> None:
    """``job`` has done ``step`` steps, and has taken ``snapshot``."""
    events = [] if snapshot is None else [JobEvent(0, 0.0, "snapshot", {"step": step, "name": snapshot})]
    await store.write_records(job, [LossRow(step, 0.5, 0.1, 0.1, 1)], events)


def check_history(history: Iterable[Transition]) -> None:
    """Of one job, from its submission on: each transition begins where the one before ended, and is allowed."""
    state: JobState | None = None
    for transition in history:
        allowed = (JobState.QUEUED,) if state is None else TRANSITIONS[state]
        was = f"job {transition.job} is {state}"
        assert transition.from_state is state, f"{was}: it cannot leave {transition.from_state}"
        assert transition.to_state in allowed, f"{was}: it cannot become {transition.to_state}"
        state = transition.to_state
