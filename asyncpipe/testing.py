"""For tests of schedules and of code around a pipeline.

Executors that run tasks inline, or at a given speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from weakref import WeakKeyDictionary

from asyncpipe.core.engine.events import TaskCompleted, TaskFailed
from asyncpipe.core.graph.task import Lane, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.runtime.executor import Assignment, PostEvent, StepHandle

__all__ = ["EmulatedExecutor", "InlineExecutor"]


class InlineExecutor:
    """Runs each task on the loop's own thread as soon as it is submitted: one task at a time for all devices.

    ``Pipeline(..., executors=InlineExecutor)`` runs the same tasks in the same order on each device, without any
    concurrency. For CPU devices only, because a task must be done when its function returns.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._post: PostEvent | None = None

    def start(self, post: PostEvent) -> None:
        """As ``Executor.start``."""
        self._post = post

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Run the tasks at once."""
        assert self._post is not None
        for assignment in assignments:
            _run(assignment, self._post, seconds=0.0)

    def close(self) -> None:
        """Nothing to end."""

    def join(self) -> None:
        """Nothing to wait for."""


class EmulatedExecutor:
    """A device on which each task takes a given time: it computes, then sleeps for the rest.

    Use ``Pipeline(..., executors=lambda device: EmulatedExecutor(device, cost))`` with ``cost`` in seconds, for
    instance ``Costs(forward=0.01, backward=0.02, copy=0.005)``. Every lane has a thread of its own, so that copies
    run beside compute, as on a GPU. Sleeping threads need no core, so there may be more devices than the machine has
    cores. For CPU devices only, because a task must be done when its function returns.

    If several jobs share a ``DevicePool``, a subclass can override ``seconds`` to give each its own costs.
    """

    def __init__(self, device: str, cost: Callable[[Task], float]) -> None:
        self.device = device
        self._cost = cost
        self._post: PostEvent | None = None
        self._lanes: dict[Lane, SimpleQueue[Assignment | None]] = {}
        self._threads: list[threading.Thread] = []
        self._ended: WeakKeyDictionary[StepHandle, dict[int, threading.Event]] = WeakKeyDictionary()

    def start(self, post: PostEvent) -> None:
        """As ``Executor.start``."""
        self._post = post

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Queue each task on its lane."""
        for assignment in assignments:
            ended = self._ended.setdefault(assignment.step, {})
            ended[assignment.task] = threading.Event()
            lane = assignment.step.graph.tasks[assignment.task].lane
            if lane not in self._lanes:
                self._open(lane)
            self._lanes[lane].put(assignment)

    def close(self) -> None:
        """Let every lane end once its queue is empty."""
        for queue in self._lanes.values():
            queue.put(None)

    def join(self) -> None:
        """Wait for the lanes' threads."""
        for thread in self._threads:
            thread.join()

    def seconds(self, graph: TaskGraph, task: Task) -> float:
        """How long ``task`` of ``graph`` takes on this device. Called on the lane's thread."""
        return self._cost(task)

    def _open(self, lane: Lane) -> None:
        queue = self._lanes[lane] = SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(queue,), name=f"asyncpipe {lane}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, queue: SimpleQueue[Assignment | None]) -> None:
        assert self._post is not None
        while (assignment := queue.get()) is not None:
            ended, graph = self._ended[assignment.step], assignment.step.graph
            for dependency in graph.dependencies[assignment.task]:
                if dependency in ended:
                    ended[dependency].wait()
            _run(assignment, self._post, self.seconds(graph, graph.tasks[assignment.task]))
            ended[assignment.task].set()
            del assignment, ended, graph


def _run(assignment: Assignment, post: PostEvent, seconds: float) -> None:
    """Run a task and report it, not before ``seconds`` have passed."""
    step, task, function, _ = assignment
    if step.abort.is_requested:
        step.abort.drop(post, task)
        return
    started = time.perf_counter()
    try:
        assert function() is None, "this executor cannot wait for an asynchronous device"
    except BaseException as error:  # noqa: BLE001 - reported, as any executor does
        step.abort.request(post, TaskFailed(step.number, task, error))
        return
    time.sleep(max(0.0, started + seconds - time.perf_counter()))
    post(TaskCompleted(step.number, task, started, time.perf_counter()))
