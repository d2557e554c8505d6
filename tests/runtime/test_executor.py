"""The executor's guarantees: order, one report per task, nothing kept alive while idle."""

from __future__ import annotations

import gc
import threading
import weakref
from queue import SimpleQueue

import pytest
from driver_helpers import Queued, StepStub

from asyncpipe.core.engine.events import TaskCompleted, TaskDropped, TaskFailed, TaskIssued
from asyncpipe.runtime.device_thread import LONGEST_HOLD_UP, hold_up
from asyncpipe.runtime.executor import Assignment
from asyncpipe.runtime.thread_executor import ThreadExecutor


@pytest.fixture
def step():
    return StepStub()


def next_event(executor):
    return executor.events.get(timeout=30)


def test_tasks_run_in_order_on_one_thread(executor, step):
    ran = []

    def work(number):
        return lambda: ran.append((number, threading.current_thread().name))

    executor.submit([Assignment(step, k, work(k)) for k in range(3)])
    executor.submit([Assignment(step, 3, work(3))])
    events = [next_event(executor) for _ in range(4)]
    assert [(type(event), event.task) for event in events] == [(TaskCompleted, k) for k in range(4)]
    assert ran == [(k, "asyncpipe cpu:0") for k in range(4)]
    assert all(event.started <= event.ended for event in events)
    assert events[0].ended <= events[1].started


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_every_exception_is_reported_and_the_thread_lives_on(executor, step, error):
    def work():
        raise error("no")

    executor.submit([Assignment(step, 0, work), Assignment(StepStub(), 1, lambda: None)])
    failed = next_event(executor)
    assert isinstance(failed, TaskFailed)
    assert type(failed.error) is error
    assert isinstance(next_event(executor), TaskCompleted)


def test_tasks_of_an_aborted_step_are_dropped(executor, step):
    def abort():
        step.abort.confirm()

    executor.submit([Assignment(step, 0, abort), Assignment(step, 1, lambda: pytest.fail("ran"))])
    assert isinstance(next_event(executor), TaskCompleted)
    assert next_event(executor) == TaskDropped(3, 1)


def test_nothing_runs_behind_a_task_of_its_step_that_failed(executor, step):
    executor.submit([Assignment(step, 0, lambda: 1 / 0), Assignment(step, 1, lambda: pytest.fail("ran"))])
    assert isinstance(next_event(executor), TaskFailed)
    assert next_event(executor) == TaskDropped(3, 1)


def test_nothing_is_kept_while_idle(step, monkeypatch):
    asked = SimpleQueue()

    class WatchedQueue(SimpleQueue):
        """Tells when the thread asks for the next batch."""

        def get(self):
            asked.put(None)
            return super().get()

    monkeypatch.setattr("asyncpipe.runtime.device_thread.SimpleQueue", WatchedQueue)
    executor = ThreadExecutor("cpu:7")
    executor.start(lambda event, *, wake=True, at=None: None)
    asked.get(timeout=30)

    class Work:
        def __call__(self):
            return None

    works = [Work(), Work()]
    dead = [weakref.ref(work) for work in works]
    executor.submit([Assignment(step, task, works.pop()) for task in range(2)])
    asked.get(timeout=30)
    gc.collect()
    assert [ref() for ref in dead] == [None, None]
    executor.close()
    executor.join()


def test_queued_work_is_issued_at_once_and_completed_in_issue_order(executor, step):
    first, second = Queued(), Queued()
    executor.submit([Assignment(step, 0, lambda: first), Assignment(step, 1, lambda: second)])
    assert [next_event(executor), next_event(executor)] == [TaskIssued(3, 0), TaskIssued(3, 1)]
    second.done.set()
    first.done.set()
    assert [next_event(executor), next_event(executor)] == [
        TaskCompleted(3, 0, 1.0, 2.0),
        TaskCompleted(3, 1, 1.0, 2.0),
    ]


def test_close_runs_what_is_queued_and_ends_every_thread():
    events = SimpleQueue()
    executor = ThreadExecutor("cpu:9")
    executor.start(lambda event, *, wake=True, at=None: events.put(event))
    queued = Queued()
    queued.done.set()
    executor.submit([Assignment(StepStub(), 0, lambda: queued)])
    executor.close()
    executor.close()
    executor.join()
    assert isinstance(events.get(timeout=30), TaskIssued)
    assert isinstance(events.get(timeout=30), TaskCompleted)
    assert not [thread for thread in threading.enumerate() if "cpu:9" in thread.name]


def test_a_hung_task_that_cannot_be_reported_still_loses_its_device(step):
    begun, let_go, failures, threads = threading.Event(), threading.Event(), [], []

    def hang():
        threads.append(threading.current_thread())
        begun.set()
        assert let_go.wait(30)

    def fail():
        failures.append(threading.current_thread())
        raise ValueError("a bug")

    events = SimpleQueue()
    executor = ThreadExecutor("cpu:6")
    executor.start(lambda event, *, wake=True, at=None: events.put(event))
    executor.submit([Assignment(step, 0, hang)])
    assert begun.wait(30)
    with pytest.raises(ValueError, match="a bug"):
        executor.give_up(executor.running[0], fail)
    assert len(failures) == 1
    assert executor.thread != threads[0].ident
    executor.submit([Assignment(step, 1, lambda: None)])
    event = events.get(timeout=10)
    assert (type(event), event.task) == (TaskCompleted, 1)
    let_go.set()
    executor.close()
    executor.join()
    threads[0].join(30)


@pytest.mark.promise(
    "Everything ends", "While a stage is compiled no other task runs, and that time is not counted as time of tasks."
)
def test_what_holds_a_task_up_is_no_part_of_its_time(executor, step, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("asyncpipe.runtime.device_thread.time.perf_counter", lambda: now[0])
    shown = []

    def work():
        now[0] += 1.0
        hold_up(True)
        hold_up(True)  # Nested: a wait, and compiling behind it.
        shown.append(executor.running[0][2])
        now[0] += 500.0
        hold_up(False)
        hold_up(False)
        shown.append(executor.running[0][2])
        now[0] += 2.0

    executor.submit([Assignment(step, 0, work)])
    assert next_event(executor) == TaskCompleted(3, 0, 600.0, 603.0)
    # A watchdog sees a task that begins later, and then one that has just begun.
    assert shown == [101.0 + LONGEST_HOLD_UP, 601.0]
    hold_up(True)  # A thread that runs no task is not concerned.
