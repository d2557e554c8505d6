"""The seam between the driver and the devices: what an executor is given, and what it reports.

Guarantees of every ``Executor``:

- A task begins after the tasks that it depends on and that were submitted to the same executor before it.
- Every submitted task is reported exactly once as completed, failed or dropped. A task that an asynchronous device has
  only queued is first reported as issued. ``BaseException`` is reported like any other exception.
- An idle executor keeps no assignment, tensor or exception alive.
- ``submit`` and ``close`` never block. ``join`` waits for the threads, after ``close``.

``thread_executor.py`` has the one that a pipeline uses. Executors that can run whole programs say so by one more
method (``RunsPrograms``, in ``program_run.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.runtime.step_abort import PostEvent, StepAbort

__all__ = [
    "Assignment",
    "Completion",
    "CompletionToken",
    "CurrentTask",
    "Executor",
    "PostEvent",
    "Replaceable",
    "StepHandle",
    "TaskFunction",
]


class Completion(Protocol):
    """Work that an asynchronous device has queued."""

    def wait(self) -> tuple[float, float]:
        """Block until the device has done it; when it began and ended, in seconds of ``time.perf_counter``."""


TaskFunction = Callable[[], Completion | None]
"""What a task computes. Returns ``None`` if it is done, else what to wait for."""


class StepHandle(Protocol):
    """What an executor needs to know of the step that a task belongs to."""

    number: int
    graph: TaskGraph
    abort: StepAbort
    """Whether it ends early: then tasks that have not begun are dropped. What fails is reported through it."""

    @property
    def tenant(self) -> object:
        """Whose step it is. An asynchronous device's tasks of different tenants do not wait for each other."""


class Assignment(NamedTuple):
    """One task for an executor."""

    step: StepHandle
    task: int
    function: TaskFunction
    awaited: bool = True
    """Whether another device waits for the task, so that the scheduler must hear of it at once."""


class Executor(Protocol):
    """Runs the tasks of one device."""

    def start(self, post: PostEvent) -> None:
        """Begin to accept tasks, and call ``post`` with what becomes of them."""

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Queue tasks behind those submitted before. Called on the loop's thread; must not block."""

    def close(self) -> None:
        """Accept no more tasks. Queued ones still run. May be called again, from any thread."""

    def join(self) -> None:
        """Wait until the last task has been reported."""


CompletionToken: TypeAlias = list[None]
"""Has one element until the task is reported or given up."""

CurrentTask: TypeAlias = tuple[StepHandle, int, float, CompletionToken]
"""The task that a thread is running: its step and number, when it began, and its token."""


@runtime_checkable
class JoinsInTime(Protocol):
    """An executor that can be waited for at the interpreter's exit, where a task may hang."""

    def join_within(self, seconds: float) -> None:
        """As ``Executor.join``, but at most so long."""


@runtime_checkable
class Replaceable(Protocol):
    """An executor that has threads: it can abandon a hung task, and a tenant may leave it."""

    thread: int | None
    """The identifier of the thread that runs tasks, once it has started."""

    @property
    def running(self) -> Sequence[CurrentTask]:
        """What its threads run or wait for, the one that began first in front. May be read from any thread."""

    def give_up(self, current: CurrentTask, fail: Callable[[], None]) -> bool:
        """Abandon a hung task and continue with the next one; false if the task has just ended by itself.

        Called on the loop's thread. ``fail`` reports the failure of the task, before the next task begins, so that no
        other task of its step runs. The hung task runs on until it returns; its result is dropped.
        """

    def leave(self, tenant: object) -> None:
        """End the threads that only ``tenant`` uses, once they are done. From any thread; must not block."""
