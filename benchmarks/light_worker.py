"""The entry of worker processes for ``controller`` that load no torch: they answer each step at once.

What they answer is what a worker would tell of a step, and what they are told comes as it comes to any worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.worker_notes import WorkerUse
from asyncpipe.runtime.part_messages import PartEnded, PartJournal, StartPart
from asyncpipe.runtime.workers.control_client import ControlClient

__all__ = ["OwnTasks", "answer", "serve"]


@dataclass(frozen=True, slots=True)
class OwnTasks:
    """Controller: these tasks of every step are yours."""

    numbers: Sequence[int]
    """Of the whole graph, in the order of the worker's part."""
    copies: Sequence[int]
    """Those of them that bring something from another worker, by their places among them."""


_TIMES: Final = {(kind, 1, source): (8, 1e-5) for kind, source in (("F", None), ("B", None), ("C", 0), ("C", 2))}


def answer(step: int, own: OwnTasks) -> PartEnded:
    """A journal in which tasks run in the order of their numbers, 10 µs apart, and every copy has brought 4 bytes."""
    completed = [((k + 0.6) * 1e-5, number, k * 1e-5, (k + 0.5) * 1e-5) for number, k in enumerate(own.numbers)]
    notes = StepNotes(dict.fromkeys(own.copies, 4), arrived={copy: own.numbers[copy] * 1e-5 for copy in own.copies})
    journal = PartJournal(completed, [], notes).packed()
    return PartEnded(step, len(completed), journal, _TIMES, use=WorkerUse(1 << 28, {}))


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
