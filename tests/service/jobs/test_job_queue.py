"""Who begins next, for any queue: nobody overtakes, nothing overflows, nobody waits without a reason."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.service.jobs.job_queue import Candidate, QueueAction, decide, place_of, too_large

GiB = 2**30
DEVICES = ("cpu:0", "cpu:1", "cpu:2")

peaks = st.dictionaries(st.sampled_from(DEVICES), st.integers(0, 5))
limits = st.dictionaries(st.sampled_from(DEVICES), st.integers(1, 8))
candidates = st.lists(
    st.builds(Candidate, st.text("abc", min_size=1, max_size=3), st.integers(0, 3), st.booleans(), st.none() | peaks),
    max_size=8,
    unique_by=lambda each: each.job,
)


def answers(queued, running=(), max_running=4, limit=()):
    found = decide(queued, list(running), max_running, dict(limit))
    return {decision.job: (decision.action, decision.reason) for decision in found}


@given(candidates, st.lists(peaks, max_size=4), st.integers(1, 5), limits)
def test_whatever_waits_and_runs(queued, running, max_running, limit):
    decisions = decide(queued, running, max_running, limit)
    by_job = {candidate.job: candidate for candidate in queued}
    assert [decision.job for decision in decisions] == [each.job for each in sorted(queued, key=place_of)]
    assert all(decision.reason for decision in decisions)
    begun = [by_job[each.job] for each in decisions if each.action is QueueAction.BEGIN]
    assert not begun or len(running) + len(begun) <= max_running
    held: Counter[str] = Counter()
    for each in running:
        held.update(each)
    for each in begun:
        held.update(each.peaks)
        assert all(held[device] <= limit[device] for device in each.peaks if device in limit)
    # Behind the first that waits, nobody begins; before it, nobody waits.
    kinds = [each.action for each in decisions if each.action is not QueueAction.REFUSE]
    assert QueueAction.BEGIN not in kinds[len(begun) :]
    assert kinds.count(QueueAction.MEASURE) <= 1
    for each in decisions:
        found = by_job[each.job].peaks
        assert (each.action is QueueAction.REFUSE) == (found is not None and too_large(found, limit) is not None)
        if each.action is QueueAction.MEASURE:
            assert found is None


@given(candidates, st.integers(1, 5), limits)
def test_whoever_is_first_on_an_empty_service_begins(queued, max_running, limit):
    """So nobody starves: the first waits only for jobs that run, and these end."""
    decisions = decide(queued, [], max_running, limit)
    first = next((each for each in decisions if each.action is not QueueAction.REFUSE), None)
    assert first is None or first.action in (QueueAction.BEGIN, QueueAction.MEASURE)


@given(candidates, st.lists(peaks, max_size=4), st.integers(1, 5), limits)
def test_the_first_decision_does_not_depend_on_those_behind(queued, running, max_running, limit):
    decisions = decide(queued, running, max_running, limit)
    if queued:
        assert decide([min(queued, key=place_of)], running, max_running, limit) == decisions[:1]


def test_a_background_job_never_stands_before_a_foreground_one():
    old, new = Candidate("old", 1, background=True, peaks={}), Candidate("new", 2, peaks={})
    found = answers([old, new], max_running=1)
    assert found["new"] == (QueueAction.BEGIN, "it is its turn")
    assert found["old"] == (QueueAction.WAIT, "waits for a place: 1 jobs are running, the limit")
    large = Candidate("large", 3, peaks={"cpu:0": 2})
    found = answers([old, large], [{"cpu:0": 1}], limit={"cpu:0": 2})
    assert found["old"] == (QueueAction.WAIT, "waits behind another job")


def test_operators_read_what_a_job_waits_for():
    limit = {"cpu:0": 2 * GiB}
    need = Candidate("need", 1, peaks={"cpu:0": int(1.25 * GiB), "cpu:1": 7 * GiB})
    behind = Candidate("behind", 2, peaks={})
    found = answers([need, behind], [{"cpu:0": int(1.5 * GiB)}], limit=limit)
    assert found["need"][1] == "waits for memory on cpu:0: needs 1.25 GiB, 512 MiB of 2 GiB are free"
    assert found["behind"] == (QueueAction.WAIT, "waits behind another job")
    huge = Candidate("huge", 0, peaks={"cpu:0": 3 * GiB})
    found = answers([huge, need], limit=limit)
    assert found["huge"] == (QueueAction.REFUSE, "needs 3 GiB on cpu:0, whose limit is 2 GiB")
    assert found["need"][0] is QueueAction.BEGIN


def test_only_the_one_at_the_head_is_measured():
    found = answers([Candidate("a", 1), Candidate("b", 2)], limit={"cpu:0": 1})
    assert found["a"] == (QueueAction.MEASURE, "its memory is being measured")
    assert found["b"] == (QueueAction.WAIT, "waits behind another job")
    assert answers([Candidate("a", 1)], [{}], max_running=1)["a"][0] is QueueAction.WAIT


def test_those_that_begin_together_count_for_one_another():
    jobs = [Candidate(name, at, peaks={"cpu:0": 2}) for at, name in enumerate("abc")]
    found = answers(jobs, limit={"cpu:0": 5})
    assert [found[name][0] for name in "abc"] == [QueueAction.BEGIN, QueueAction.BEGIN, QueueAction.WAIT]
    assert found["c"][1] == "waits for memory on cpu:0: needs 2 B, 1 B of 5 B are free"
    assert [found[0] for found in answers(jobs, max_running=1).values()] == [
        QueueAction.BEGIN,
        QueueAction.WAIT,
        QueueAction.WAIT,
    ]
