"""Who begins next, for any queue: nobody starves, nothing overflows, nobody waits without a reason."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.jobs.job_queue import Candidate, JobQueue, QueueAction, decisions, why_behind

DEVICES = ("cpu:0", "cpu:1", "cpu:2")

wanted = st.frozensets(st.sampled_from(DEVICES), max_size=2)
waiting = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.tuples(st.integers(0, 3), st.booleans()))


def queue_of(jobs):
    queue = JobQueue()
    for job, (submitted, background) in jobs.items():
        queue.put(record(job, submitted, background))
    return queue


def record(job, submitted, background=False):
    document = {"priority_class": "background"} if background else {}
    return JobRecord(job, document, JobState.QUEUED, "submitted", submitted, submitted)


def order_of(queue):
    found = []
    while first := queue.first(2):
        assert queue.before(first[0].id) == 0
        assert queue.get(first[0].id) is first[0]
        found.append(first[0].id)
        queue.discard(first[0].id)
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
            queue.put(record(job, *jobs[job]))
    order = sorted(jobs, key=by_place)
    assert {job: queue.before(job) for job in jobs} == {job: at for at, job in enumerate(order)}
    assert (len(queue), "zzz" in queue, all(job in queue for job in jobs)) == (len(jobs), False, True)
    assert order_of(queue) == order


@given(st.lists(wanted, max_size=4), st.lists(wanted, min_size=1, max_size=6), st.integers(1, 5), st.data())
def test_the_first_waits_only_for_those_that_had_its_devices_before(ran, waits, max_running, data):
    """Also where jobs begin out of turn whenever they can, and running jobs end in any order."""
    running = {f"r{n}": each for n, each in enumerate(disjoint(ran)[:max_running])}
    waiting = {f"w{n}": each for n, each in enumerate(waits)}
    first = next(iter(waiting))
    had = {job for job, devices in running.items() if devices & waiting[first]}
    is_full = len(running) == max_running
    while first in waiting:
        found = decided(waiting, running, max_running)
        assert [each.job for each in found] == list(waiting)[: len(found)]
        assert all(each.reason for each in found)
        last = found[-1]
        if last.action is QueueAction.BEGIN:
            assert len(running) < max_running
            before = list(waiting)[: len(found) - 1]
            begins = waiting.pop(last.job)
            for devices in (*running.values(), *(waiting[job] for job in before)):
                assert not begins & devices
            running[last.job] = begins
        else:
            assert running.keys() & had or is_full  # Else it would have begun.
            ends = data.draw(st.sampled_from(sorted(running)))
            del running[ends]
            had.discard(ends)
            is_full = False


@given(st.lists(wanted, min_size=1, max_size=6), st.lists(wanted, max_size=4), st.booleans())
def test_where_devices_are_shared_nobody_overtakes(waits, ran, first_is_suspect):
    waiting = [Candidate(str(n), each, is_suspect=first_is_suspect and not n) for n, each in enumerate(waits)]
    running = [Candidate(f"r{n}", each) for n, each in enumerate(ran)]
    (found,) = decisions(waiting, running, 8, share_devices=True)
    alone = first_is_suspect and running
    assert (found.job, found.action) == ("0", QueueAction.HOLD if alone else QueueAction.BEGIN)


amounts = st.lists(st.tuples(wanted, st.integers(0, 5)), max_size=5)


@given(amounts.filter(bool), amounts, st.dictionaries(st.sampled_from(DEVICES), st.integers(5, 9)))
def test_declared_memory_fits_and_who_waits_for_it_does_not_starve(waits, ran, limits):
    waiting, running = (
        [Candidate(f"{name}{n}", *each) for n, each in enumerate(jobs)] for name, jobs in (("w", waits), ("r", ran))
    )

    def fits(job):
        held = {device: sum(each.memory for each in running if device in each.devices) for device in limits}
        return all(held[device] + job.memory <= limits[device] for device in job.devices & limits.keys())

    found = list(decisions(waiting, running, 99, share_devices=True, limits=limits))
    passed = frozenset()
    for job, decision in zip(waiting, found, strict=False):
        begins = fits(job) and not job.devices & passed
        assert (decision.action is QueueAction.BEGIN) == begins, decision
        passed |= job.devices


def test_operators_read_what_a_job_waits_for():
    busy = {"r": frozenset({"cpu:0", "cpu:1"})}
    found = decided({"a": frozenset({"cpu:0", "cpu:2"}), "b": frozenset({"cpu:2"})}, busy, 4)
    reasons = ["waits for cpu:0, which job r has to itself", "waits for cpu:2, which job a before it waits for"]
    assert [each.reason for each in found] == reasons
    assert why_behind(found[0], found[-1], 40) == f"40 before it; the first of them: {reasons[0]}"
    (full,) = decided({"a": frozenset()}, busy, 1)
    assert (full.action, full.reason) == (QueueAction.FULL, "max_running 1 is reached")
    assert why_behind(full, full, 3) == "max_running 1 is reached; 3 before it"
    (begins,) = decided({"a": frozenset()}, busy, 4)
    assert (begins.action, begins.reason) == (QueueAction.BEGIN, "it is its turn")
    assert why_behind(begins, begins, 1) == "1 before it, of which the first begins"
    assert why_behind(found[0], begins, 9) == "9 before it, of which one begins"
    suspect = Candidate("s", is_suspect=True)
    (alone,) = decisions([Candidate("a"), Candidate("b")], [suspect], 4, share_devices=False)
    assert (alone.action, "job s, which runs alone" in alone.reason) == (QueueAction.HOLD, True)


def disjoint(wanted):
    """Those of the sets that have nothing in common with one before."""
    found = []
    for each in wanted:
        if not any(each & other for other in found):
            found.append(each)
    return found


def decided(waiting, running, max_running):
    candidates = [[Candidate(job, devices) for job, devices in each.items()] for each in (waiting, running)]
    return list(decisions(*candidates, max_running, share_devices=False))
