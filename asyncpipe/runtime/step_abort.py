"""How a step ends early: a flag, the inbox, and STOP, always in this order.

A step is aborted by a task that fails, a cancellation, a hang that is given up, or the end of the driver. Devices run
without asking the scheduler, so it could be told that a task is done which it does not know to have begun. Three
signals in one order prevent that::

    any thread          request: ── flag on, of this step and of those behind it ──▶ event into the driver's inbox ─┐
    driver's loop         scheduler.handle(event) ──▶ Abort ──▶ confirm: STOP to each program ◀────────────────────┘
    device's thread       flag on: begins nothing;   STOP: leaves its program, posts ProgramEnded

    state      flag  inbox                          a device                              the scheduler
    ─────────  ────  ─────────────────────────────  ────────────────────────────────────  ─────────────
    running    off   events of tasks                begins tasks, releases what waits     running
    requested  on    TaskFailed or StepCancelled    ends and reports what it has begun    running
    confirmed  on    handled; STOP is sent          as before; then says what it left     draining
    ended      on    every ProgramEnded is handled  has nothing of the step               completed

Why no event comes too early for the scheduler. Call the event that ``request`` posts the *end*.

1. A device posts what became of a task before it releases what waits for the task, and begins a task only if the flag
   is off once the task waits for nothing. If the flag is off there, the end is not in the inbox yet, since ``request``
   posts it after setting the flag. So what a task waits for stands before the end, and the scheduler knows that the
   task may have begun.
2. A device that begins a task while another thread sets the flag has read it before. So 1. holds for this task, too.
3. A device that runs single tasks drops those that it finds aborted. It reports them by ``drop``, which waits for the
   lock that ``request`` holds from the flag to the end: so the end stands before them.
4. STOP follows the end. So what a device has left of its program (``ProgramEnded``) stands behind the end as well.
5. A step may be put behind another one (``precede``) while that is aborted. Both happen under the lock: either
   ``request`` finds the later step and aborts it, or ``precede`` finds the flag and refuses.

``tests/runtime/test_step_abort.py`` checks this at every interleaving of two devices, the loop and who aborts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from asyncpipe.core.engine.events import Event, StepCancelled, TaskDropped

__all__ = ["PostEvent", "StepAbort", "Stoppable"]


class PostEvent(Protocol):
    """Passes an event to the scheduler. Called on executor threads."""

    def __call__(self, event: Event, *, wake: bool = True, at: float | None = None) -> None:
        """Without ``wake`` the event waits until another one wakes the scheduler, which must follow soon.

        It happened ``at`` this time of the executors' clock, or for ``None`` when the scheduler gets it.
        """


class Stoppable(Protocol):
    """One device's program in the step."""

    def stop(self) -> None:
        """Have the device leave the program, if it is not at its end. From any thread."""


class StepAbort:
    """Whether and how one step ends early. For any thread."""

    __slots__ = ("_lock", "is_requested", "later", "number", "runs")

    def __init__(self, number: int, lock: threading.RLock | None = None) -> None:
        """``number`` is the step's; ``lock`` is one for all steps that may follow each other."""
        self.number = number
        self.is_requested = False
        """The flag. Once it is on, no device begins a task of the step."""
        self.runs: Sequence[Stoppable] = ()
        """The step's programs, if it runs by programs."""
        self.later: StepAbort | None = None
        """The step behind this one, which ends early with it."""
        # Reentrant: a signal handler or a finalizer may close the driver while its thread is in here.
        self._lock = lock or threading.RLock()

    def precede(self, later: StepAbort) -> bool:
        """Put ``later`` behind this step, so that both end early together; false if this one is aborted already."""
        with self._lock:
            if not self.is_requested:
                self.later = later
            return not self.is_requested

    def request(self, post: PostEvent, event: Event, at: float | None = None) -> None:
        """Abort this step and those behind it; ``event`` says why. Returns before the scheduler has handled it."""
        with self._lock:
            for step in self._chain():
                step.is_requested = True
            post(event, at=at)

    def cancel(self, post: PostEvent) -> None:
        """As ``request``, because nobody wants the steps any more. Those that are aborted already are left alone."""
        with self._lock:
            # Each is told: the scheduler takes nobody along with a step whose last task was issued meanwhile.
            wanted = [step for step in self._chain() if not step.is_requested]
            for step in wanted:
                step.is_requested = True
            for step in wanted:
                post(StepCancelled(step.number))

    def drop(self, post: PostEvent, task: int) -> None:
        """Report a single task that was not begun because its step is aborted."""
        with self._lock:
            post(TaskDropped(self.number, task))

    def confirm(self) -> None:
        """The scheduler knows, or its inbox does: let the devices leave their programs."""
        with self._lock:
            for step in self._chain():
                step.is_requested = True
        for run in self.runs:
            run.stop()

    def end(self) -> None:
        """The step is over: refer to nothing of it."""
        self.runs = ()
        self.later = None

    def _chain(self) -> Iterator[StepAbort]:
        step: StepAbort | None = self
        while step is not None:
            yield step
            step = step.later
