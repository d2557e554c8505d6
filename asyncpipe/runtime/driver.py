"""The driver: carries events to the scheduler and its commands to the executors, on one asyncio loop.

Everything but ``_post`` runs on the loop's thread. Executor threads append events to an inbox and wake the
loop only if it is not awake already, so that one wake-up serves many events when tasks are short.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from asyncpipe.core.events import (
    Command,
    DeviceMemory,
    Dispatch,
    Event,
    GateOpened,
    Observer,
    Outcome,
    StepCancelled,
    StepCompleted,
    StepFinished,
    StepNotes,
    StepRecord,
    StepSubmitted,
)
from asyncpipe.core.graph import TaskGraph
from asyncpipe.core.scheduler import SchedulerState
from asyncpipe.core.task import Task
from asyncpipe.errors import PipelineClosedError, TaskError
from asyncpipe.runtime.executor import Assignment, Executor, Work
from asyncpipe.runtime.observing import Observers
from asyncpipe.runtime.waiting import outlast

__all__ = ["Driver", "Execution", "Gates"]

_T = TypeVar("_T")

Bind = Callable[[Task], Work]
"""Gives a task its computation; called on the loop's thread when the task is dispatched."""


class Execution:
    """One step under way."""

    def __init__(
        self, number: int, graph: TaskGraph, bind: Bind, notes: StepNotes, executors: Mapping[str, Executor]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.aborted = False
        """Read by executor threads: tasks that have not begun are dropped."""
        self.graph = graph
        self.closed_gates = len(graph.gates)
        self.bind = bind
        self.notes = notes
        self.executors = [executors[lane.device] for lane in graph.lanes]
        self.issued: asyncio.Future[StepFinished] = loop.create_future()
        self.done: asyncio.Future[tuple[StepCompleted, StepRecord]] = loop.create_future()

    async def completed(self) -> StepRecord:
        """Wait until every device is done with the step; raises ``TaskError`` if a task failed meanwhile."""
        end, record = await asyncio.shield(self.done)
        self.raise_for(end)
        return record

    def raise_for(self, end: StepFinished | StepCompleted) -> None:
        """Raise ``TaskError`` if this is how a step ends that failed, ``PipelineClosedError`` if it was cut short."""
        if end.outcome is Outcome.CANCELLED:
            raise PipelineClosedError("the pipeline was closed during this step")
        if end.outcome is not Outcome.FAILED:
            return
        assert end.failed_task is not None
        assert end.error is not None
        task = self.graph.tasks[end.failed_task]
        raise TaskError(task.id, task.kind.value, task.microbatch, task.stage, task.lane.device, end.error)

    def abandon(self, error: BaseException) -> None:
        """End the step from outside, because the scheduler cannot go on."""
        self.aborted = True
        for future in (self.issued, self.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # Retrieved: nobody may be waiting for this one.


class Gates:
    """Opens the gates of one step, from any thread and from before the step is under way."""

    def __init__(self) -> None:
        self._opened: list[int] = []
        self._driver: Driver | None = None
        self._execution: Execution | None = None

    def open(self, microbatches: Iterable[int], loop: Callable[..., object]) -> None:
        """The caller's gradients for ``microbatches`` are there; ``loop`` calls a function on the driver's loop."""
        loop(self._open, list(microbatches))

    def attach(self, driver: Driver, execution: Execution) -> None:
        """The step is under way; on the driver's loop."""
        self._driver, self._execution = driver, execution
        opened, self._opened = self._opened, []
        self._open(opened)

    def _open(self, microbatches: list[int]) -> None:
        if self._driver is None or self._execution is None:
            self._opened += microbatches
            return
        for microbatch in microbatches:
            self._driver.open_gate(self._execution, microbatch)


class Driver:
    """Runs task graphs, several at a time, on a set of executors. Belongs to the loop that it is opened on."""

    def __init__(
        self,
        executors: Mapping[str, Executor],
        *,
        in_flight: int = 16,
        observers: Iterable[Observer] = (),
        survey: Callable[[], dict[str, DeviceMemory]] = dict,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``executors`` by device name; ``in_flight`` as in ``SchedulerState``; ``clock`` in seconds.

        ``survey`` reads the memory of the physical devices; it is called on the loop, once a step that is observed.
        """
        self._observers = Observers(observers)
        self._survey = survey
        self._executors = dict(executors)
        self._state = SchedulerState(in_flight=in_flight)
        self._clock = clock
        self._inbox: deque[Event] = deque()
        self._awake = False
        self._woken = 0.0
        """When the loop was last asked to run ``_drain_inbox``."""
        self._wakeups: list[tuple[float, float]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._executions: dict[int, Execution] = {}
        self._steps = 0
        self._closed = False

    @property
    def observers(self) -> list[Observer]:
        """Who is shown completed steps; the list may be changed at any time."""
        return self._observers.shown

    def open(self) -> None:
        """Start the executors and bind the driver to the running loop."""
        self._loop = asyncio.get_running_loop()
        for executor in self._executors.values():
            executor.start(self._post)

    async def run(
        self, graph: TaskGraph, bind: Bind, notes: StepNotes | None = None, *, gates: Gates | None = None
    ) -> Execution:
        """Run one step of ``graph`` and return when its last task is issued; ``gates`` opens those of its gates.

        ``notes`` is where the tasks that ``bind`` gives leave what they measure; it becomes a part of the record.

        Raises ``TaskError`` for the first task that fails. Cancellation takes effect between two tasks. In
        both cases running tasks have ended and queued ones are dropped when this raises.
        """
        if self._closed or self._loop is None:
            raise PipelineClosedError("the driver is not open")
        execution = Execution(self._steps, graph, bind, notes or StepNotes(), self._executors)
        self._steps += 1
        self._executions[execution.number] = execution
        self._handle(StepSubmitted(execution.number, graph))
        if gates is not None:
            gates.attach(self, execution)
        try:
            end = await asyncio.shield(execution.issued)
        except asyncio.CancelledError:
            await self._cancel(execution)
            raise
        execution.raise_for(end)
        return execution

    def open_gate(self, execution: Execution, microbatch: int) -> None:
        """The caller's gradient for ``microbatch`` is there. Ignored by a step that has ended otherwise."""
        if execution.number in self._executions:
            execution.closed_gates -= 1
            self._handle(GateOpened(execution.number, microbatch))

    async def drain(self) -> None:
        """Wait until every step under way has completed, failed or been cancelled.

        A backward that still waits for its caller's gradients is cancelled: they may never come.
        """
        for execution in tuple(self._executions.values()):
            if execution.closed_gates and execution.number in self._executions:
                self._handle(StepCancelled(execution.number))
        while self._executions:
            await asyncio.wait([execution.done for execution in self._executions.values()])

    def close(self) -> None:
        """Let the executors end once their queues are empty. May be called again, from any thread."""
        self._closed = True
        for executor in self._executors.values():
            executor.close()
        self._observers.close()

    def join(self) -> None:
        """Wait for the executors' and observers' threads, after ``close``."""
        for executor in self._executors.values():
            executor.join()
        self._observers.join()

    async def _cancel(self, execution: Execution) -> None:
        """Abort and wait until no thread touches the step any more, however often we are cancelled meanwhile."""
        if execution.number in self._executions:
            self._handle(StepCancelled(execution.number))
        await outlast(execution.done)

    def _post(self, event: Event, *, wake: bool = True) -> None:
        """Take an event from an executor's thread to the loop."""
        self._inbox.append(event)
        if wake and not self._awake:
            self._awake = True
            self._woken = self._clock()
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._drain_inbox)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise

    def _drain_inbox(self) -> None:
        # Cleared first: an event that arrives from here on is either seen below or wakes the loop again.
        self._awake = False
        commands: list[Command] = []
        now = self._clock()
        late = now - self._woken
        try:
            while self._inbox:
                commands += self._state.handle(self._inbox.popleft(), now)
            self._obey(commands + self._state.settle(now))
        except BaseException as error:
            self._give_up(error)
            raise
        self._wakeups.append((late, self._clock() - now))

    def _handle(self, event: Event) -> None:
        now = self._clock()
        commands = self._state.handle(event, now)
        self._obey(commands + self._state.settle(now))

    def _obey(self, commands: list[Command]) -> None:
        batches: dict[Executor, list[Assignment]] = {}
        for command in commands:
            execution = self._executions[command.step]
            if isinstance(command, Dispatch):
                graph = execution.graph
                executor = execution.executors[graph.lane_of[command.task]]
                work = execution.bind(graph.tasks[command.task])
                awaited = bool(graph.remote_dependents[command.task])
                assignment = Assignment(execution, command.task, work, awaited)
                batches.setdefault(executor, []).append(assignment)
            elif isinstance(command, StepFinished):
                _resolve(execution.issued, command)
            elif isinstance(command, StepCompleted):
                self._complete(execution, command)
            else:
                execution.aborted = True
        for executor, assignments in batches.items():
            executor.submit(assignments)

    def _complete(self, execution: Execution, end: StepCompleted) -> None:
        record = replace(self._state.take_record(execution.number), notes=self._noted(execution.notes))
        del self._executions[execution.number]
        _resolve(execution.done, (end, record))
        self._observers.show(record)

    def _noted(self, notes: StepNotes) -> StepNotes:
        """``notes`` with what the driver itself has seen since the last step that ended."""
        notes.wakeups, self._wakeups = self._wakeups, []
        if self._observers.shown:
            notes.memory = self._survey()
        return notes

    def _give_up(self, error: BaseException) -> None:
        """The scheduler broke (a bug): nobody may wait for ever."""
        self.close()
        for execution in self._executions.values():
            execution.abandon(error)
        self._executions.clear()


def _resolve(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)
