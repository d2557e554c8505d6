"""Which states a job may pass through, and what is kept of it: without a database."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from store_helpers import LEGAL

from asyncpipe.errors import AsyncpipeError, OptionError
from asyncpipe.service.job_states import (
    MAX_CAUSE,
    JobState,
    JobStateError,
    check_asking,
    check_transition,
    tidy_cause,
)


@pytest.mark.parametrize(("state", "to"), list(product(JobState, JobState)))
def test_exactly_the_legal_transitions_pass(state, to):
    if to in LEGAL[state]:
        check_transition("7", state, to)
        check_transition("7", state, to, expect=state)
    else:
        with pytest.raises(JobStateError, match=f"^job 7 is {state}: it cannot become {to}; ") as caught:
            check_transition("7", state, to)
        assert set(caught.value.possible) == LEGAL[state]


def test_an_illegal_transition_is_told_with_what_would_be_possible():
    with pytest.raises(AsyncpipeError) as caught:
        check_transition("7", JobState.PAUSED, JobState.RUNNING)
    possible = "from there it can become queued, failed, cancelled, quarantined"
    assert str(caught.value) == f"job 7 is paused: it cannot become running; {possible}"
    with pytest.raises(JobStateError, match=r"^job 7 is finished: it cannot become queued; that state is final$"):
        check_transition("7", JobState.FINISHED, JobState.QUEUED)


@pytest.mark.parametrize("to", [*JobState, None])
@pytest.mark.parametrize("asked", [None, JobState.PAUSED, JobState.CANCELLED])
@pytest.mark.parametrize("state", JobState)
def test_only_a_running_job_is_asked_and_a_cancellation_stands(state, asked, to):
    legal = state is JobState.RUNNING and (
        to is JobState.CANCELLED
        or (to in (JobState.PAUSED, None) and asked is JobState.PAUSED)
        or (to, asked) == (JobState.PAUSED, None)
    )
    if legal:
        check_asking("7", state, asked, to)
    else:
        with pytest.raises(JobStateError, match=f"^job 7 is {state}: it cannot "):
            check_asking("7", state, asked, to)


def test_errors_cross_processes():
    error = pickle.loads(pickle.dumps(JobStateError("7", JobState.PAUSED, "become running")))
    assert (error.job, error.state, error.asked) == ("7", JobState.PAUSED, "become running")


# Causes


def test_causes_are_kept_as_they_are_where_that_is_possible():
    assert tidy_cause("the loss is NaN – step 3") == "the loss is NaN – step 3"
    assert tidy_cause("no file \udcff") == "no file \\udcff"
    cut = tidy_cause("x" * (MAX_CAUSE + 1))
    assert len(cut) == MAX_CAUSE
    assert cut.endswith("x…")


@pytest.mark.parametrize("cause", ["", " \n", None, 3])
def test_every_transition_says_why(cause):
    with pytest.raises(OptionError, match="a transition has a cause"):
        tidy_cause(cause)


def test_neither_states_nor_store_need_torch():
    code = "import sys, asyncpipe.service.store.job_store; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=30)
