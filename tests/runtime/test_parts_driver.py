"""What the controller sees of its workers: what ran in one that is lost, and which one hangs."""

from __future__ import annotations

import logging
import os
import sys
import threading
from queue import SimpleQueue

import pytest

from asyncpipe.core.engine.events import StepNotes, TaskCompleted, TaskFailed, TaskIssued
from asyncpipe.core.engine.share import Share
from asyncpipe.core.engine.worker_notes import EdgeTraffic, WorkerChange, WorkerNotes, WorkerState, WorkerUse
from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import WorkerLostError
from asyncpipe.runtime.execution import Tenant
from asyncpipe.runtime.executor import Assignment
from asyncpipe.runtime.observers import Observers
from asyncpipe.runtime.part_messages import PartEnded
from asyncpipe.runtime.parts_driver import PartsDriver, PlacedPipeline
from asyncpipe.runtime.task_board import ShownTask, TaskBoard, new_board_file
from asyncpipe.runtime.thread_executor import ThreadExecutor
from asyncpipe.runtime.watchdog import Watchdog

pytestmark = pytest.mark.one_loop

GRAPH = lower(find_schedule("1f1b"), Shape(2, 4, 2), devices=["cpu:0", "cpu:1"], checkpoint=CheckpointMode.NEVER)
SECOND = [task.number for task in GRAPH.tasks if task.lane.device == "cpu:1"]
NUMBER = SECOND.index(next(task.number for task in GRAPH.tasks if task.id == "F(1,1)"))
"""Of F(1,1) in the part of the second worker."""


class Link:
    """A worker that is not there."""

    def __init__(self, name):
        self.name = name
        self.lost = None
        self.pid = ord(name)
        self.round_trip, self.clock_offset = 0.25, 0.0
        self.heard_at = 0.0
        self.shown = []
        self.sent = []
        self.killed = []

    @property
    def silent_seconds(self):
        return Clock.now - self.heard_at

    def send(self, message):
        self.sent.append(message)

    def running(self):
        return self.shown

    def kill(self, why, *, stacks):
        assert stacks
        self.killed.append(why)


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    monkeypatch.setattr(Clock, "now", 100.0)


@pytest.fixture
def driver():
    return PartsDriver(clock=lambda: Clock.now)


@pytest.fixture
def links():
    links = Link("a"), Link("b")
    for link in links:
        link.heard_at = Clock.now
    return links


def start(driver, links, pipeline=None):
    pipeline = pipeline or PlacedPipeline(0, Tenant(), dict(zip(["cpu:0", "cpu:1"], links, strict=True)))
    return driver.start(pipeline, GRAPH, {"a": b"", "b": b""})


def watch(driver, **options):
    return Watchdog(driver, clock=lambda: Clock.now, **options)


async def test_a_loss_names_what_ran_there_and_whose_it_was(driver, links):
    mine = start(driver, links)
    job = PlacedPipeline(1, Tenant(Share("other")), mine.pipeline.workers)
    others = start(driver, links, job)
    links[1].shown = [ShownTask(others.number, 0, 1.0), ShownTask(mine.number, NUMBER, 2.0), ShownTask(77, 0, 3.0)]
    links[0].shown = [ShownTask(mine.number, 0, 1.0)]
    links[1].lost = WorkerLostError("b", "was killed by SIGKILL", -9)
    # One that has only its name: of a worker that had its place before.
    driver.worker_lost(Link("b"), links[1].lost)
    assert not mine.aborted
    driver.worker_lost(links[1], links[1].lost)
    driver.part_ended("a", PartEnded(mine.number, (), StepNotes()))
    driver.part_ended("a", PartEnded(others.number, (), StepNotes()))
    first = f"{GRAPH.tasks[SECOND[0]].id} on cpu:1"
    with pytest.raises(WorkerLostError) as raised:
        await driver.issued(mine)
    assert raised.value.running == (f"{first} of job 'other'", "F(1,1) on cpu:1")
    with pytest.raises(WorkerLostError) as raised:
        await driver.issued(others)
    assert raised.value.running == (first, "F(1,1) on cpu:1 of another pipeline")
    with pytest.raises(WorkerLostError, match=r"SIGKILL$"):
        start(driver, links, job)


class Watcher:
    def __init__(self):
        self.records, self.changes = [], []

    def step_completed(self, record):
        self.records.append(record)

    def worker_changed(self, change):
        self.changes.append(change)


async def test_records_are_on_one_clock_and_observers_are_told_of_workers(driver, links):
    links[1].clock_offset = 1000.0
    watcher = Watcher()
    tenant = Tenant(observers=Observers([watcher]))
    pipeline = PlacedPipeline(0, tenant, dict(zip(["cpu:0", "cpu:1"], links, strict=True)))
    driver.place(pipeline, {"b"})
    first, second = (
        WorkerChange(name, WorkerState.UP, ord(name), (device,), is_restart=name == "b")
        for name, device in (("a", "cpu:0"), ("b", "cpu:1"))
    )
    assert watcher.changes == [first, second]
    step = start(driver, links, pipeline)
    forward, copy = (next(task.number for task in GRAPH.tasks if task.id == name) for name in ("F(0,0)", "C(0,0>1)"))
    sent = WorkerUse(10, {"b": EdgeTraffic(1, 2, 0.0)})
    done = [(101.0, TaskCompleted(step.number, forward, 100.0, 101.0))]
    driver.part_ended("a", PartEnded(step.number, done, StepNotes(samples=[(101.0, "cpu", 5)]), use=sent))
    done = [(1102.5, TaskCompleted(step.number, copy, 1102.0, 1102.5))]
    notes = StepNotes(arrived={copy: 1101.5}, samples=[(1100.5, "cpu", 3), (1102.5, "cpu", 4)])
    driver.part_ended("b", PartEnded(step.number, done, notes))
    (record,) = watcher.records
    ran = {event.task: event[2:] for _, event in record.journal if isinstance(event, TaskCompleted)}
    assert ran == {forward: (100.0, 101.0), copy: (102.0, 102.5)}
    assert record.notes.arrived == {copy: 101.5}
    assert record.notes.samples == [(100.5, "cpu", 3), (101.0, "cpu", 8), (102.5, "cpu", 9)]
    assert record.notes.workers == {
        "a": WorkerNotes(WorkerState.UP, ord("a"), ("cpu:0",), 0.25, 0.0, sent),
        "b": WorkerNotes(WorkerState.UP, ord("b"), ("cpu:1",), 0.25, 1000.0),
    }
    links[1].lost = WorkerLostError("b", "was killed by SIGKILL", -9)
    driver.worker_lost(links[1], links[1].lost)
    lost = WorkerChange("b", WorkerState.LOST, ord("b"), ("cpu:1",), how="was killed by SIGKILL")
    assert watcher.changes[2:] == [lost]
    driver.forget(pipeline)
    driver.worker_lost(links[1], links[1].lost)
    assert watcher.changes[2:] == [lost]


async def test_the_worker_of_a_task_that_hangs_is_killed_once(driver, links, caplog):
    step = start(driver, links)
    watchdog = watch(driver, factor=10.0, floor=8.0)
    links[1].shown = [ShownTask(step.number, NUMBER, 100.0)]
    for Clock.now in (109.0, 179.0):  # Ten floors, since it has never run.
        links[0].heard_at = links[1].heard_at = Clock.now
        watchdog.check()
    assert not links[1].killed
    Clock.now = links[0].heard_at = links[1].heard_at = 181.0
    for _ in range(2):
        watch(driver, factor=10.0, floor=8.0).check()
    assert links[1].killed == ["F(1,1) on cpu:1 did not end within 81 s (it had not run before)"]
    assert not links[0].killed
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == f"worker 'b' is killed: {links[1].killed[0]}"


async def test_how_long_a_task_may_take_follows_from_earlier_steps(driver, links):
    step = start(driver, links)
    done = [(100.0, TaskCompleted(step.number, SECOND[NUMBER], 100.0, 102.0))]
    driver.part_ended("b", PartEnded(step.number, done, StepNotes()))
    driver.part_ended("a", PartEnded(step.number, (), StepNotes()))
    step = start(driver, links, step.pipeline)
    links[1].shown = [ShownTask(step.number, NUMBER, 100.0)]
    for Clock.now, killed in ((119.0, 0), (121.0, 1)):
        links[0].heard_at = links[1].heard_at = Clock.now
        watch(driver, factor=10.0, floor=8.0).check()
        assert len(links[1].killed) == killed
    assert links[1].killed == ["F(1,1) on cpu:1 did not end within 21 s (usually it takes 2 s)"]


async def test_a_worker_that_is_silent_during_a_step_is_killed_whatever_it_runs(driver, links):
    start(driver, links)
    Clock.now = links[0].heard_at = 109.0
    watch(driver, floor=8.0).check()
    assert (links[0].killed, links[1].killed) == ([], ["it has not answered for 9 s"])


async def test_a_worker_that_is_silent_without_a_step_is_left_to_its_supervisor(driver, links):
    step = start(driver, links)
    for name in ("a", "b"):
        driver.part_ended(name, PartEnded(step.number, (), StepNotes()))
    Clock.now = 1000.0
    watch(driver, floor=8.0).check()
    assert (links[0].killed, links[1].killed) == ([], [])


# The board


def make_boards():
    descriptor = new_board_file()
    try:
        return TaskBoard(descriptor), TaskBoard(descriptor)
    finally:
        os.close(descriptor)


def test_what_one_process_shows_the_other_one_reads_until_it_is_gone():
    worker, controller = make_boards()
    first, second = worker.slot(), worker.slot()
    assert controller.running() == []
    first.show(0, 0, 7.5)
    second.show(2**30, 390_000, 3.25)
    assert controller.running() == [ShownTask(2**30, 390_000, 3.25), ShownTask(0, 0, 7.5)]
    second.clear()
    worker.give_back(first)
    assert controller.running() == []
    second.show(1, 2, 3.0)
    controller.close()
    second.clear()
    controller.close()
    assert controller.running() == [ShownTask(1, 2, 3.0)]


class Later:
    """What an accelerator has queued."""

    def __init__(self):
        self.waits, self.done = threading.Event(), threading.Event()

    def wait(self):
        self.waits.set()
        assert self.done.wait(30)
        return 1.0, 2.0


class Step:
    number = 3
    graph = GRAPH
    tenant = None
    aborted = False


def test_an_executor_shows_what_it_runs_and_what_it_waits_for(no_leaks):
    worker, controller = make_boards()
    executor, events = ThreadExecutor("cpu:0", board=worker), SimpleQueue()
    executor.start(lambda event, *, wake=True, at=None: events.put(event))
    begun, let_go, later = threading.Event(), threading.Event(), Later()

    def fails():
        begun.set()
        assert let_go.wait(30)
        raise ValueError

    executor.submit([Assignment(Step(), 5, lambda: later), Assignment(Step(), 6, fails)])
    assert begun.wait(30)
    assert later.waits.wait(30)
    assert sorted(shown[:2] for shown in controller.running()) == [(3, 5), (3, 6)]
    let_go.set()
    assert [type(events.get(timeout=30)) for _ in range(2)] == [TaskIssued, TaskFailed]
    assert [shown[:2] for shown in controller.running()] == [(3, 5)]
    later.done.set()
    assert isinstance(events.get(timeout=30), TaskCompleted)
    executor.close()
    executor.join()
    assert controller.running() == []
    slots = [worker.slot() for _ in range(255)]
    assert None not in slots, "only the device's thread keeps its slot"


def test_threads_beyond_the_slots_are_not_shown():
    worker, _ = make_boards()
    slots = [worker.slot() for _ in range(256)]
    assert len({slot.index for slot in slots}) == 256
    assert worker.slot() is None
    worker.give_back(slots[7])
    assert worker.slot().index == 7


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc")
def test_a_board_leaves_no_file():
    before = len(os.listdir("/proc/self/fd"))
    worker, controller = make_boards()
    controller.close()
    del worker
    assert len(os.listdir("/proc/self/fd")) == before
