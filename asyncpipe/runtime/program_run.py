"""One device's program in one step: how far it has come, what it waits for, and how it is told.

The driver makes one for each device, and hands all of them over before any event of the step is handled. From then on
the devices release each other's tasks without the loop::

    cpu:0   F(0,0) ─┬─ F(1,0) ─┬─ F(2,0) ──────▶ ...
                    │ released │
    cpu:1           └─▶ F(0,1) └─▶ F(1,1) ─────▶ ...
               every task's event goes to the driver's inbox; the loop is woken when a device is at its end

A task's event is in the inbox before any task is released that waits for it. ``step_abort.py`` says how a step ends
early. A step that follows another one (``StepSubmitted.after``) begins on a device when that one's program has begun
its last task there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol, runtime_checkable

from asyncpipe.core.engine.events import ProgramEnded
from asyncpipe.core.graph.programs import Program
from asyncpipe.runtime.executor import Completion, StepHandle

__all__ = ["FREE_SLOT", "STOP", "Message", "ProgramRun", "RunsPrograms"]

FREE_SLOT: Final = -1
"""In place of a position: an asynchronous device has completed a task."""
STOP: Final = -2
"""In place of a position: leave the program."""


class ProgramRun:
    """Used on the device's thread alone, but for ``send`` and ``stop``."""

    __slots__ = (
        "_awaits", "_before", "_end", "_others", "_slots", "abort", "call", "is_stopped", "position", "post",
        "program", "step", "surroundings",
    )  # fmt: skip

    def __init__(
        self,
        step: StepHandle,
        program: Program,
        call: Callable[[int], Completion | None],
        surroundings: AbstractContextManager[object],
        in_flight: int,
        send: Callable[[Message], None],
        before: ProgramRun | None = None,
    ) -> None:
        """``call`` runs a task, by its number, inside ``surroundings``, which are entered again after a wait.

        At most ``in_flight`` tasks are issued and not completed. ``send`` puts a message for this run into the queue
        of its device's thread. ``before`` is the run of the device in the step that this one follows.
        """
        self.step = step
        self.abort = step.abort
        self.program = program
        self.call = call
        self.surroundings = surroundings
        self.position = 0
        """The next task's."""
        self.is_stopped = False
        self.post = send
        self._awaits = list(program.awaits)
        self._end = len(program.awaits)
        self._slots = in_flight
        self._others: Sequence[ProgramRun] = ()
        self._before = before

    def join(self, runs: Sequence[ProgramRun]) -> None:
        """Let it release the tasks of the step's other ``runs``, itself included; before any of them begins."""
        self._others = runs

    @property
    def can_go_on(self) -> bool:
        """Whether there is a task to run, or nothing is left to do but to end."""
        if self.position == self._end:
            # Even of an aborted step: if all its tasks have run, the scheduler aborts nothing, and nobody stops this.
            return True
        if self.abort.is_requested:
            return self.is_stopped
        if self._awaits[self.position] or self._slots <= 0:
            return False
        return self._before is None or self._before.is_at_end

    @property
    def is_at_end(self) -> bool:
        """Whether every task has begun."""
        return self.position == self._end

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do but to end."""
        return self.position == self._end or self.is_stopped

    def release(self, position: int) -> None:
        """The task at ``position`` is done, or issued: tell the devices where a task waits for it."""
        for run, place in self.program.releases[position]:
            other = self._others[run]
            other.post((other, place))

    def send(self, place: int) -> None:
        """Have the device's thread call ``receive`` with ``place``. From any thread."""
        self.post((self, place))

    def stop(self) -> None:
        """As ``Stoppable.stop``."""
        self.send(STOP)

    def receive(self, place: int) -> None:
        """The task at ``place`` waits for one thing less, or what the constants above say has happened."""
        if place >= 0:
            self._awaits[place] -= 1
        elif place == FREE_SLOT:
            self._slots += 1
        else:
            self.is_stopped = True

    def use_slot(self) -> None:
        """A task is issued and not completed."""
        self._slots -= 1

    def end(self) -> ProgramEnded:
        """Say what is left, and drop all that refers to the step: messages that come late refer to this."""
        ended = ProgramEnded(self.step.number, self.program.tasks[self.position :])
        del self.call
        self._others = ()
        self._before = None
        del self.step, self.abort
        return ended


Message = tuple[ProgramRun, int]
"""What a device's thread is told of a run: which one, and a position or a constant."""


@runtime_checkable
class RunsPrograms(Protocol):
    """An executor that runs programs.

    It runs the tasks of a program in their order, each when it waits for nothing any more, and none once its step is
    aborted. It posts what became of each task before it releases what waits for the task; then, or once the run is
    stopped, it posts what ``end`` returns.
    """

    def submit_program(self, run: ProgramRun) -> None:
        """Run it, behind older ones as long as these can go on. Called on the loop's thread; must not block."""

    def send(self, message: Message) -> None:
        """Pass ``message`` on to its run, on the device's thread. From any thread; must not block."""
