"""One step under way on threads, its gates, and its tasks as the watchdog sees them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

from asyncpipe.core.engine.events import Event
from asyncpipe.core.graph.programs import Programs, TaskPlace
from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.runtime.executor import Completion, CurrentTask, Executor, Replaceable, TaskFunction
from asyncpipe.runtime.program_run import ProgramRun, RunsPrograms
from asyncpipe.runtime.step_abort import StepAbort
from asyncpipe.runtime.step_driver import DrivenStep, Tenant

__all__ = [
    "Around",
    "Bind",
    "Execution",
    "Gates",
    "RunningTask",
    "StepSeat",
    "call_inside",
    "nothing_around",
]

Bind = Callable[[Task], TaskFunction]
"""Gives a task its function. Called when it is dispatched, on the loop's thread; in a program when it begins, on its
device's."""

Around = Callable[[str], AbstractContextManager[Any]]
"""Makes the context in which functions of this device's tasks are called. For one thread at a time."""


class StepSeat(Protocol):
    """Where a step goes of which somebody else says when its tasks begin: an ``ArbiterSeat``."""

    def begin(self, execution: Execution) -> None: ...
    def happened(self, event: Event) -> None: ...
    def flush(self) -> None: ...


def nothing_around(_: str) -> AbstractContextManager[Any]:
    """For functions that need no context."""
    return nullcontext()


def call_inside(context: AbstractContextManager[Any], function: TaskFunction) -> Completion | None:
    """What ``function`` returns inside ``context``."""
    with context:
        return function()


class Execution(DrivenStep):
    """One step under way on threads."""

    def __init__(
        self,
        abort: StepAbort,
        graph: TaskGraph,
        bind: Bind,
        around: Around,
        notes: StepNotes,
        tenant: Tenant,
        executors: Sequence[Executor],
    ) -> None:
        """``executors`` are those of the graph's lanes."""
        super().__init__(abort, graph, tenant)
        self.bind = bind
        self.around = around
        self.notes = notes
        self.executors = executors
        self.runs: list[ProgramRun] = []
        """Of each device, if the step runs by programs."""
        self.seat: StepSeat | None = None
        """What decides about it, if other processes use its devices as well."""
        self.held: list[Callable[[], None]] | None = None
        """While it waits for the end of the step before: what begins the steps that are to begin behind it."""
        self._gates: Sequence[TaskPlace] = ()
        """By gate, the task that waits there, among ``runs``."""
        self._record: StepRecord | None = None

    def function(self, task: Task) -> TaskFunction:
        """What a single task calls."""
        return partial(call_inside, self.around(task.lane.device), self.bind(task))

    def start_programs(self, programs: Programs, in_flight: int, before: Sequence[ProgramRun]) -> None:
        """Hand each device its program, behind those ``before``, of the step that this one follows.

        ``in_flight`` as in ``ProgramRun``.
        """
        tasks, bind, executors = self.graph.tasks, self.bind, []

        def call(task: int) -> Completion | None:
            return bind(tasks[task])()

        earlier = {run.program.device: run for run in before}
        self._gates = programs.gates
        for program in programs.programs:
            executor = self.executors[self.graph.lane_of[program.tasks[0]]]
            assert isinstance(executor, RunsPrograms)
            executors.append(executor)
            around = self.around(self.graph.devices[program.device])
            run = ProgramRun(self, program, call, around, in_flight, executor.send, earlier.get(program.device))
            self.runs.append(run)
        self.abort.runs = self.runs
        for run in self.runs:
            run.join(self.runs)
        for executor, run in zip(executors, self.runs, strict=True):
            executor.submit_program(run)

    def open_gate(self, gate: int) -> None:
        """Tell the program at ``gate`` that it is open. From any thread, once the step was handed over."""
        if runs := self.runs:  # Read once: they are dropped at the step's end.
            program, position = self._gates[gate]
            runs[program].send(position)

    def record(self) -> StepRecord:
        """Its record, once it is ``done``. From any thread."""
        assert self._record is not None
        return self._record

    def complete(self, record: StepRecord) -> None:
        """Every device is done with the step."""
        self._record = record
        self.runs = []  # They refer to it.

    def abandon(self, error: BaseException) -> None:
        """End the step with ``error``, because the scheduler cannot go on."""
        self.abort.confirm()
        self.abort.end()
        self.runs = []
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
