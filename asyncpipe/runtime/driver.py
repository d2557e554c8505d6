"""The driver: carries events to the scheduler and its commands to the executors, on one asyncio loop.

Everything but ``_post`` runs on the loop's thread. Executor threads append events to an inbox and wake the
loop only if it is not awake already, so that one wake-up serves many events when tasks are short.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from asyncpipe.core.engine.events import (
    Command,
    Dispatch,
    Event,
    GateOpened,
    StepCancelled,
    StepCompleted,
    StepFinished,
    StepNotes,
    StepSubmitted,
    TaskFailed,
)
from asyncpipe.core.engine.policies.policy import MakePolicy
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.errors import InvalidTransition, PipelineClosedError
from asyncpipe.runtime.execution import Bind, Execution, Gates, RunningTask, Tenant
from asyncpipe.runtime.executor import Assignment, Executor, Replaceable
from asyncpipe.runtime.waiting import outlast

__all__ = ["Driver"]

_T = TypeVar("_T")


class Driver:
    """Runs task graphs, several at a time, on a set of executors. Belongs to the loop that it is opened on."""

    def __init__(
        self,
        executors: Mapping[str, Executor],
        *,
        in_flight: int = 16,
        policy: MakePolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``executors`` by device name; ``in_flight`` and ``policy`` as in ``SchedulerState``; ``clock`` in seconds."""
        self._executors = dict(executors)
        self._state = SchedulerState(in_flight=in_flight, policy=policy)
        self._clock = clock
        self._inbox: deque[Event] = deque()
        self._awake = False
        self._woken = 0.0
        """When the loop was last asked to run ``_drain_inbox``."""
        self._wakeups: list[tuple[float, float]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        """Looks at the scheduler again when only time has passed."""
        self._executions: dict[int, Execution] = {}
        self._steps = 0
        self._draining = False
        self._closed = False

    def open(self) -> None:
        """Start the executors and bind the driver to the running loop."""
        self._loop = asyncio.get_running_loop()
        for executor in self._executors.values():
            executor.start(self._post)

    def add(self, name: str, executor: Executor) -> None:
        """Start one more executor, for the device ``name``; the driver is open."""
        self._executors[name] = executor
        executor.start(self._post)

    def __contains__(self, device: str) -> bool:
        """Whether there is an executor for this device."""
        return device in self._executors

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called, by its owner or because the scheduler broke."""
        return self._closed

    def takes(self, tenant: Tenant) -> bool:
        """Whether steps of ``tenant`` may begin. From any thread."""
        return self._loop is not None and not (self._closed or self._draining or tenant.leaving)

    async def run(
        self,
        graph: TaskGraph,
        bind: Bind,
        notes: StepNotes | None = None,
        *,
        gates: Gates | None = None,
        tenant: Tenant | None = None,
    ) -> Execution:
        """Run one step of ``graph`` and return when its last task is issued; ``gates`` opens those of its gates.

        ``notes`` is where the tasks that ``bind`` gives leave what they measure; it becomes a part of the record, which
        the observers of ``tenant`` are shown.

        Raises ``TaskError`` for the first task that fails. Cancellation takes effect between two tasks. In
        both cases running tasks have ended and queued ones are dropped when this raises.
        Raises ``PipelineClosedError`` before anything runs, once ``drain`` has begun.
        """
        tenant = tenant or Tenant()
        if not self.takes(tenant):
            raise PipelineClosedError("the pipeline is closed")
        execution = Execution(self._steps, graph, bind, notes or StepNotes(), tenant, self._executors)
        self._steps += 1
        self._executions[execution.number] = execution
        self._handle(StepSubmitted(execution.number, graph, tenant.share))
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

    async def drain(self, tenant: Tenant | None = None) -> None:
        """Let no step begin any more, and wait until those under way have completed, failed or been cancelled.

        All steps, or those of ``tenant``, of whose job what was measured is then forgotten. A backward that still waits
        for its caller's gradients is cancelled: they may never come.
        """
        # Whoever goes on stepping would be waited for without an end.
        if tenant is None:
            self._draining = True
        else:
            tenant.leaving = True
        for execution in self._of(tenant):
            if execution.closed_gates and execution.number in self._executions:
                self._handle(StepCancelled(execution.number))
        while executions := self._of(tenant):
            await asyncio.wait([execution.done for execution in executions])
        if tenant is not None:
            self._state.forget(tenant.share.job)

    def _of(self, tenant: Tenant | None) -> list[Execution]:
        return [step for step in self._executions.values() if tenant is None or step.tenant is tenant]

    # For who watches over tasks

    def running(self) -> list[RunningTask]:
        """The tasks that executors are at, of those executors that can give one up."""
        found = []
        for executor in self._executors.values():
            if not isinstance(executor, Replaceable) or (current := executor.current) is None:
                continue
            handle, task, started, _ = current
            if (execution := self._executions.get(handle.number)) is not None:
                expected = self._state.expected(handle.number, task)
                found.append(RunningTask(execution, task, started, executor, current, expected))
        return found

    def fail(self, execution: Execution, task: int, error: BaseException) -> None:
        """End the step because ``task``, which its executor will not report any more, came to ``error``."""
        # It may have been reported just before its executor was told not to. Nobody woke the loop for this.
        self._woken = self._clock()
        self._drain_inbox()
        if execution.number in self._executions:
            with suppress(InvalidTransition):
                self._handle(TaskFailed(execution.number, task, error))

    def close(self) -> None:
        """Let the executors end once their queues are empty. May be called again, from any thread."""
        self._closed = True
        for executor in self._executors.values():
            executor.close()

    def join(self) -> None:
        """Wait for the executors' threads, after ``close``."""
        for executor in self._executors.values():
            executor.join()

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
        except BaseException as error:
            self._give_up(error)
            raise
        self._proceed(commands, now)
        self._wakeups.append((late, self._clock() - now))

    def _handle(self, event: Event) -> None:
        now = self._clock()
        self._proceed(self._state.handle(event, now), now)

    def _look_again(self) -> None:
        self._alarm = None
        self._proceed([], self._clock())

    def _proceed(self, commands: list[Command], now: float) -> None:
        """Obey ``commands``, then what policies choose now that all is known; see when they want to be asked again."""
        try:
            self._obey(commands + self._state.choose(now))
        except BaseException as error:
            self._give_up(error)
            raise
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        wake_at = self._state.wake_at(now)
        if wake_at is not None and not self._closed:
            assert self._loop is not None
            self._alarm = self._loop.call_later(max(0.0, wake_at - now), self._look_again)

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
        observers = execution.tenant.observers
        notes = execution.notes
        # What the driver itself has seen since the last step that ended.
        notes.wakeups, self._wakeups = self._wakeups, []
        notes.memory = observers.survey()
        record = replace(self._state.take_record(execution.number), notes=notes)
        del self._executions[execution.number]
        _resolve(execution.done, (end, record))
        observers.show(record)

    def _give_up(self, error: BaseException) -> None:
        """The scheduler or a policy raised: every step ends with ``error``, so that nobody waits for ever."""
        self.close()
        for execution in self._executions.values():
            execution.abandon(error)
        self._executions.clear()


def _resolve(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)
