"""Who begins next, for any queue: nobody starves, nothing overflows, nobody waits without a reason."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.service.job_states import DeviceRequest, JobRecord, JobState
from asyncpipe.service.jobs import job_queue
from asyncpipe.service.jobs.job_queue import (
    Candidate,
    Capacity,
    JobQueue,
    QueueAction,
    decisions,
    why_behind,
)
from asyncpipe.service.jobs.usage import AHEAD, HALF_LIFE, Usage

QUEUES = int(os.environ.get("ASYNCPIPE_QUEUES", "40"))
"""How many random queues are run until they are empty."""
USERS = (None, "ann", "bob")

waiting = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from(USERS), st.integers(-1, 1)),
    max_size=9,
)
used = st.dictionaries(st.sampled_from(USERS), st.integers(0, 4))


def record(job, submitted=0, background=False, owner=None, priority=0, devices=()):
    document = {"priority_class": "background" if background else "foreground", "priority": priority}
    document["pipeline"] = {"devices": devices}
    return JobRecord(job, document, JobState.QUEUED, "submitted", submitted, submitted, owner=owner)


def by_the_rule(jobs, usage):
    """The order as the docstring says it: user by user, as if each job that begins counted like one device."""
    found = []
    for background in (False, True):
        left = {job: each for job, each in jobs.items() if each[1] is background}
        begun = dict.fromkeys(USERS, 0)

        def place(job, left=left, begun=begun):
            submitted, _, user, priority = left[job]
            mine = sorted(other for other in left if left[other][2] == user)
            mine.sort(key=lambda other: (-left[other][3], left[other][0]))
            rank = usage.rank(user, 0.0) + begun[user] / usage.share(user)
            return (mine[0] != job, rank, -priority, submitted, job)

        while left:
            job = min(left, key=place)
            found.append(job)
            begun[left[job][2]] += 1
            del left[job]
    return found


@pytest.mark.promise(
    "The service",
    "Queued jobs begin in the stated order, none waits for ever, and devices and memory are not overbooked.",
)
@given(waiting, used, st.sampled_from([{}, {"ann": 2.0}]), st.data())
def test_the_order_is_that_of_class_use_priority_and_age_whatever_comes_and_goes(jobs, used, shares, data):
    usage = Usage(shares=shares)
    for user, devices in used.items():
        usage.begin(user, "before", devices, 0.0)
    queue = JobQueue(usage)
    for job, each in jobs.items():
        queue.put(record(job, *each))
    for job in data.draw(st.lists(st.sampled_from(sorted(jobs)), unique=True) if jobs else st.just([])):
        if data.draw(st.booleans()):
            del jobs[job]
            queue.discard(job)
            queue.discard(job)
        else:
            jobs[job] = (jobs[job][0], not jobs[job][1], *jobs[job][2:])
            queue.put(record(job, *jobs[job]))
    order = by_the_rule(jobs, usage)
    assert [each.id for each in queue.ordered()] == order
    assert {job: queue.before(job) for job in jobs} == {job: at for at, job in enumerate(order)}
    assert (len(queue), "zzz" in queue, all(job in queue for job in jobs)) == (len(jobs), False, True)
    assert all(queue.get(job).id == job for job in jobs)


@dataclass
class Room:
    """A queue that is run until it is empty; whatever is promised is looked at after each decision."""

    random: Random
    has: Capacity
    queue: JobQueue = field(default_factory=JobQueue)
    wants: dict[str, Candidate] = field(default_factory=dict)
    running: dict[str, Candidate] = field(default_factory=dict)
    awaited: dict[str, set[str]] = field(default_factory=dict)
    """By job, those that ran on its devices when it was the first and they were held."""

    def submit(self, number):
        names = sorted(set(self.has.devices))
        count = self.random.choice([1, 1, 1, 2, 2, 4])
        if self.random.random() < 0.4:
            chosen = self.random.sample(names, min(count, len(names)))
            request = DeviceRequest(len(chosen), tuple(chosen))
        else:
            hosts = self.random.choice([None, None, 1, 2])
            request = DeviceRequest(count, (), hosts)
        memory = self.random.choice([0, 0, 3, 6])
        job = f"{number:03}"
        self.wants[job] = Candidate(job, request, memory)
        self.queue.put(record(job, number))

    def candidates(self):
        for each in self.queue.ordered():
            times, held = self.queue.passed(each.id)
            yield replace(self.wants[each.id], passed=times, held=held)

    def decide(self):
        found = list(decisions(self.candidates(), self.running.values(), self.has))
        assert found == list(decisions(self.candidates(), self.running.values(), self.has)), "the same again"
        assert [each.job for each in found] == [each.id for each in self.queue.ordered()][: len(found)]
        assert all(each.reason for each in found)
        assert all(each.action is QueueAction.WAIT for each in found[:-1])
        held = set()
        for each in found:
            assert self.queue.passed(each.job)[0] <= job_queue.PASSES
            assert not held & set(each.devices), "nobody behind takes what is held"
            held |= set(each.held)
            self.queue.follow(each)
        first, last = found[0], found[-1]
        if last.action is QueueAction.BEGIN:
            self.begin(last)
        if first.action is QueueAction.WAIT and first.held:
            self.check_bound(first)
        return last.action is QueueAction.BEGIN

    def check_bound(self, first):
        """The theorem, for what needs no ``hosts``; with them, that what is waited for only becomes less."""
        request = self.wants[first.job].request
        assert request.fits(first.held)
        using = {job for job, each in self.running.items() if set(each.devices) & set(first.held)}
        if request.hosts is None:
            left = self.awaited.setdefault(first.job, using)
            left &= self.running.keys()
            assert left, "those that it had to wait for have ended"
        else:
            before = self.awaited.setdefault(first.job, using)
            taken = {device for each in self.running.values() for device in each.devices}
            assert len(using) <= len(before) or len(set(first.held) - taken) > 0
            self.awaited[first.job] = using

    def begin(self, decision):
        job = self.wants[decision.job]
        assert len(self.running) < self.has.max_running
        assert job.request.fits(decision.devices)
        assert len(decision.devices) == job.request.count
        if job.request.names:
            assert decision.devices == job.request.names
        for device in decision.devices:
            there = [each for each in self.running.values() if device in each.devices]
            assert self.has.share_devices or not there, "no device is given twice"
            if device in self.has.limits:
                assert sum(each.memory for each in there) + job.memory <= self.has.limits[device]
        self.queue.discard(job.job)
        self.running[job.job] = replace(job, devices=decision.devices)

    def run(self, jobs):
        number = 0
        while number < jobs or self.wants.keys() - self.ended:
            if number < jobs and self.random.random() < 0.6:
                self.submit(number)
                number += 1
            while len(self.queue) and self.decide():
                pass
            assert self.running or not len(self.queue), "a job alone begins at once"
            if self.running and self.random.random() < 0.5:
                ends = self.random.choice(sorted(self.running))
                del self.running[ends]
                self.ended.add(ends)

    ended: set[str] = field(default_factory=set)


def room_of(seed):
    random = Random(seed)
    devices = random.choice([[f"cuda:{n}" for n in range(4)], [f"{host}/cuda:{n}" for host in "abc" for n in range(4)]])
    limits = {device: 6 for device in devices if random.random() < 0.7}
    has = Capacity(devices, random.choice([2, 8]), random.random() < 0.3, limits)
    return Room(random, has)


@pytest.mark.promise(
    "The service",
    "Queued jobs begin in the stated order, none waits for ever, and devices and memory are not overbooked.",
)
@settings(max_examples=QUEUES)
@given(st.integers(0, 2**32))
def test_every_queue_becomes_empty_within_the_bound_and_nothing_overflows(seed):
    with patch.object(job_queue, "PASSES", seed % 5):
        room_of(seed).run(25)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_equal_jobs_begin_first_come_first_served(count):
    room = Room(Random(0), Capacity([f"cuda:{n}" for n in range(4)], 99, share_devices=False))
    for number in range(9):
        room.wants[f"{number}"] = Candidate(f"{number}", DeviceRequest(count))
        room.queue.put(record(f"{number}", number))
    begun = []
    while len(room.queue):
        while len(room.queue) and room.decide():
            begun.append(next(reversed(room.running)))
        room.running.pop(next(iter(room.running)))
    assert begun == sorted(begun)


def test_jobs_that_want_the_same_do_not_hide_others():
    alike = [Candidate(f"{number}", DeviceRequest(1, ("cuda:0",))) for number in range(100)]
    other = Candidate("other", DeviceRequest(1))
    has = Capacity(["cuda:0", "cuda:1"], 99, share_devices=False)
    *waits, last = decisions([*alike, other], [Candidate("r", alike[0].request, devices=("cuda:0",))], has)
    assert (len(waits), {each.reason for each in waits}) == (100, {"waits for cuda:0, which job r has to itself"})
    assert (last.job, last.devices) == ("other", ("cuda:1",))


def test_one_user_s_jobs_do_not_delay_all_others():
    queue = JobQueue()
    for number in range(8):
        queue.put(record(f"a{number}", number, owner="ann"))
    for user in ("bob", "cid"):
        queue.put(record(user, 99, owner=user))
    assert [each.id for each in queue.ordered()] == ["a0", "bob", "cid", *(f"a{number}" for number in range(1, 8))]
    queue.usage.begin("ann", "a0", 2, 0.0)
    queue.discard("a0")
    assert [each.id for each in queue.ordered(60.0)][:3] == ["bob", "cid", "a1"]
    queue.usage.end("ann", "a0", 3600.0)
    assert [each.id for each in queue.ordered(HALF_LIFE)][:3] == ["bob", "cid", "a1"], "and what it has used counts"


def test_what_was_used_is_forgotten_by_halves():
    usage = Usage(100.0, {"ann": 2.0})
    usage.begin("ann", "job", 2, 0.0)
    usage.begin("bob", "other", 1, 0.0)
    assert usage.used("ann", 1.0) == pytest.approx(2.0, rel=0.01)
    usage.end("ann", "job", 1.0)
    usage.end("ann", "job", 9.0)
    assert usage.used("ann", 101.0) == pytest.approx(usage.used("ann", 1.0) / 2)
    assert usage.used("nobody", 5.0) == usage.rank("nobody", 5.0) == 0.0
    assert usage.rank("bob", 0.0) == 1.0, "a running device counts before it was used"
    assert usage.rank("ann", 1.0) == pytest.approx(usage.used("ann", 1.0) / (100.0 * AHEAD) / 2)
    usage.begin("ann", "late", 1, 300.0)
    usage.end("ann", "late", 301.0)
    found = usage.used("ann", 400.0)
    for began, ended in ((0.0, 1.0), (300.0, 301.0)):  # As another process has left them, in any order.
        for user, devices in (("again", 2 if ended == 1.0 else 1),):
            usage.begin(user, "job", devices, began)
            usage.end(user, "job", ended)
    assert usage.used("again", 400.0) == pytest.approx(found)


def test_a_decision_among_ten_thousand_jobs_of_fifty_users_takes_milliseconds():
    queue, has = JobQueue(), Capacity([f"cuda:{number}" for number in range(8)], 99, share_devices=False)
    for number in range(10_000):
        request = {"count": 1 + number % 8} if number % 3 else [f"cuda:{number % 8}"]
        queue.put(record(f"{number:05}", number, owner=f"user {number % 50}", devices=request))
    running = [Candidate("r", DeviceRequest(7), devices=has.devices[1:])]

    def decide():
        waiting = (Candidate(each.id, each.request, passed=99) for each in queue.ordered(1.0))
        return list(decisions(waiting, running, has))

    began = time.perf_counter()
    rounds = 20
    for _ in range(rounds):
        decide()
    seconds = (time.perf_counter() - began) / rounds
    before = [queue.before(job, 1.0) for job in ("00000", "05000", "09999")]
    assert before == [0, 5000, 9999]
    assert seconds < 0.05, f"{seconds * 1000:.1f} ms"  # 1.5 ms on an idle machine.


def test_operators_read_what_a_job_waits_for():
    has = Capacity(["cpu:0", "cpu:1", "cpu:2"], 4, share_devices=False)
    busy = [Candidate("r", DeviceRequest(2), devices=("cpu:0", "cpu:1"))]
    asked = [("a", ("cpu:0", "cpu:2")), ("b", ("cpu:2",)), ("c", ())]
    waits = [Candidate(job, DeviceRequest(len(names) or 2, names), passed=job_queue.PASSES) for job, names in asked]
    found = list(decisions(waits, busy, has))
    assert [each.reason for each in found] == [
        "waits for cpu:0, which job r has to itself",
        "waits for cpu:2, which job a before it waits for",
        "waits for any 2: 1 of 3 are free, 1 of them job a before it waits for",
    ]
    assert why_behind(found[0], found[-1], 40) == f"40 before it; the first of them: {found[0].reason}"
    (full,) = decisions(waits, busy, replace(has, max_running=1))
    assert (full.action, full.reason) == (QueueAction.FULL, "max_running 1 is reached")
    assert why_behind(full, full, 3) == "max_running 1 is reached; 3 before it"
    (begins,) = decisions(waits, [], has)
    assert (begins.action, begins.reason) == (QueueAction.BEGIN, "it is its turn")
    assert why_behind(begins, begins, 1) == "1 before it, of which the first begins"
    assert why_behind(found[0], begins, 9) == "9 before it, of which one begins"
    suspect = Candidate("s", DeviceRequest(1), is_suspect=True)
    (alone,) = decisions(waits, [suspect], has)
    assert (alone.action, "job s, which runs alone" in alone.reason) == (QueueAction.HOLD, True)
    (alone,) = decisions([suspect, *waits], busy, has)
    assert (alone.action, "waits to run alone" in alone.reason) == (QueueAction.HOLD, True)
    (memory,) = decisions([Candidate("m", DeviceRequest(1, ("cpu:2",)), 9)], busy, replace(has, limits={"cpu:2": 7}))
    assert memory.reason == "waits for memory on cpu:2: needs 9 B, 7 B of 7 B are free"
