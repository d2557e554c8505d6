"""The driver: passes events to the scheduler and the scheduler's commands to the executors, on one asyncio loop.

Everything runs on the loop's thread, except ``_post``, ``_open_gate`` and the methods that say "From any thread".
Executor threads, and whoever opens gates, append events to an inbox, and wake the loop only if no wake-up is pending,
so that one wake-up serves many events when tasks are short.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from asyncpipe.core.engine.arbiter import Said
from asyncpipe.core.engine.events import (
    Command,
    Dispatch,
    Event,
    GateOpened,
    Outcome,
    RunPrograms,
    StepCancelled,
    StepCompleted,
    StepFinished,
    StepSubmitted,
    TaskFailed,
)
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.programs import Programs, programs
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.hangs.reports import PartReport, RunningReport, SeenWorker, WorkerReport
from asyncpipe.core.hangs.roots import hang_roots
from asyncpipe.core.policies.policy import MakePolicy
from asyncpipe.core.policies.share import Share
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import remove_record
from asyncpipe.errors import AsyncpipeError, HungTaskError, InvalidTransition, PolicyError
from asyncpipe.runtime.arrivals import Arrivals, Listens
from asyncpipe.runtime.execution import Around, Bind, Execution, Gates, RunningTask, nothing_around
from asyncpipe.runtime.executor import Assignment, Executor, JoinsInTime, Replaceable
from asyncpipe.runtime.program_run import RunsPrograms
from asyncpipe.runtime.step_abort import StepAbort
from asyncpipe.runtime.step_driver import StepDriver, Tenant
from asyncpipe.runtime.turn_taking import ArbiterSeat
from asyncpipe.runtime.watchdog import Suspect

__all__ = ["Driver", "tasks_ahead"]

_logger = logging.getLogger(__name__)

_FROM_OUTSIDE = (GateOpened, StepCancelled)
"""Events that may come after the end of their step."""

AHEAD_SECONDS = 0.02
"""So far the host runs ahead of a device, and at least ``LEAST_AHEAD`` tasks: four times what a thread may keep the
interpreter. What another stream has read is free again when the device has got there: each task ahead takes memory."""
LEAST_AHEAD = 4

FULL_INBOX = 64
"""So many events wake the loop, even if none of them has to be handled at once."""


def tasks_ahead(most: int, tasks: int, seconds: float) -> int:
    """How many tasks a device may have, at ``most``, if its ``tasks`` of a step take ``seconds`` (0: not known yet)."""
    return min(most, max(LEAST_AHEAD, round(AHEAD_SECONDS * tasks / seconds))) if seconds else most


class Driver(StepDriver[Execution]):
    """Runs task graphs, several at a time, on a set of executors and on the loop that it is opened on."""

    def __init__(
        self,
        executors: Mapping[str, Executor],
        *,
        in_flight: int = 16,
        policy: MakePolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``executors`` by device name; ``in_flight`` and ``policy`` as in ``SchedulerState``; ``clock`` in seconds."""
        super().__init__(clock)
        self._executors = dict(executors)
        self.scheduler = SchedulerState(in_flight=in_flight, policy=policy)
        """Decides which task is next. Others may read it, on the loop's thread."""
        self._policy = "" if policy is None else getattr(policy, "__qualname__", repr(policy))
        """The name of a policy that is somebody else's code."""
        self._in_flight = in_flight
        self._programs: WeakKeyDictionary[TaskGraph, Programs] = WeakKeyDictionary()
        self._inbox: deque[tuple[float | None, Event]] = deque()
        """What happened, and when, if that is known."""
        self._is_broken = False
        """Whether every step was ended by ``_break``: what devices still report then belongs to none."""
        self._seconds: WeakKeyDictionary[TaskGraph, float] = WeakKeyDictionary()
        """How long the last step of each graph took that was completed."""
        self._wakeup_pending = False
        """Whether the loop was asked to run ``_drain_inbox`` and has not begun to."""
        self._asked_at = 0.0
        """When the loop was last asked to."""
        self._handled_at = -math.inf
        """The time of the last event that was handled."""
        self._wakeups: list[tuple[float, float]] = []
        """For ``StepNotes.wakeups``."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.Context()
        """In which events are handled. That of the thread that posts one would mark observers as inside a task."""
        self._alarm: asyncio.TimerHandle | None = None
        """Asks the scheduler again at ``wake_at``, if no event comes before."""
        self._tenants: WeakKeyDictionary[Tenant, None] = WeakKeyDictionary()
        """Those that have begun a step."""
        self._nobody = Tenant()
        """Whose steps are that nobody is named for."""
        self._aborting = threading.RLock()
        """For ``StepAbort``."""
        self.seat: ArbiterSeat | None = None
        """Of a driver whose devices other processes may use as well: where to ask whose task is next."""

    def open(self) -> None:
        """Start the executors and bind the driver to the running loop."""
        self._loop = asyncio.get_running_loop()
        for executor in self._executors.values():
            executor.start(self._post)

    def add(self, name: str, executor: Executor) -> None:
        """Start one more executor, for the device ``name``, on a driver that is open."""
        self._executors[name] = executor
        executor.start(self._post)

    def listener(self, device: str) -> Listens | None:
        """The executor for ``device``, if its thread takes what arrives for it."""
        executor = self._executors[device]
        return executor if Arrivals.AVAILABLE and isinstance(executor, Listens) else None

    def __contains__(self, device: str) -> bool:
        """Whether there is an executor for this device."""
        return device in self._executors

    def accepts(self, tenant: Tenant) -> bool:
        return self._loop is not None and super().accepts(tenant)

    async def run(
        self,
        graph: TaskGraph,
        bind: Bind,
        notes: StepNotes | None = None,
        *,
        around: Around = nothing_around,
        gates: Gates | None = None,
        tenant: Tenant | None = None,
    ) -> Execution:
        """Run one step of ``graph`` and return when its last task is issued. The arguments are those of ``start``.

        Raises as ``start`` and ``issued``.
        """
        return await self.issued(self.start(graph, bind, notes, around=around, gates=gates, tenant=tenant))

    def start(
        self,
        graph: TaskGraph,
        bind: Bind,
        notes: StepNotes | None = None,
        *,
        around: Around = nothing_around,
        gates: Gates | None = None,
        tenant: Tenant | None = None,
        after: Execution | None = None,
        number: int | None = None,
    ) -> Execution:
        """Begin one step of ``graph``, on the driver's loop.

        ``bind`` gives each task its function, which is called inside what ``around`` makes. Functions write what they
        measure into ``notes``, which becomes part of the record that the observers of ``tenant`` get. ``gates`` opens
        the graph's gates, from any thread and as early as it likes. A step ``after`` another one, which may be under
        way, follows it on every device, and ends with it if that fails or is cancelled (``StepSubmitted.after``).
        ``number`` is the step's, higher than those before, if somebody else counts the steps of this driver.

        Raises ``PipelineClosedError`` before anything runs, once ``drain`` has begun, and where the step before has
        failed or was cancelled already.
        """
        tenant = tenant or self._nobody
        self._check_open(tenant)
        executors = [self._executors[lane.device] for lane in graph.lanes]
        abort = StepAbort(self._next_number if number is None else number, self._aborting)
        execution = Execution(abort, graph, bind, around, notes or StepNotes(), tenant, executors)
        share, parts = tenant.share, 0
        if self.seat is not None and self.seat.is_shared:
            execution.seat, parts = self.seat, 1  # Somebody else decides.
        elif self.seat is not None:
            share = Share()  # There is nothing to decide.
        self._begin(execution, after)
        self._tenants[tenant] = None
        by_program = all(isinstance(executor, RunsPrograms) for executor in set(executors))
        try:
            self._handle(StepSubmitted(execution.number, graph, share, by_program, execution.follows, parts))
        except InvalidTransition:
            del self._under_way[execution.number]
            raise
        if gates is not None:
            gates.attach(partial(self._open_gate, execution))
        return execution

    def _open_gate(self, execution: Execution, gate: int) -> None:
        """What ``gate`` stands for is there. From any thread. Ignored if the step has ended.

        As when devices release each other: the event is in the inbox before a task can begin that waits for it, and a
        device with a program needs no scheduler to go on.
        """
        self._post(GateOpened(execution.number, gate), wake=not execution.runs, at=self._clock())
        execution.open_gate(gate)

    async def drain(self, tenant: Tenant | None = None) -> None:
        """Refuse new steps, and wait until those under way have completed, failed or been cancelled.

        With ``tenant``, only its steps; with the last of its job, the scheduler forgets what it has measured. A
        backward that still waits for its caller's gradients is cancelled, because they may never come.
        """
        self._refuse(tenant)
        if not self.is_closed:
            self._handle_inbox()  # A gate may have been opened.
        for execution in self._steps_of(tenant):
            # In other phases a gate waits for another worker, which ends its part of the step as well.
            if execution.graph.phase is Phase.BACKWARD and self.scheduler.waits_outside(execution.number):
                self.cancel(execution)
        await super().drain(tenant)
        if tenant is not None:
            job = tenant.share.job
            # The references at once: the last of another tenant may go on any thread meanwhile.
            others = [other for reference in self._tenants.keyrefs() if (other := reference()) is not None]
            if not any(other.share.job == job and not other.is_leaving for other in others):
                self.scheduler.forget(job)

    def leave(self, tenant: Tenant) -> None:
        """End the threads that only ``tenant`` uses, once they are done. From any thread."""
        for executor in list(self._executors.values()):
            if isinstance(executor, Replaceable):
                executor.leave(tenant)

    # For the watchdog

    def running(self) -> list[RunningTask]:
        """The running tasks, on executors that can give them up. From any thread."""
        return [
            RunningTask(execution, current[1], current[2], executor, current)
            for executor in list(self._executors.values())
            if isinstance(executor, Replaceable)
            for current in executor.running
            if (execution := self._under_way.get(current[0].number)) is not None
        ]

    def suspects(self) -> list[Suspect]:
        """The running tasks, as the watchdog sees them."""
        return [
            Suspect(
                running.started,
                self._expected(running.execution, running.task),
                partial(self._give_up, running),
                running.executor.thread,
            )
            for running in self.running()
        ]

    def _expected(self, execution: Execution, task: int) -> float | None:
        """The seconds that a task usually takes, or those of such a step where tasks are not measured, as of no job."""
        expected = self.scheduler.expected(execution.number, task)
        return self._seconds.get(execution.graph) if expected is None else expected

    def _give_up_late(self, step: Execution) -> None:
        now = self._clock()
        for running in self.running():
            if running.execution is step:
                self._give_up(running, now - running.started, _logger.error)

    def _give_up(self, running: RunningTask, seconds: float, found: Callable[[str], object]) -> None:
        """Abandon a task that hangs, and fail its step."""
        execution, number = running.execution, running.task
        task, expected = execution.graph.tasks[number], self.scheduler.expected(execution.number, number)
        waits, frame = self._waits(execution, number), sys._current_frames().get(running.executor.thread or 0)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        error = HungTaskError(task.id, task.lane.device, seconds, expected, waits, stack)
        if running.executor.give_up(running.current, lambda: self.fail(execution, number, error)):
            execution.tenant.hung = error
            found("\n".join([str(error), *(f"  {wait}" for wait in waits)]))

    def _waits(self, execution: Execution, task: int) -> Sequence[str]:
        """How other tasks of a step wait for one that hangs, from the one that is farthest from it."""
        ended, heads = self.progress(execution)
        running = []
        for each in self.running():
            other = each.execution.graph.tasks[each.task]
            running.append(RunningReport(other.lane.device, each.execution.number, each.task, other.id, 0.0))
        report = WorkerReport(0, running, PartReport(frozenset(ended), heads, frozenset()))
        seen = SeenWorker("", execution.graph.own_devices, report)
        hung = execution.graph.tasks[task]
        for root in hang_roots(execution.number, execution.graph, [seen]):
            if (root.task, root.device) == (hung.id, hung.lane.device):
                return tuple(map(str, root.waits))
        return ()

    def progress(self, execution: Execution) -> tuple[set[int], dict[str, int]]:
        """The tasks of a step that have ended, and by device that runs a program the next one. From any thread.

        What happens meanwhile may be in it or not.
        """
        if execution.done.done():
            return set(range(len(execution.graph.tasks))), {}
        if not (runs := execution.runs):
            return self.scheduler.ended(execution.number), {}
        ended: set[int] = set()
        heads: dict[str, int] = {}
        for run in runs:
            tasks, position = run.program.tasks, run.position
            ended.update(tasks[:position])
            if position < len(tasks):
                heads[execution.graph.devices[run.program.device]] = tasks[position]
        return ended.difference(each.task for each in self.running() if each.execution is execution), heads

    def fail(self, execution: Execution, task: int, error: BaseException) -> None:
        """Fail the step with ``error``, because the executor has given up ``task`` and will not report it."""
        self._handle_inbox()  # The executor may have reported the task just before.
        if self.scheduler.holds(execution.number, task):
            execution.abort.request(self._post, TaskFailed(execution.number, task, error))
            self._handle_inbox()

    def close(self) -> None:
        """Cancel what is under way, and let the executors end once their queues are empty.

        May be called again, from any thread.
        """
        self.is_closed = True
        for execution in list(self._under_way.values()):
            execution.abort.cancel(self._post)
            # Not left to the loop, which may be at its end.
            execution.abort.confirm()
        for executor in list(self._executors.values()):
            executor.close()

    def join(self) -> None:
        """Wait for the executors' threads, after ``close``."""
        for executor in self._executors.values():
            executor.join()

    def join_within(self, seconds: float) -> None:
        """As ``join``, but at most so long, and only for executors that can say when that is over."""
        until = time.monotonic() + seconds
        for executor in self._executors.values():
            if isinstance(executor, JoinsInTime):
                executor.join_within(max(0.0, until - time.monotonic()))

    def cancel(self, execution: Execution) -> None:
        if execution.number in self._under_way:
            execution.abort.cancel(self._post)
            self._handle_inbox()

    def _handle_inbox(self) -> None:
        # This is no wake-up, so it must not count as a late one.
        self._asked_at = self._clock()
        self._drain_inbox()

    def _post(self, event: Event, *, wake: bool = True, at: float | None = None) -> None:
        """Put an event into the inbox. Called on any thread."""
        self._inbox.append((at, event))
        if (wake or len(self._inbox) >= FULL_INBOX) and not self._wakeup_pending:
            self._wakeup_pending = True
            self._asked_at = self._clock()
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._drain_inbox, context=self._context)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise

    def _drain_inbox(self) -> None:
        # With that error every step has ended, and who waits for one gets it.
        with suppress(PolicyError):
            self._handle_events()

    def _handle_events(self) -> None:
        # Cleared first: an event that arrives after this line is either handled below or wakes the loop again.
        self._wakeup_pending = False
        if self._is_broken:
            self._inbox.clear()
        commands: list[Command] = []
        now = self._clock()
        late = now - self._asked_at
        handled_at = self._handled_at
        try:
            while self._inbox:
                at, event = self._inbox.popleft()
                if isinstance(event, _FROM_OUTSIDE) and event.step not in self._under_way:
                    continue  # It ended meanwhile.
                # Two tasks may be reported in another order than they ended in. What waits for them begins later.
                if at is None:
                    at = now
                handled_at = at if at > handled_at else handled_at
                commands += self.scheduler.handle(event, handled_at)
                if self.seat is not None and (seat := self._under_way[event.step].seat) is not None:
                    seat.happened(event)
        except BaseException as error:
            self._break(error)
            raise
        self._handled_at = handled_at
        self._proceed(commands, now)
        for seat in {each.seat for each in self._under_way.values()} if self.seat is not None else ():
            if seat is not None:
                seat.flush()
        self._wakeups.append((late, self._clock() - now))

    def sit_down(self, *say: Callable[[Sequence[Said]], object]) -> ArbiterSeat:
        """Share devices from now on, as an arbiter answers to what it is told by ``say``; as nobody, without it."""
        self.seat = ArbiterSeat(self._post, self._hand_over, *say)
        return self.seat

    def _hand_over(self, tasks: Sequence[Dispatch]) -> None:
        self._proceed([each for each in tasks if each.step in self._under_way], self._clock())

    def _handle(self, event: Event) -> None:
        now = self._handled_at = max(self._handled_at, self._clock())
        try:
            commands = self.scheduler.handle(event, now)
        except InvalidTransition:  # Nothing was changed.
            raise
        except BaseException as error:
            self._break(error)
            raise
        self._proceed(commands, now)

    def _wake(self) -> None:
        self._alarm = None
        with suppress(PolicyError):
            self._proceed([], self._clock())

    def _proceed(self, commands: list[Command], now: float) -> None:
        """Execute ``commands`` and those of the policies, which choose when all events have been handled.

        Also sets the alarm for the time at which a policy wants to choose again.
        """
        try:
            self._execute(commands + self.scheduler.choose(now))
            wake_at = self.scheduler.wake_at(now)
            if self._policy and wake_at is None and self.scheduler.is_stuck:
                raise PolicyError(
                    f"{self._policy} chooses none of the ready tasks while nothing runs, and has no wake_at: nobody "
                    "would ask it again; every step of its device pool ends"
                )
        except BaseException as error:
            self._break(error)
            raise
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if wake_at is not None and not self.is_closed:
            assert self._loop is not None
            self._alarm = self._loop.call_later(max(0.0, wake_at - now), self._wake)

    def _execute(self, commands: list[Command]) -> None:
        batches: dict[Executor, list[Assignment]] = {}
        for command in commands:
            execution = self._under_way[command.step]
            if isinstance(command, Dispatch):
                graph = execution.graph
                executor = execution.executors[graph.lane_of[command.task]]
                function = execution.function(graph.tasks[command.task])
                awaited = bool(graph.remote_dependents[command.task])
                assignment = Assignment(execution, command.task, function, awaited)
                batches.setdefault(executor, []).append(assignment)
            elif isinstance(command, RunPrograms):
                self._run_programs(execution)
            elif isinstance(command, StepFinished):
                if not execution.issued.done():
                    execution.issued.set_result(command)
            elif isinstance(command, StepCompleted):
                self._complete(execution, command)
            else:
                execution.abort.confirm()
        for executor, assignments in batches.items():
            executor.submit(assignments)

    def _run_programs(self, execution: Execution) -> None:
        graph = execution.graph
        before = None if execution.follows is None else self._under_way.get(execution.follows)
        late = partial(self._run_programs_late, execution)
        if before is not None and before.held is not None:
            execution.held = []
            before.held.append(late)
            return
        if before is not None and before.seat is not execution.seat:
            # A device runs tasks that come one by one and programs by turns, so one begins behind the end of the other.
            execution.held = []
            before.done.add_done_callback(lambda _: late())
            return
        if execution.seat is not None:
            execution.seat.begin(execution)
            return
        if graph not in self._programs:
            self._programs[graph] = programs(graph)
        longest = max(len(program.tasks) for program in self._programs[graph].programs)
        in_flight = tasks_ahead(self._in_flight, longest, self._seconds.get(graph, 0.0))
        execution.start_programs(self._programs[graph], in_flight, [] if before is None else before.runs)

    def _run_programs_late(self, execution: Execution) -> None:
        held, execution.held = execution.held or (), None
        if execution.number in self._under_way:
            self._run_programs(execution)
            if execution.abort.is_requested:
                execution.abort.confirm()
        for begin in held:
            begin()

    def _complete(self, execution: Execution, end: StepCompleted) -> None:
        observers = execution.tenant.observers
        notes = execution.notes
        # All wake-ups since the last step that ended.
        notes.wakeups, self._wakeups = self._wakeups, []
        notes.why_workers = execution.tenant.why_workers
        observers.note_devices(notes)
        record = remove_record(self.scheduler, execution.number)
        notes.taken = record.notes.taken or notes.taken
        record = replace(record, notes=notes)
        execution.complete(record)
        if end.outcome is Outcome.OK:
            self._seconds[execution.graph] = record.journal[-1][0] - record.journal[0][0]
        self._end(execution, end)
        observers.show(record)

    def _break(self, error: BaseException) -> None:
        """End all steps with ``error``, which the scheduler or a policy raised, so that no caller waits for ever.

        Raises a ``PolicyError`` in its place if a policy is somebody else's code.
        """
        self._is_broken = True
        told = error
        if self._policy and isinstance(error, Exception) and not isinstance(error, AsyncpipeError):
            told = PolicyError(f"{self._policy} raised {error!r}; every step of its device pool ends")
            told.__cause__ = error
        self.close()
        for execution in self._under_way.values():
            execution.abandon(told)
        self._under_way.clear()
        if told is not error:
            raise told
