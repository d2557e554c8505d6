"""Who begins next, for any queue: nobody overtakes, nothing overflows, nobody waits without a reason."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.service.jobs.job_queue import Candidate, JobQueue, QueueAction, decide, too_large, why_behind

GiB = 2**30
DEVICES = ("cpu:0", "cpu:1", "cpu:2")

peaks = st.dictionaries(st.sampled_from(DEVICES), st.integers(0, 5))
limits = st.dictionaries(st.sampled_from(DEVICES), st.integers(1, 8))
waiting = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.tuples(st.integers(0, 3), st.booleans()))


def queue_of(jobs):
    queue = JobQueue()
    for job, (submitted, background) in jobs.items():
        queue.put(job, submitted, background=background)
    return queue


def order_of(queue):
    found = []
    while (first := queue.first) is not None:
        assert queue.before(first) == 0
        found.append(first)
        queue.discard(first)
    return found


@given(waiting, st.data())
def test_the_order_is_that_of_class_and_age_whatever_comes_and_goes(jobs, data):
    def by_place(job):
        submitted, background = jobs[job]
        return background, submitted, job

    queue = queue_of(jobs)
    for job in data.draw(st.lists(st.sampled_from(sorted(jobs)), unique=True) if jobs else st.just([])):
        if data.draw(st.booleans()):
            del jobs[job]
            queue.discard(job)
            queue.discard(job)
        else:
            jobs[job] = (jobs[job][0], not jobs[job][1])
            queue.put(job, jobs[job][0], background=jobs[job][1])
    wanted = sorted(jobs, key=by_place)
    assert {job: queue.before(job) for job in jobs} == {job: at for at, job in enumerate(wanted)}
    assert (len(queue), "zzz" in queue, all(job in queue for job in jobs)) == (len(jobs), False, True)
    assert order_of(queue) == wanted


@given(peaks | st.none(), st.lists(peaks, max_size=4), st.integers(1, 5), limits)
def test_whatever_runs_beside_the_first(needed, running, max_running, limit):
    found = decide(Candidate("a", needed), running, max_running, limit)
    assert found.reason
    never = needed is not None and too_large(needed, limit) is not None
    assert (found.action is QueueAction.REFUSE) == never
    if found.action is QueueAction.MEASURE:
        assert needed is None
    if found.action is QueueAction.BEGIN:
        held = Counter(needed)
        for each in running:
            held.update(each)
        assert all(held[device] <= limit[device] for device in needed if device in limit)
        assert len(running) < max_running
    if not running:  # So nobody starves: the first waits only for jobs that run, and these end.
        assert found.action in (QueueAction.BEGIN, QueueAction.MEASURE, QueueAction.REFUSE)


def test_operators_read_what_a_job_waits_for():
    limit = {"cpu:0": 2 * GiB}
    need = Candidate("need", {"cpu:0": int(1.25 * GiB), "cpu:1": 7 * GiB})
    found = decide(need, [{"cpu:0": int(1.5 * GiB)}], 4, limit)
    assert found.reason == "waits for memory on cpu:0: needs 1.25 GiB, 512 MiB of 2 GiB are free"
    assert why_behind(found, 3) == f"3 before it; the first of them: {found.reason}"
    full = decide(need, [{}], 1, limit)
    assert (full.action, full.reason) == (QueueAction.FULL, "max_running 1 is reached")
    assert why_behind(full, 3) == "max_running 1 is reached; 3 before it"
    huge = decide(Candidate("huge", {"cpu:0": 3 * GiB}), [], 4, limit)
    assert (huge.action, huge.reason) == (QueueAction.REFUSE, "needs 3 GiB on cpu:0, whose limit is 2 GiB")
    measured = decide(Candidate("new"), [], 4, limit)
    assert (measured.action, measured.reason) == (QueueAction.MEASURE, "its memory is being measured")
    assert decide(Candidate("new"), [{}], 1, limit).action is QueueAction.FULL
    begins = decide(need, [], 4, limit)
    assert (begins.action, begins.reason) == (QueueAction.BEGIN, "it is its turn")
    assert why_behind(begins, 1) == "1 before it, of which the first begins"
