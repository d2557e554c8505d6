"""One step under way on a driver: its tenant, its gates, and the futures that tell its end."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from asyncpipe.core.engine.events import StepCompleted, StepFinished
from asyncpipe.core.graph.programs import Place, Programs
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.share import Share
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import HungTaskError
from asyncpipe.runtime.executor import Completion, CurrentTask, Executor, Replaceable, TaskFunction
from asyncpipe.runtime.observers import Observers
from asyncpipe.runtime.program_run import STOP, ProgramRun, TakesPrograms
from asyncpipe.runtime.under_way import raise_for

__all__ = [
    "Around",
    "Bind",
    "Execution",
    "Gates",
    "RunningTask",
    "Tenant",
    "call_inside",
    "nothing_around",
]

Bind = Callable[[Task], TaskFunction]
"""Gives a task its function. Called when it is dispatched, on the loop's thread; in a program when it begins, on its
device's."""

Around = Callable[[str], AbstractContextManager[Any]]
"""Makes the context in which functions of this device's tasks are called. For one thread at a time."""


def nothing_around(_: str) -> AbstractContextManager[Any]:
    """For functions that need no context."""
    return nullcontext()


def call_inside(context: AbstractContextManager[Any], function: TaskFunction) -> Completion | None:
    """What ``function`` returns inside ``context``."""
    with context:
        return function()


@dataclass(slots=True, eq=False)
class Tenant:
    """A user of a driver: one of possibly several pipelines on the same devices."""

    share: Share = field(default_factory=Share)
    """What its steps get of lanes that other tenants use as well."""
    observers: Observers = field(default_factory=Observers)
    """Who gets the records of its steps."""
    leaving: bool = field(default=False, init=False)
    """Set for good when the driver drains it: its steps are refused from then on."""


@dataclass(eq=False, repr=False)
class Execution:
    """One step under way."""

    number: int
    graph: TaskGraph
    bind: Bind
    around: Around
    notes: StepNotes
    tenant: Tenant
    executors: Sequence[Executor]
    """The executor of each of the graph's lanes."""
    after: Execution | None = field(default=None, init=False)
    """The step that this one follows, until it is handed over."""
    later: Execution | None = field(default=None, init=False)
    """The step behind this one."""
    runs: list[ProgramRun] = field(default_factory=list, init=False)
    """Of each device, if the step runs by programs."""
    gates: Sequence[Place] = field(default=(), init=False)
    """By gate, the task that waits there, among ``runs``."""

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._aborted = False
        self.issued: asyncio.Future[StepFinished] = loop.create_future()
        self.done: asyncio.Future[tuple[StepCompleted, StepRecord]] = loop.create_future()

    def function(self, task: Task) -> TaskFunction:
        """What a single task calls."""
        return partial(call_inside, self.around(task.lane.device), self.bind(task))

    @property
    def aborted(self) -> bool:
        """Read by executor threads: tasks that have not begun are dropped."""
        return self._aborted

    @aborted.setter
    def aborted(self, value: bool) -> None:
        # On any thread, and for good. The step behind needs what this one does not compute any more, and no scheduler
        # is asked before its devices go on.
        if value:
            self._aborted = True
            if (later := self.later) is not None:
                later.aborted = True

    def follow(self, earlier: Execution) -> None:
        """Run behind ``earlier``, and end with it if that ends early."""
        self.after, earlier.later = earlier, self
        # Asked after that: a device that fails from now on sets both.
        self.aborted = earlier.aborted

    # Programs

    def start_programs(self, programs: Programs, in_flight: int) -> None:
        """Hand each device its program, behind that of the step before. ``in_flight`` as in ``ProgramRun``."""
        tasks, bind, executors = self.graph.tasks, self.bind, []

        def call(task: int) -> Completion | None:
            return bind(tasks[task])()

        before = {} if self.after is None else {run.program.device: run for run in self.after.runs}
        self.gates = programs.gates
        for program in programs.programs:
            executor = self.executors[self.graph.lane_of[program.tasks[0]]]
            assert isinstance(executor, TakesPrograms)
            executors.append(executor)
            around = self.around(self.graph.devices[program.device])
            run = ProgramRun(self, program, call, around, in_flight, executor.send, before.get(program.device))
            self.runs.append(run)
        for run in self.runs:
            run.join(self.runs)
        for executor, run in zip(executors, self.runs, strict=True):
            executor.submit_program(run)

    def open_gate(self, gate: int) -> None:
        """Tell the program at ``gate`` that it is open. From any thread, once the step was handed over."""
        if runs := self.runs:  # Read once: they are dropped at the step's end.
            program, position = self.gates[gate]
            runs[program].send((runs[program], position))

    def abort(self) -> None:
        """Drop what has not begun, as the scheduler expects from now on."""
        self.aborted = True
        self.stop_programs()

    def stop_programs(self) -> None:
        """Let the devices leave their programs. From any thread."""
        self.aborted = self.aborted or bool(self.runs)
        for run in self.runs:
            run.send((run, STOP))

    # Its end

    def end(self) -> StepCompleted:
        """How it has ended, once it is ``done``. From any thread."""
        return self.done.result()[0]

    def record(self) -> StepRecord:
        """Its record, once it is ``done``. From any thread."""
        return self.done.result()[1]

    async def completed(self) -> StepRecord:
        """Wait until every device is done with the step; raises ``TaskError`` if a task failed meanwhile."""
        end, record = await asyncio.shield(self.done)
        self.raise_for(end)
        return record

    def raise_for(self, end: StepFinished | StepCompleted) -> None:
        """Raise ``TaskError`` if a task failed, ``PipelineClosedError`` if the step was cancelled."""
        raise_for(self.graph, end)

    def abandon(self, error: BaseException) -> None:
        """End the step with ``error``, because the scheduler cannot go on."""
        self.abort()
        self.runs = []
        self.later = None
        for future in (self.issued, self.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved, since perhaps no caller waits for this future


class Gates:
    """Opens the gates of one step (``TaskGraph.gates``). From any thread, even before the step is under way.

    What is opened early waits here. Each gate may be opened once; after the step's end that does nothing.
    """

    def __init__(self) -> None:
        self._opened: deque[int] = deque()
        self._open_gate: Callable[[int], None] | None = None

    def open(self, gates: Iterable[int]) -> None:
        """Open these gates, in this order: where a device waits at one, it goes on without the driver's loop."""
        self._opened.extend(gates)
        self._pass_on()

    def attach(self, open_gate: Callable[[int], None]) -> None:
        """Open the gates that are to be open, now that the step is under way. ``open_gate`` is for any thread."""
        self._open_gate = open_gate
        self._pass_on()

    def _pass_on(self) -> None:
        # Whoever takes a gate out of the deque opens it. One that is put in while a thread attaches is either seen
        # there, or the thread that puts it in finds what was attached.
        while self._opened and self._open_gate is not None:
            try:
                gate = self._opened.popleft()
            except IndexError:  # Another thread was faster.
                return
            self._open_gate(gate)


class RunningTask(NamedTuple):
    """A task that an executor is running."""

    execution: Execution
    task: int
    started: float
    """In seconds of the executors' clock, ``time.perf_counter``."""
    executor: Replaceable
    current: CurrentTask
    """What the executor's ``give_up`` takes."""
    expected: float | None
    """The mean seconds that it took in earlier steps of its job; ``None`` if that is not known."""
    fail: Callable[[Execution, int, BaseException], None]
    """Fails the step, because the executor has given the task up and will not report it."""
    waits: Callable[[Execution, int], Sequence[str]]
    """Says how other tasks of the step wait for this one."""

    @property
    def thread(self) -> int | None:
        """The identifier of the thread that runs it."""
        return self.executor.thread

    def give_up(self, seconds: float, found: Callable[[str], object]) -> None:
        """Abandon it after ``seconds``, and fail its step; ``found`` gets what to log, unless it has just ended."""
        task = self.execution.graph.tasks[self.task]
        waits, frame = self.waits(self.execution, self.task), sys._current_frames().get(self.thread or 0)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        error = HungTaskError(task.id, task.lane.device, seconds, self.expected, waits, stack)
        if self.executor.give_up(self.current, lambda: self.fail(self.execution, self.task, error)):
            found("\n".join([str(error), *(f"  {wait}" for wait in waits)]))
