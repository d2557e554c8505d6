"""A device's thread takes what arrives for it while it has nothing to do."""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue

import pytest
from driver_helpers import StepStub

from asyncpipe.core.engine.events import TaskCompleted
from asyncpipe.runtime.arrivals import Arrivals
from asyncpipe.runtime.executor import Assignment

pytestmark = pytest.mark.skipif(not Arrivals.AVAILABLE, reason="needs Linux")


def run_a_task(executor):
    """On a thread that may be waiting."""
    executor.submit([Assignment(StepStub(), 0, lambda: None)])
    assert isinstance(executor.events.get(timeout=30), TaskCompleted)


class Pipe:
    def __init__(self):
        self.descriptor, self.sender = os.pipe()
        self.taken = SimpleQueue()
        self.is_open = True

    def take(self):
        """Notes the thread that takes."""
        os.read(self.descriptor, 1)
        self.taken.put(threading.get_ident())
        return self.is_open

    def arrive(self):
        os.write(self.sender, b"!")


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    os.close(made.descriptor)
    os.close(made.sender)


def test_what_arrives_is_taken_by_the_thread_that_waits(executor, pipe):
    run_a_task(executor)
    executor.listen(pipe.descriptor, pipe.take)
    for _ in range(3):
        pipe.arrive()
        assert pipe.taken.get(timeout=30) == executor.thread
        run_a_task(executor)


def test_nothing_is_taken_during_a_task(executor, pipe):
    executor.listen(pipe.descriptor, pipe.take)
    begun, end = threading.Event(), threading.Event()

    def task():
        begun.set()
        end.wait(30)

    executor.submit([Assignment(StepStub(), 0, task)])
    assert begun.wait(30)
    pipe.arrive()
    assert pipe.taken.empty()
    end.set()
    assert pipe.taken.get(timeout=30) == executor.thread


@pytest.mark.parametrize("by", ["ignore", "take"])
def test_who_is_done_is_not_asked_again(executor, pipe, by):
    executor.listen(pipe.descriptor, pipe.take)
    if by == "take":
        pipe.is_open = False
        pipe.arrive()
        pipe.taken.get(timeout=30)
    else:
        executor.ignore(pipe.descriptor, pipe.take)
    run_a_task(executor)
    pipe.arrive()
    run_a_task(executor)
    assert pipe.taken.empty()


def test_a_descriptor_that_is_closed_early(executor):
    pipe, is_over = Pipe(), threading.Event()

    def take():
        # As an edge's own thread does, which has seen the end at the same time.
        os.close(pipe.descriptor)
        is_over.set()
        return False

    executor.listen(pipe.descriptor, take)
    pipe.arrive()
    assert is_over.wait(30)
    run_a_task(executor)
    other = os.dup(pipe.sender)
    executor.ignore(pipe.descriptor, take)
    run_a_task(executor)
    os.close(other)
    os.close(pipe.sender)
