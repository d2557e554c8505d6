"""What passes between the parts of a step that different workers run: sent when a task is done, stored when it comes.

A copy task belongs to the worker that receives. What it would read from the tables of the sender's step travels in a
message, which the receiver puts into its own tables at the same place (``step_tensors.py``); then the copy runs as if
the sender's stage were here::

    worker a    F(i,0) ── activations[i, 0, 1] ──▶ message ─┐
    worker b                                                └─▶ activations[i, 0, 1] ── C(i,0>1) ── F(i,1)

Any other dependency between workers is a message without tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from asyncpipe.core.graph.part import Departure, Part
from asyncpipe.core.graph.task import WHOLE_STEP, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.ops.execute.step_tensors import StepTensors
from asyncpipe.ops.model.microbatch import Packet
from asyncpipe.ops.model.ties import Ties

__all__ = ["Crossings", "Send"]

_COUNTED = b"counted"
"""For gradients that come with the count of their micro-batch's loss, as the last tensor."""

Send = Callable[[Departure, bytes, Sequence[Tensor | None], torch.Event | None], None]
"""Sends what belongs to a departure, once the event has happened. Must not block."""


class Crossings:
    """What one step sends and gets in one worker. ``left`` is called on the devices' threads, ``arrived`` on any."""

    def __init__(self, graph: TaskGraph, part: Part, tensors: StepTensors, ties: Ties, send: Send) -> None:
        """``graph`` is that of the whole step, of which ``part`` runs here."""
        self._graph = graph
        self._part = part
        self._tensors = tensors
        self._ties = ties
        self._send = send
        self._sent: dict[int, int] = {}
        """By task that waits for several: how many of these have been sent."""
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Send what others need of this worker before any of its tasks has run."""
        for departure in self._part.at_start:
            self._depart(departure, None)

    def left(self, task: int, event: torch.Event | None) -> None:
        """Task number ``task`` of the part is done, or will be at ``event``: send what waits for it."""
        for departure in self._part.departures[task]:
            self._depart(departure, event)

    def _depart(self, departure: Departure, event: torch.Event | None) -> None:
        meta, tensors = b"", list[Tensor | None]()
        if departure.tensors and self._is_last(departure):
            meta, tensors = self._take(self._graph.tasks[departure.task])
        self._send(departure, meta, tensors, event)

    def _is_last(self, departure: Departure) -> bool:
        """Whether nothing else of this part is to be sent to the same task."""
        if departure.among == 1:
            return True
        with self._lock:
            sent = self._sent[departure.task] = self._sent.get(departure.task, 0) + 1
        return sent == departure.among

    def _take(self, waiting: Task) -> tuple[bytes, list[Tensor | None]]:
        """What a copy elsewhere reads; leaves the tables."""
        assert waiting.source is not None
        source, user, i = waiting.source, waiting.stage, waiting.microbatch
        if i == WHOLE_STEP:
            if waiting.is_gradient_copy:
                return b"", self._ties.take_gradients(user, source)
            return b"", self._ties.values(source, user)
        if not waiting.is_gradient_copy:
            packet = self._tensors.activations.pop((i, source, user))
            return packet.shell(), list(packet.tensors)
        gradients = self._tensors.gradients.pop((i, source, user))
        if (count := self._tensors.counts.get(i)) is None:
            return b"", gradients
        return _COUNTED, [*gradients, count]

    def arrived(self, task: int, meta: bytes, tensors: list[Tensor | None]) -> None:
        """Store what has come for ``task``, a number of the whole graph, before it is told of it."""
        waiting = self._graph.tasks[task]
        if waiting.kind is not TaskKind.COPY or not (meta or tensors):
            return
        assert waiting.source is not None
        source, user, i = waiting.source, waiting.stage, waiting.microbatch
        if i == WHOLE_STEP:
            self._tensors.tied_arrived[source, user] = tensors
        elif not waiting.is_gradient_copy:
            self._tensors.activations[i, source, user] = Packet.from_shell(meta, list(_present(tensors)))
        else:
            if meta == _COUNTED:
                (count,) = _present([tensors.pop()])
                self._tensors.counts[i] = count
            self._tensors.gradients[i, source, user] = tensors


def _present(tensors: Iterable[Tensor | None]) -> Iterable[Tensor]:
    for tensor in tensors:
        assert tensor is not None
        yield tensor
