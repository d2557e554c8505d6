"""What tests of stored jobs share: submitting one, and what every history must be."""

from __future__ import annotations

from collections.abc import Iterable

from asyncpipe.service.job_states import TRANSITIONS, JobRecord, JobSpec, JobState, Transition
from asyncpipe.service.store.job_store import JobStore

__all__ = ["check_history", "submitted"]


async def submitted(store: JobStore, spec: JobSpec, key: str | None = None) -> JobRecord:
    """The job that ``store`` adds, or has added before for the same key."""
    return (await store.add(spec, key))[0]


def check_history(history: Iterable[Transition]) -> None:
    """Of one job, from its submission on: each transition begins where the one before ended, and is allowed."""
    state: JobState | None = None
    for transition in history:
        allowed = (JobState.QUEUED,) if state is None else TRANSITIONS[state]
        was = f"job {transition.job} is {state}"
        assert transition.from_state is state, f"{was}: it cannot leave {transition.from_state}"
        assert transition.to_state in allowed, f"{was}: it cannot become {transition.to_state}"
        state = transition.to_state
