"""The edges of one pipeline between this worker and others: what is sent, and to which step goes what arrives.

A message holds its credit until the task that waits for it has run. The window of an edge has room for all messages of
the steps that have begun here and are not settled, so no schedule can deadlock: a task may wait for any of them,
whatever came before it and is still to be taken. What comes for a step that has not begun here takes room of others
until it begins; and it does, since the controller tells all workers to begin a step, whatever edges do.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from asyncpipe.core.graph.part import Departure, Part, TaskNames
from asyncpipe.core.hangs.reports import PartReport, ReceiverReport, SenderReport
from asyncpipe.core.records.worker_notes import EdgeTraffic, WorkerUse
from asyncpipe.errors import EdgeError
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.memory import allocated_bytes
from asyncpipe.ops.edges.connect import Edges, connect
from asyncpipe.ops.edges.edge_in import EdgeIn
from asyncpipe.ops.edges.message import EdgeHeader, EdgeMessage, ReceivedMessage
from asyncpipe.pipeline.resident.part_step import PartStep
from asyncpipe.pipeline.wire_messages import LoadPipeline
from asyncpipe.runtime.arrivals import Listens
from asyncpipe.runtime.part_messages import EdgeBroken
from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.door import Door
from asyncpipe.runtime.workers.meeting import meet

__all__ = ["Links"]


class Links:
    """Used on the worker's loop, except for what edges call, and ``reports`` and ``probe``."""

    def __init__(self, load: LoadPipeline, control: ControlClient) -> None:
        self._load = load
        self._control = control
        self._worker_of = {each.name: each.worker for each in load.devices.values()}
        self._edges = Edges({}, {})
        self._listener: Listens | None = None
        """Whose thread takes messages itself."""
        self._epoch = 0
        self._windows: dict[int, int] = {}
        """By worker that sends: how many messages of its edge may be held here."""
        self._told: dict[int, EdgeTraffic] = {}
        """What the controller knows of what was sent, by the worker that receives."""
        self._lock = threading.Lock()
        """Guards what follows, which edges use as well."""
        self._steps: dict[int, PartStep] = {}
        """Those that were not settled."""
        self._early: dict[int, list[ReceivedMessage]] = {}
        """Messages for steps that have not begun here."""
        self._last = -1
        """The last step that has begun here."""

    def open(self, door: Door, own: Sequence[Device], listener: Listens | None) -> None:
        """Connect to the other workers, which come through ``door``. Blocks.

        The thread of ``listener`` takes messages itself.
        """
        load, secret = self._load, self._control.edge_secret
        devices = {device.physical for device in own}
        self._edges = connect(
            load.me,
            meet(load.me, load.pairs, door, load.addresses, job=str(load.pipeline), secret=secret),
            transport=load.transports,
            device=devices.pop() if len(devices) == 1 else None,
            on_message=self._arrived,
            on_broken=self._broken,
            window=1,
            shared=listener is not None,
        )
        self._listener = listener
        for incoming in self._shared():
            assert listener is not None
            listener.listen(incoming.descriptor, incoming.take)

    def close(self) -> None:
        """Close all edges. Blocks."""
        for incoming in self._shared():
            assert self._listener is not None
            self._listener.ignore(incoming.descriptor, incoming.take)
        self._edges.close()

    def _shared(self) -> list[EdgeIn]:
        """The edges from which the device takes messages itself."""
        return [incoming for incoming in self._edges.into.values() if incoming.is_shared]

    # Steps

    @property
    def steps(self) -> Mapping[int, PartStep]:
        """The parts of steps that have begun here and are not settled, by number. From any thread."""
        return self._steps

    def advance(self, epoch: int) -> None:
        """Begin ``epoch``, if it is a later one: messages of older ones are dropped."""
        if epoch > self._epoch:
            self._epoch = epoch
            self._edges.advance(epoch)

    def widen(self, own: Part) -> None:
        """Make room for all messages of a step that is about to begin, beside those of the others."""
        coming: Counter[int] = Counter()
        for each in (*(step.part for step in self._steps.values()), own):
            for device, count in each.arrivals_from.items():
                coming[self._worker_of[device]] += count
        for sender, count in coming.items():
            if count != self._windows.get(sender):
                self._windows[sender] = count
                self._edges.into[sender].set_window(count)

    def begun(self, number: int, step: PartStep | None) -> None:
        """A step has begun here, or (``None``) cannot; it gets what has come for it."""
        with self._lock:
            self._last = number
            if step is not None:
                self._steps[number] = step
            early = self._early.pop(number, [])
        for message in early:
            _deliver(message, step)

    def settled(self, number: int) -> PartStep | None:
        """A step is over; its part, if it has begun here."""
        with self._lock:
            return self._steps.pop(number, None)

    # Messages

    def send(
        self,
        step: int,
        epoch: int,
        names: TaskNames,
        left: dict[tuple[int, int], float] | None,
        departure: Departure,
        meta: bytes,
        tensors: Sequence[Tensor | None],
        event: torch.Event | None,
    ) -> None:
        """Send what leaves by ``departure``. From any thread. When it leaves is noted in ``left``."""
        task, dependency = names.of(departure.task), names.of(departure.dependency)
        if left is not None:
            left[task, dependency] = time.perf_counter()
        header = EdgeHeader(epoch, step, task, dependency)
        self._edges.out[self._worker_of[departure.device]].send(EdgeMessage(header, tensors, meta, event))

    def _arrived(self, message: ReceivedMessage) -> None:
        """Called on an edge's thread."""
        number = message.header.step
        with self._lock:
            step = self._steps.get(number)
            if step is None and number > self._last:
                self._early.setdefault(number, []).append(message)
                return
        _deliver(message, step)

    def _broken(self, error: EdgeError) -> None:
        """Called on an edge's thread. The controller is told, which knows whether the other worker is there."""
        assert error.edge is not None
        sender, receiver = (self._load.names[int(each)] for each in error.edge)
        how = f"{type(error.__cause__).__name__}: {error.__cause__}"
        named = EdgeError(
            f"the edge from worker {sender!r} to worker {receiver!r} broke ({how})", error.peers, (sender, receiver)
        )
        self._control.send(EdgeBroken(self._load.pipeline, named), urgent=True)

    def use(self) -> WorkerUse:
        """What the controller's observers want to know of this worker."""
        sent = {}
        for peer, edge in self._edges.out.items():
            counted = edge.traffic()
            before = self._told.get(peer, EdgeTraffic(0, 0, 0.0))
            self._told[peer] = counted
            sent[self._load.names[peer]] = EdgeTraffic(
                counted.messages - before.messages,
                counted.bytes - before.bytes,
                counted.waited_seconds - before.waited_seconds,
            )
        return WorkerUse(allocated_bytes(torch.device("cpu")), sent)

    # For who looks for the root of a hang, on the thread that answers pings: nothing here may wait for another thread

    def reports(
        self, number: int, parts: Mapping[PartStep, PartReport | None]
    ) -> tuple[dict[str, SenderReport], dict[str, ReceiverReport]]:
        """Where the edges out and in stand in a step, by the other worker. ``parts`` are those of all steps here."""
        sends = {self._load.names[peer]: edge.report(number) for peer, edge in self._edges.out.items()}
        takes = {}
        for peer, edge in self._edges.into.items():
            holders = {
                step.device_of(header.task)
                for header in edge.held
                for step, report in parts.items()
                if step.number == header.step and report is not None and header.task not in report.ended
            }
            takes[self._load.names[peer]] = edge.report(frozenset(holders))
        return sends, takes

    def probe(self) -> None:
        """Send every other worker a message that it releases at once: it is for a step that is over."""
        for edge in self._edges.out.values():
            with suppress(EdgeError):  # It is closed.
                edge.send(EdgeMessage(EdgeHeader(self._epoch, -1, 0, 0)))


def _deliver(message: ReceivedMessage, step: PartStep | None) -> None:
    if step is None:
        message.release()  # The step has ended here, so it failed or was cancelled, or it cannot begin.
    else:
        step.arrived(message)
