"""Which states a job may pass through, and what is kept of it: without a database."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncpipe.errors import AsyncpipeError, OptionError
from asyncpipe.service.job_states import (
    MAX_CAUSE,
    MAX_SPEC_BYTES,
    JobSpec,
    JobSpecError,
    JobState,
    JobStateError,
    PriorityClass,
    check_asking,
    check_transition,
    tidy_cause,
)

# Spelled out once more, as in the issue: the table is what is tested.
LEGAL = {
    "queued running",
    "queued paused",
    "queued cancelled",
    "queued failed",
    "running paused",
    "running queued",
    "running finished",
    "running failed",
    "running cancelled",
    "queued quarantined",
    "running quarantined",
    "paused queued",
    "paused failed",
    "paused cancelled",
    "paused quarantined",
    "failed queued",
    "cancelled queued",
    "quarantined queued",
}


@pytest.mark.parametrize(("state", "to"), list(product(JobState, JobState)))
def test_exactly_the_legal_transitions_pass(state, to):
    if f"{state} {to}" in LEGAL:
        check_transition("7", state, to)
        check_transition("7", state, to, expect=state)
    else:
        with pytest.raises(JobStateError, match=f"^job 7 is {state}: it cannot become {to}; ") as caught:
            check_transition("7", state, to)
        assert f"{state} {caught.value.asked.removeprefix('become ')}" not in LEGAL
        assert {f"{state} {possible}" for possible in caught.value.possible} <= LEGAL


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


# Specifications

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
documents = st.dictionaries(
    st.text(), st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
)


# The first example takes seconds on a busy machine, where Hypothesis makes its table of characters.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(documents, st.sampled_from(PriorityClass), st.floats(0.01, 100))
def test_equal_specifications_have_the_same_text(document, priority, weight):
    spec = JobSpec("ä", "package.module:factory", document, priority, weight)
    text = spec.to_json()
    assert text.isascii()
    assert replace(spec, tags=("a",)).to_json() != text
    reordered = JobSpec("ä", "package.module:factory", dict(reversed(document.items())), priority, weight)
    assert reordered.to_json() == text


def deep(levels: int) -> list[object]:
    nested: list[object] = []
    for _ in range(levels):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "document",
    [
        {"x": float("nan")},
        {"x": float("inf")},
        {"x": (1, 2)},
        {"x": {1: 2}},
        {1: 2, "x": 3},
        {"x": object()},
        {"x": b"bytes"},
        {"x": {1, 2}},
        {"x": deep(100_000)},
        {"x": 10**5000},
        {"x": "y" * MAX_SPEC_BYTES},
    ],
    ids="nan infinity tuple number-key number-keys object bytes set deep huge-number long".split(),
)
def test_what_is_not_plain_json_is_refused(document):
    with pytest.raises(JobSpecError, match="the specification of job 'job'"):
        JobSpec("job", "m:f", document).to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name is a text of 1 to 200"),
        ({"name": "x" * 201}, "name is a text of 1 to 200"),
        ({"entry": 3}, "entry is a text"),
        ({"document": [1]}, "document is a JSON object"),
        ({"priority_class": "urgent"}, "one of foreground, background, not 'urgent'"),
        ({"weight": 0}, "weight is a number above 0"),
        ({"weight": float("nan")}, "weight is a number above 0"),
        ({"weight": "3"}, "weight is a number above 0"),
        ({"tags": ["a"]}, "tags are up to 20, each 1 to 64 letters"),
        ({"tags": ("a b",)}, "tags are up to 20, each 1 to 64 letters"),
        ({"tags": tuple(map(str, range(21)))}, "tags are up to 20"),
        ({"tags": ("a", "a")}, "has each tag once"),
        ({"deadline": 0}, "deadline is a Unix time"),
        ({"deadline": float("inf")}, "deadline is a Unix time"),
    ],
)
def test_wrong_fields_are_refused(change, message):
    with pytest.raises(JobSpecError, match=message):
        JobSpec(**{"name": "job", "entry": "m:f", **change})


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
