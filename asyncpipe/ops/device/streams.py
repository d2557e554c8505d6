"""Streams and events, with one interface for CPU and accelerators (CUDA).

Each lane has a stream. On a CPU it is the lane's own thread: work is done when the call returns, so there is nothing
to record, and waiting for an accelerator's event blocks that thread (never the event loop). On an accelerator it is a
non-default stream: work is queued, and so is waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.ops.device.device_clock import Timing, clock_of
from asyncpipe.ops.device.devices import Device, await_event
from asyncpipe.ops.device.lent_streams import lend
from asyncpipe.ops.torch_internals import CurrentStream

__all__ = ["AcceleratorStream", "CpuStream", "Fence", "LaneStream", "begin_behind", "make_streams", "record"]


class CpuStream:
    """The lane's thread itself. Its methods are those of ``AcceleratorStream``."""

    device = torch.device("cpu")

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self, event: torch.Event) -> None:
        # Hazard: the tensors come from a copy out of an accelerator. The host must not read them before it is done.
        await_event(event)

    def follow(self, timing: Timing) -> None:
        self.wait(timing.ended)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        pass

    def begin(self) -> None:
        return None


class AcceleratorStream:
    """A non-default stream of an accelerator, which no other object uses."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = lend(device, self)
        self.readers: frozenset[Any] = frozenset()
        """The streams of the caller that may read what was made here, since the last step's end."""
        self._clock = clock_of(device)
        self._behind: list[Timing] | None = None
        """What the next task here begins behind, or ``None`` if that is not all tasks."""

    def use(self) -> AbstractContextManager[object]:
        """Make it the current stream, and its device the current device, of the calling thread."""
        return CurrentStream(self.stream)

    def wait(self, event: torch.Event) -> None:
        """Run what is queued from now on after ``event``."""
        self.stream.wait_event(event)
        self._behind = None

    def follow(self, timing: Timing) -> None:
        """Run what is queued from now on after a task."""
        if timing.stream is not self.stream:
            self.stream.wait_event(timing.ended)
            if self._behind is not None:
                self._behind.append(timing)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of ``tensors``, allocated on other streams, until the work queued here now is done."""
        for tensor in tensors:
            if not tensor.is_cpu:
                tensor.record_stream(self.stream)

    def begin(self) -> Timing:
        """Start the clock of a task. (``None`` from a ``CpuStream``, where a task is done when its call returns.)"""
        timing = Timing(self.stream, self._clock, self._behind)
        self._behind = [timing]
        return timing

    def tick(self) -> None:
        """A step begins."""
        self._clock.tick()


LaneStream = CpuStream | AcceleratorStream
"""Where the work of a lane is queued."""


def record(stream: Any) -> torch.Event:
    """An event behind what is queued on ``stream``, which is torch's."""
    # `blocking`: a thread that synchronizes sleeps instead of spinning on a core.
    event: torch.Event = torch.get_device_module(stream.device).Event(blocking=True)
    event.record(stream)
    return event


def make_streams(devices: Iterable[Device], lanes: Iterable[Lane]) -> dict[Lane, LaneStream]:
    """A stream for every lane of a CPU, and for those of accelerators that compute or are among ``lanes``."""
    used = set(lanes)
    return {
        lane: AcceleratorStream(device.physical) if device.is_accelerator else CpuStream()
        for device in devices
        for lane in (Lane(device.name, queue) for queue in Queue)
        if lane in used or lane.queue is Queue.COMPUTE or not device.is_accelerator
    }


class Fence:
    """Orders a step after what its caller queued before it, and what the caller queues later after the step.

    Nothing blocks. The caller's streams are those that are current on the thread that makes the fence.
    """

    def __init__(self, streams: Iterable[LaneStream], inputs: Iterable[Tensor] = ()) -> None:
        """``inputs``: of the caller's tensors, at least one on each device; lanes may be elsewhere."""
        self._streams = [stream for stream in streams if isinstance(stream, AcceleratorStream)]
        devices = dict.fromkeys(stream.device for stream in self._streams)
        devices.update(dict.fromkeys(tensor.device for tensor in inputs if not tensor.is_cpu))
        self._callers = {device: torch.get_device_module(device).current_stream(device) for device in devices}

    def begin(self) -> dict[torch.device, torch.Event]:
        """Make every lane wait for the caller. By device: the event behind what the caller has queued there."""
        ready = {device: record(caller) for device, caller in self._callers.items()}
        # Hazard: the caller's streams have queued the optimizer's writes to the parameters and what makes the batch. No
        # lane may read either before. The wait also protects gradients that zero_grad freed: their memory, allocated on
        # a compute stream, is reused there only after the optimizer has read them.
        begin_behind(self._streams, ready.values(), frozenset(self._callers.values()))
        return ready

    def end(self, results: Iterable[Tensor] = (), last: Iterable[torch.Event] | None = None) -> None:
        """Make the caller's streams wait for the step; ``results`` as in ``hand_over``.

        ``last`` has, of each lane, the event behind the step's last task there. The tails of the lanes, which are
        waited for without it, may be those of a step that has begun since::

            lane 0    [ step k ······ ]e₀[ step k+1 ······ ]tail
            lane 1        [ step k ······ ]e₁[ step k+1 ···
            caller                          wait e₀, e₁ ▶ reads the loss of step k
        """
        readers = frozenset(self._callers.values())
        for event in [record(stream.stream) for stream in self._streams] if last is None else last:
            for caller in readers:
                # Hazard: the optimizer reads the gradients, and the caller the outputs, that the lanes still write.
                caller.wait_event(event)
        for stream in self._streams:
            stream.readers = readers
        self.hand_over(results)

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Let the caller read ``tensors``, which the lanes have made, on its own streams; after ``end``."""
        for tensor in tensors:
            if not tensor.is_cpu and (caller := self._callers.get(tensor.device)) is not None:
                # Hazard: the caller's stream reads memory allocated on a compute stream. If the tensor is freed, the
                # memory must not be reused before that read is done.
                tensor.record_stream(caller)


def begin_behind(
    streams: Iterable[LaneStream], events: Iterable[torch.Event], known: frozenset[Any] = frozenset()
) -> None:
    """Begin a step: make the lanes wait for ``events``, and for their readers that are not ``known`` to be behind them.

    Used by itself where a step is begun on a thread that is not the caller's.
    """
    lanes = [stream for stream in streams if isinstance(stream, AcceleratorStream)]
    readers = frozenset(reader for lane in lanes for reader in lane.readers) - known
    # Hazard: readers still read what was made on the lanes in the last step, gradients for instance. If it was freed
    # since, its memory is reused here.
    events = [*events, *map(record, readers)]
    for lane in lanes:
        for event in events:
            lane.wait(event)
        lane.tick()
