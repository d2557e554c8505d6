"""What passes between the parts of a step that different workers run: sent when a task is done, stored when it comes.

A copy task belongs to the worker that receives. What it would read from the tables of the sender's step travels in a
message, which the receiver puts into its own tables at the same place (``step_tensors.py``); then the copy runs as if
the sender's stage were here::

    worker a    F(i,0) ── activations[i, 0, 1] ──▶ message ─┐
    worker b                                                └─▶ activations[i, 0, 1] ── C(i,0>1) ── F(i,1)

Any other dependency between workers is a message without tensors.

A tensor arrives with the strides and the alignment that it had (``memory_layout.py``). Who else reads the same memory
goes along: a stage that overwrites it is refused, as on threads (``shared_values.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from asyncpipe.core.graph.part import BEGINNING, Departure, Part
from asyncpipe.core.graph.task import WHOLE_STEP, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import COLLECTIVE_KINDS, TaskKind
from asyncpipe.ops.device.memory_layout import ALIGNMENT, MemoryLayout, fills_its_memory, layout_in_memory
from asyncpipe.ops.device.streams import record
from asyncpipe.ops.execute.reductions import Reductions
from asyncpipe.ops.execute.shared_values import Readers
from asyncpipe.ops.execute.step_tensors import StepTensors
from asyncpipe.ops.model.descriptions import decode, encode
from asyncpipe.ops.model.microbatch import Packet
from asyncpipe.ops.model.ties import Ties

__all__ = ["Crossings", "Send"]

_COUNTED = b"counted"
"""For gradients that come with the count of their micro-batch's loss, as the last tensor."""
_MORE = b"more"
"""Before the description of (meta, layouts, readers), where there is more to tell than the meta."""

_NORMED = (TaskKind.NORM, TaskKind.UPDATE)
"""What gets norms of gradients from other workers."""

Hold = tuple[Callable[[], None], torch.Event | None]
"""What to call when a task has run that has taken a message, and the event behind which it may read the tensors."""
Send = Callable[[Departure, bytes, Sequence[Tensor | None], torch.Event | None], None]
"""Sends what belongs to a departure, once the event has happened. Must not block."""


class Crossings:
    """What one step sends and gets in one worker. ``left`` is called on the devices' threads, ``arrived`` on any."""

    def __init__(
        self, graph: TaskGraph, part: Part, tensors: StepTensors, ties: Ties, reductions: Reductions, send: Send
    ) -> None:
        """``graph`` is what ``part`` was cut from."""
        self._graph = graph
        self._rows = graph.rows
        self._part = part
        self._tensors = tensors
        self._ties = ties
        self._reductions = reductions
        self._send = send
        self._sent: dict[tuple[int, int], int] = {}
        """By task that waits for several, and their stage: how many of these have been sent."""
        self._lock = threading.Lock()
        self._holds: dict[int, list[Hold]] = {}
        """By task, a number of the graph."""

    def begin(self) -> None:
        """Send what others need of this worker before any of its tasks has run."""
        for departure in self._part.at_start:
            self._depart(departure, None)

    def left(self, task: int, event: torch.Event | None) -> None:
        """Task number ``task`` of the part is done, or will be at ``event``: send what waits for it."""
        for taken, _ in self._holds.pop(self._part.whole[task], ()):
            taken()
        for departure in self._part.departures[task]:
            self._depart(departure, event)

    def _depart(self, departure: Departure, event: torch.Event | None) -> None:
        meta, tensors = b"", list[Tensor | None]()
        if departure.tensors and self._is_last(departure):
            waiting = self._graph.tasks[departure.task]
            meta, tensors = self._take(waiting, self._stage_of(departure.dependency))
            if event is None:
                event = _behind_all(tensors)
            elif waiting.kind in COLLECTIVE_KINDS or waiting.microbatch == WHOLE_STEP:
                event = _behind(event, tensors)
        self._send(departure, meta, tensors, event)

    def _is_last(self, departure: Departure) -> bool:
        """Whether nothing else of this part is to be sent to the same task."""
        if departure.among == 1:
            return True
        with self._lock:
            key = departure.task, self._stage_of(departure.dependency)
            sent = self._sent[key] = self._sent.get(key, 0) + 1
        return sent == departure.among

    def _stage_of(self, dependency: int) -> int:
        return -1 if dependency == BEGINNING else self._graph.tasks[dependency].stage

    def _take(self, waiting: Task, stage: int) -> tuple[bytes, list[Tensor | None]]:
        """What a task elsewhere reads that waits for one of ``stage``; of a copy, it leaves the tables."""
        if waiting.kind in COLLECTIVE_KINDS:
            return _packed(b"", self._reductions.taken(stage, waiting))
        if waiting.kind in _NORMED:
            found = (
                self._tensors.norms[stage]
                if waiting.kind is TaskKind.NORM
                else self._tensors.gradient_norms[WHOLE_STEP]
            )
            return _packed(b"", [found])
        assert waiting.source is not None
        source, user, i = waiting.source, waiting.stage, waiting.microbatch
        if i == WHOLE_STEP:
            if waiting.is_gradient_copy:
                gradients = self._ties.pop_gradients(user, source)
                if self._rows.stage_row(source) == self._rows.stage_row(user) or not self._tensors.counts:
                    return _packed(b"", gradients)
                # The gradient of another row: what it is to be divided by goes with it.
                counts = [count.to(torch.float64) for _, count in sorted(self._tensors.counts.items())]
                return _packed(_COUNTED, [*gradients, torch.stack(counts).sum()])
            return _packed(b"", self._ties.values(source, user))
        if not waiting.is_gradient_copy:
            packet = self._tensors.activations.pop((i, source, user))
            readers = self._tensors.readers.pop((i, source, user), None)
            return _packed(packet.shell(), packet.tensors, readers)
        gradients = self._tensors.gradients.pop((i, source, user))
        if (count := self._tensors.counts.get(i)) is None:
            return _packed(b"", gradients)
        return _packed(_COUNTED, [*gradients, count])

    def brought(self, task: int) -> list[torch.Event]:
        """The events behind which task number ``task`` of the part may read what edges have brought."""
        return [ready for _, ready in self._holds.get(self._part.whole[task], ()) if ready is not None]

    def arrived(self, task: int, dependency: int, meta: bytes, tensors: list[Tensor | None], hold: Hold) -> None:
        """Store what has come for ``task`` from the ``dependency``, numbers of the graph, before it is told."""
        ready = hold[1]
        with self._lock:
            self._holds.setdefault(task, []).append(hold)
        waiting = self._graph.tasks[task]
        if waiting.kind not in (TaskKind.COPY, *COLLECTIVE_KINDS, *_NORMED) or not (meta or tensors):
            return
        source, user, i = waiting.source, waiting.stage, waiting.microbatch
        if meta.startswith(_MORE):
            meta, layouts, readers = decode(meta[len(_MORE) :])
            if ready is not None and any(layouts):
                # Hazard: this thread lays out what the edge has not brought yet. It is rare.
                ready.synchronize()
            tensors = [_laid_out(tensor, each) for tensor, each in zip(tensors, layouts, strict=True)]
            _await_host(tensors)
            if readers is not None:
                assert source is not None
                self._tensors.readers[i, source, user] = readers
        if waiting.kind in _NORMED:
            (norm,) = _present(tensors)
            if waiting.kind is TaskKind.NORM:
                self._tensors.norms[self._stage_of(dependency)] = norm
            else:
                self._tensors.totals[waiting.stage] = norm
        elif source is None:
            self._reductions.arrived(self._stage_of(dependency), waiting, tensors)
        elif i == WHOLE_STEP:
            if meta == _COUNTED:
                (count,) = _present([tensors.pop()])
                # By a micro-batch of that row; only their sum matters here.
                self._tensors.counts[self._rows.microbatches_of(self._rows.stage_row(source)).start] = count
            self._tensors.tied_arrived[source, user] = tensors
        elif not waiting.is_gradient_copy:
            self._tensors.activations[i, source, user] = Packet.from_shell(meta, list(_present(tensors)))
        else:
            if meta == _COUNTED:
                (count,) = _present([tensors.pop()])
                self._tensors.counts[i] = count
            self._tensors.gradients[i, source, user] = tensors


def _accelerator_of(tensors: Sequence[Tensor | None]) -> torch.device | None:
    return next((tensor.device for tensor in tensors if tensor is not None and not tensor.is_cpu), None)


def _behind(event: torch.Event, tensors: Sequence[Tensor | None]) -> torch.Event:
    """The event behind what has made ``tensors`` of what there is behind ``event``."""
    if (device := _accelerator_of(tensors)) is None:
        return event
    stream = torch.get_device_module(device).current_stream(device)
    # Hazard: after the task, what is to be sent was put together and rounded, on the current stream of this thread.
    stream.wait_event(event)
    return record(stream)


def _behind_all(tensors: Sequence[Tensor | None]) -> torch.Event | None:
    """The event behind whatever may write ``tensors``, which no task of this step makes; ``None`` on a CPU."""
    if (device := _accelerator_of(tensors)) is None:
        return None
    # Hazard: these are parameters, when a step begins. Who has loaded a state, settled or undone the last step, may
    # still write them, on this thread's current stream. (The tasks of that step have ended: the host has waited.)
    return record(torch.get_device_module(device).current_stream(device))


def _await_host(tensors: Sequence[Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_cpu:
            # Hazard: a lane reads, on its stream, what this thread lays out on the current one. It is rare.
            torch.get_device_module(tensor.device).current_stream(tensor.device).synchronize()


def _present(tensors: Iterable[Tensor | None]) -> Iterable[Tensor]:
    for tensor in tensors:
        assert tensor is not None
        yield tensor


def _packed(
    meta: bytes, tensors: Sequence[Tensor | None], readers: Readers | None = None
) -> tuple[bytes, list[Tensor | None]]:
    """What edges are to carry, and a meta that says how it lay in memory where edges would not keep that."""
    layouts = [_layout(tensor) for tensor in tensors]
    if readers is None and not any(layouts):
        return meta, list(tensors)
    packed = [
        layout.packed(tensor) if layout is not None and tensor is not None else tensor
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]
    return _MORE + encode((meta, layouts, readers)), packed


def _layout(tensor: Tensor | None) -> MemoryLayout | None:
    """The layout of a tensor that edges would send in another one."""
    if tensor is None or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        # Packing would run on another stream of an accelerator than what makes the tensor.
        return None
    if not tensor.data_ptr() % ALIGNMENT and (tensor.is_contiguous() or fills_its_memory(tensor)):
        return None
    return layout_in_memory(tensor)


def _laid_out(tensor: Tensor | None, layout: MemoryLayout | None) -> Tensor | None:
    return tensor if tensor is None or layout is None else layout.laid_out(tensor)
