"""The entry of worker processes for ``controller`` that load no torch: they answer each step at once.

What they answer is what a worker would tell of a step, and what they are told comes as it comes to any worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpipe.core.engine.events import TaskCompleted
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.worker_notes import WorkerUse
from asyncpipe.runtime.part_messages import PartEnded, StartPart
from asyncpipe.runtime.workers.control_client import ControlClient

__all__ = ["OwnTasks", "answer", "serve"]


@dataclass(frozen=True, slots=True)
class OwnTasks:
    """Controller: these tasks of every step are yours."""

    numbers: Sequence[int]
    """Of the whole graph."""
    copies: Sequence[int]
    """Those of them that bring something from another worker."""


def answer(step: int, own: OwnTasks) -> PartEnded:
    """A journal in which tasks run in the order of their numbers, 10 µs apart, and every copy has brought 4 bytes."""
    events = [((k + 0.6) * 1e-5, TaskCompleted(step, k, k * 1e-5, (k + 0.5) * 1e-5)) for k in own.numbers]
    notes = StepNotes(dict.fromkeys(own.copies, 4), arrived={copy: copy * 1e-5 for copy in own.copies})
    return PartEnded(step, events, notes, use=WorkerUse(1 << 28, {}))


async def serve(control: ControlClient) -> None:
    """Serve the controller until it says to stop."""
    own = OwnTasks((), ())

    def handle(message: object) -> None:
        nonlocal own
        if isinstance(message, OwnTasks):
            own = message
        elif isinstance(message, StartPart):
            control.send(answer(message.step, own))

    await control.serve(handle)
