"""The log's lines about jobs: one for each change, with ids and reasons."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.jobs.job_lines import log_change, log_note, log_recovered

QUEUED, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED, QUARANTINED = JobState
AT_FIRST = JobRecord("01j", {"name": "charlm", "entry": "m:f"}, QUEUED, "submitted", 0.0, 0.0)
LATER = replace(AT_FIRST, attempts=2, step=43, snapshot="step-40")


@pytest.mark.promise("Reported, not silent", "Each change of a job's state is one line of the log.")
@pytest.mark.parametrize(
    ("before", "state", "is_retry", "level", "event", "text"),
    [
        (QUEUED, RUNNING, False, logging.INFO, "begin", "begins, attempt 2, from step-40: why"),
        (RUNNING, FINISHED, False, logging.INFO, "end", "finished at step 43, attempt 2: why"),
        (RUNNING, FAILED, False, logging.ERROR, "end", "failed at step 43, attempt 2: why"),
        (QUEUED, QUARANTINED, False, logging.ERROR, "end", "is quarantined at step 43, attempt 2: why"),
        (RUNNING, CANCELLED, False, logging.INFO, "end", "is cancelled at step 43, attempt 2: why"),
        (RUNNING, PAUSED, False, logging.INFO, "paused", "is paused at step 43: why"),
        (RUNNING, QUEUED, True, logging.WARNING, "retry", "has failed in attempt 2: why"),
        (RUNNING, QUEUED, False, logging.INFO, "queued", "is queued from step-40: why"),
        (FAILED, QUEUED, False, logging.INFO, "retry", "was failed and is tried again from step-40: why"),
    ],
)
def test_each_change_is_a_line(
    caplog: Any, before: JobState, state: JobState, is_retry: bool, level: int, event: str, text: str
) -> None:
    caplog.set_level(logging.INFO)
    log_change(before, replace(LATER, state=state, cause="why"), is_retry=is_retry)
    [line] = caplog.records
    assert (line.levelno, line.event, line.getMessage()) == (level, event, f"job 01j (charlm) {text}")
    assert (line.job, line.job_name, line.state, line.attempt, line.step) == ("01j", "charlm", state, 2, 43)
    assert (line.snapshot, line.cause) == ("step-40", "why")


def test_other_lines(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    log_change(None, AT_FIRST)
    log_change(QUEUED, replace(AT_FIRST, state=FAILED, cause="cannot\nbe built:  \t no"))
    log_recovered(replace(LATER, cause="the service was restarted"))
    log_note(logging.WARNING, LATER, "step 43 failed and it is tried again")
    assert [line.getMessage() for line in caplog.records] == [
        "job 01j (charlm) is submitted, for m:f: submitted",
        "job 01j (charlm) failed: cannot be built: no",
        "job 01j (charlm) is queued from step-40, as the last service has left it: the service was restarted",
        "job 01j (charlm) step 43 failed and it is tried again",
    ]
