"""What the controller sees of its workers: what ran in one that is lost, and which one hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
import threading
from dataclasses import replace
from queue import SimpleQueue

import pytest
from driver_helpers import Queued, StepStub

from asyncpipe.core.engine.events import TaskCompleted, TaskFailed, TaskIssued
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.part import TaskNames, tasks_by_device
from asyncpipe.core.hangs.reports import (
    PartReport,
    ReceiverReport,
    RunningReport,
    SenderReport,
    WorkerReport,
)
from asyncpipe.core.policies.share import Share
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.worker_notes import EdgeTraffic, WorkerChange, WorkerNotes, WorkerState, WorkerUse
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import HangError, MessageError, WorkerLostError
from asyncpipe.runtime.executor import Assignment
from asyncpipe.runtime.hang_search import INQUIRY
from asyncpipe.runtime.observers import Observers
from asyncpipe.runtime.part_messages import PartEnded, PartJournal
from asyncpipe.runtime.parts_driver import PartsDriver
from asyncpipe.runtime.parts_execution import PlacedPipeline
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.task_board import ShownTask, TaskBoard, new_board_file
from asyncpipe.runtime.thread_executor import ThreadExecutor
from asyncpipe.runtime.watchdog import Watchdog

GRAPH = lower(find_schedule("1f1b"), Shape(2, 4, 2), devices=["cpu:0", "cpu:1"], checkpoint=CheckpointMode.NEVER)
NAMES = TaskNames(GRAPH)
FIRST, SECOND = tasks_by_device(GRAPH)
NUMBER = SECOND.index(next(task.number for task in GRAPH.tasks if task.id == "F(1,1)"))
"""Of F(1,1) in the part of the second worker."""


class Link:
    """A worker that is not there."""

    def __init__(self, name):
        self.name = name
        self.lost = None
        self.pid = ord(name)
        self.round_trip, self.clock_offset, self.clock_error = 0.25, 0.0, 0.0
        self.heard_at = 0.0
        self.shown = []
        self.sent = []
        self.killed = []
        self.report = WorkerReport(0)

    @property
    def silent_seconds(self):
        return Clock.now - self.heard_at

    def send(self, message):
        self.sent.append(message)

    def running(self):
        return self.shown

    async def query(self, question):
        _, in_full = question
        if self.silent_seconds > 1.0:
            await asyncio.get_running_loop().create_future()
        if not in_full:
            return replace(self.report, part=None)
        running = [
            RunningReport("cpu:1", each.step, NAMES.of(SECOND[each.task]), "?", Clock.now - each.started)
            for each in self.shown
        ]
        return replace(self.report, running=[*running, *self.report.running])

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


async def check(watchdog):
    """A look of the watchdog, and what comes of it."""
    watchdog.check()
    await asyncio.sleep(0)
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == INQUIRY))


async def test_a_loss_names_what_ran_there_and_whose_it_was(driver, links):
    mine = start(driver, links)
    job = PlacedPipeline(1, Tenant(Share("other")), mine.pipeline.workers)
    others = start(driver, links, job)
    links[1].shown = [ShownTask(others.number, 0, 1.0), ShownTask(mine.number, NUMBER, 2.0), ShownTask(77, 0, 3.0)]
    links[0].shown = [ShownTask(mine.number, 0, 1.0)]
    links[1].lost = WorkerLostError("b", "was killed by SIGKILL", -9)
    # One that has only its name: of a worker that had its place before.
    driver.worker_lost(Link("b"), links[1].lost)
    assert not mine.abort.is_requested
    driver.worker_lost(links[1], links[1].lost)
    driver.part_ended("a", PartEnded(mine.number))
    driver.part_ended("a", PartEnded(others.number))
    first = f"{GRAPH.tasks[SECOND[0]].id} on cpu:1"
    with pytest.raises(WorkerLostError) as raised:
        await driver.issued(mine)
    assert raised.value.running == (f"{first} of job 'other'", "F(1,1) on cpu:1")
    with pytest.raises(WorkerLostError) as raised:
        await driver.issued(others)
    assert raised.value.running == (first, "F(1,1) on cpu:1 of another pipeline")
    with pytest.raises(WorkerLostError, match=r"SIGKILL$"):
        start(driver, links, job)


def ended(step, done, notes, **more):
    """A part that has run one task, and noted something."""
    return PartEnded(step.number, 1, PartJournal([done], [], notes).packed(), **more)


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
    notes = StepNotes(samples=[(101.0, "cpu", 5)])
    driver.part_ended("a", ended(step, (101.0, FIRST.index(forward), 100.0, 101.0), notes, use=sent))
    number = SECOND.index(copy)
    notes = StepNotes(arrived={number: 1101.5}, samples=[(1100.5, "cpu", 3), (1102.5, "cpu", 4)])
    driver.part_ended("b", ended(step, (1102.5, number, 1102.0, 1102.5), notes))
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


async def test_no_message_arrives_before_it_left(driver, links):
    """The clock of one worker is known to 0.4 s; what it received tells more."""
    links[1].clock_offset, links[1].clock_error = 1000.0, 0.4
    watcher = Watcher()
    tenant = Tenant(observers=Observers([watcher]))
    pipeline = PlacedPipeline(0, tenant, dict(zip(["cpu:0", "cpu:1"], links, strict=True)))
    driver.place(pipeline, ())
    step = start(driver, links, pipeline)
    forward, copy = (next(task.number for task in GRAPH.tasks if task.id == name) for name in ("F(0,0)", "C(0,0>1)"))
    notes = StepNotes(left={(NAMES.of(copy), NAMES.of(forward)): 100.75})
    driver.part_ended("a", ended(step, (101.0, FIRST.index(forward), 100.0, 101.0), notes))
    number = SECOND.index(copy)
    driver.part_ended("b", ended(step, (1101.5, number, 1101.0, 1101.5), StepNotes(arrived={number: 1100.5})))
    (record,) = watcher.records
    notes = record.notes
    assert notes.left == {(copy, forward): 100.75}
    shift = 1000.0 - notes.workers["b"].clock_offset
    # It is shifted by what the message says at least, and by what is possible at most.
    assert 0.25 <= shift <= 0.4
    assert notes.arrived == {copy: pytest.approx(100.5 + shift)}
    ran = {event.task: event[2:] for _, event in record.journal if isinstance(event, TaskCompleted)}
    assert ran == {forward: (100.0, 101.0), copy: (pytest.approx(101.0 + shift), pytest.approx(101.5 + shift))}
    assert [notes.workers[name].clock_error for name in "ab"] == [0.0, 0.4]


async def test_a_step_that_nobody_looks_at_is_not_looked_at(driver, links):
    """Nothing is done for single tasks: a step of a million costs as much as a short one."""
    step = start(driver, links)
    for name, tasks in (("a", FIRST), ("b", SECOND)):
        driver.part_ended(name, PartEnded(step.number, len(tasks), b"nobody reads it"))
    await driver.issued(step)
    assert not {"tasks", "names"} & vars(step.placed).keys()
    with pytest.raises(MessageError):
        step.record()


async def test_the_worker_of_a_task_that_hangs_is_killed_once(driver, links, caplog):
    step = start(driver, links)
    watchdog = watch(driver, factor=10.0, floor=8.0)
    links[1].shown = [ShownTask(step.number, NUMBER, 100.0)]
    for Clock.now in (109.0, 179.0):  # Ten floors, since it has never run.
        links[0].heard_at = links[1].heard_at = Clock.now
        await check(watchdog)
    assert not links[1].killed
    Clock.now = links[0].heard_at = links[1].heard_at = 181.0
    for _ in range(2):
        await check(watch(driver, factor=10.0, floor=8.0))
    assert links[1].killed == ["F(1,1) on cpu:1 did not end within 81 s (it had not run before)"]
    assert not links[0].killed
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    first, second = record.getMessage().splitlines()
    assert first == f"worker 'b' is killed: {links[1].killed[0]}"
    assert second == "F(1,1) on cpu:1 in worker 'b' has been computing for 81 s, and the step waits for it"
    links[1].lost = WorkerLostError("b", "was killed by its controller", -9)
    driver.worker_lost(links[1], links[1].lost)
    driver.part_ended("a", PartEnded(step.number))
    with pytest.raises(WorkerLostError) as raised:
        await driver.issued(step)
    hang = raised.value.hang
    assert (hang.state, hang.worker, hang.device, hang.task_id) == ("computing", "b", "cpu:1", "F(1,1)")


async def test_a_worker_that_is_silent_during_a_step_is_killed_whatever_it_runs(driver, links):
    start(driver, links)
    Clock.now = links[0].heard_at = 109.0
    await check(watch(driver, floor=8.0))
    assert (links[0].killed, links[1].killed) == ([], ["it has not answered for 9 s"])


def begun(ended, heads):
    """In the names that workers use."""
    return PartReport(
        frozenset(map(NAMES.of, ended)), {device: NAMES.of(task) for device, task in heads.items()}, frozenset()
    )


def task_number(name):
    return next(task.number for task in GRAPH.tasks if task.id == name)


def crossing(links, *, is_stuck=False, came=0):
    """What F(0,0) has made left worker a, and worker b does not have it."""
    forward, copy = task_number("F(0,0)"), task_number("C(0,0>1)")
    behind = {"cpu:0": task_number("C(0,1>0)")}
    ended = [n for n in range(forward, len(GRAPH.tasks)) if GRAPH.tasks[n].id in ("F(0,0)", "F(1,0)")]
    links[0].report = WorkerReport(1, part=begun(ended, behind), sends={"b": SenderReport(2, 9)})
    receives = {"a": ReceiverReport(came, 9, is_stuck=is_stuck, taker="asyncpipe edge 0>1")}
    stacks = {
        "asyncpipe edge 0>1": [("edge.py", 7, "hold")],
        "asyncpipe cpu:1": [("device.py", 9, "wait")],
        "MainThread": [("main.py", 1, "main")],
    }
    links[1].report = WorkerReport(0, part=begun((), {"cpu:1": copy}), receives=receives, stacks=stacks)


async def still(driver, links, seconds=10.0):
    """So many seconds pass in which the watchdog looks on."""
    watchdog = watch(driver, floor=8.0)
    for _ in range(int(2 * seconds)):
        Clock.now += 0.5
        links[0].heard_at = links[1].heard_at = Clock.now
        await check(watchdog)
    return watchdog


async def test_a_link_that_loses_what_is_sent_ends_the_step_and_kills_nobody(driver, links, caplog):
    step = start(driver, links)
    crossing(links)
    await still(driver, links, 8.0)
    assert not step.abort.is_requested
    watchdog = await still(driver, links, 2.0)
    assert (watchdog.hung, step.abort.is_requested, links[0].killed, links[1].killed) == (1, True, [], [])
    for name in ("a", "b"):
        driver.part_ended(name, PartEnded(step.number))
    with pytest.raises(HangError) as raised:
        await driver.issued(step)
    error = raised.value
    assert (error.state, error.worker, error.peer, error.task_id) == ("waiting for an edge", "b", "a", "C(0,0>1)")
    assert str(error).startswith("nothing gets through from worker 'a' to worker 'b'")
    assert error.waits == (
        "C(0,1>0) on cpu:0 waits for B(0,1)",
        "C(0,0>1) on cpu:1 waits for F(0,0), whose message left worker 'a'",
    )
    assert error.story in caplog.text
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), vars(copied)) == (str(error), vars(error))


async def test_who_does_not_take_messages_is_killed_and_its_stack_is_told(driver, links):
    step = start(driver, links)
    crossing(links, is_stuck=True, came=2)
    await still(driver, links)
    assert not links[0].killed
    (why,) = links[1].killed
    assert why == "worker 'b' does not take what worker 'a' sends, for which C(0,0>1) on cpu:1 waits"
    links[1].lost = WorkerLostError("b", why, -9)
    driver.worker_lost(links[1], links[1].lost)
    driver.part_ended("a", PartEnded(step.number))
    with pytest.raises(WorkerLostError) as raised:
        await driver.issued(step)
    hang = pickle.loads(pickle.dumps(raised.value)).hang
    assert (hang.state, hang.worker, hang.peer) == ("not taking messages", "b", "a")
    assert hang.stack == "asyncpipe edge 0>1 of worker 'b':\n  File \"edge.py\", line 7, in hold\n"


async def test_a_step_in_which_something_happens_or_computes_goes_on(driver, links):
    step = start(driver, links)
    crossing(links)
    for moved in range(6):
        links[0].report = replace(links[0].report, moved=moved)
        await still(driver, links, 4.0)
    links[1].report = replace(
        links[1].report,
        running=[RunningReport("cpu:1", step.number, NAMES.of(task_number("C(0,0>1)")), "C(0,0>1)", 1.0)],
    )
    await still(driver, links, 40.0)
    assert (step.abort.is_requested, links[0].killed, links[1].killed) == (False, [], [])


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


def test_an_executor_shows_what_it_runs_and_what_it_waits_for(no_leaks):
    worker, controller = make_boards()
    executor, events = ThreadExecutor("cpu:0", board=worker), SimpleQueue()
    executor.start(lambda event, *, wake=True, at=None: events.put(event))
    begun, let_go, later = threading.Event(), threading.Event(), Queued()

    def fails():
        begun.set()
        assert let_go.wait(30)
        raise ValueError

    executor.submit([Assignment(StepStub(), 5, lambda: later), Assignment(StepStub(), 6, fails)])
    assert begun.wait(30)
    assert later.waited.wait(30)
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


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc")
def test_a_board_leaves_no_file():
    before = len(os.listdir("/proc/self/fd"))
    worker, controller = make_boards()
    controller.close()
    del worker
    assert len(os.listdir("/proc/self/fd")) == before
