"""Streams and events, with one interface for CPU and accelerators (CUDA).

Each lane has a stream. On a CPU it is the lane's own thread: work is done when the call returns, so there is nothing
to record, and waiting for an accelerator's event blocks that thread (never the event loop). On an accelerator it is a
non-default stream: work is queued, and so is waiting.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.ops.device.devices import Device

__all__ = ["AcceleratorStream", "CpuStream", "Fence", "LaneStream", "Timing", "make_streams"]


class CpuStream:
    """The lane's thread itself. Its methods are those of ``AcceleratorStream``."""

    device = torch.device("cpu")

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self, event: torch.Event) -> None:
        # Hazard: the tensors come from a copy out of an accelerator. The host must not read them before it is done.
        event.synchronize()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        pass

    def begin(self) -> None:
        return None


class AcceleratorStream:
    """A non-default stream of an accelerator, which no other object uses (while at most 32 of the device are used)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # torch has 32 streams a device and hands them out in turn, so in a long process two pipelines would come to
        # share one. Hazard: the optimizer of pipeline A reads gradients on its caller's stream and frees them. The next
        # task of pipeline B on the shared stream could then reuse that memory too early, because ``Fence.begin`` makes
        # only the streams of A wait for the caller of A.
        unused = _unused[device]
        try:
            self.stream = unused.pop()
        except IndexError:
            self.stream = torch.get_device_module(device).Stream(device)
        finalize(self, unused.append, self.stream).atexit = False
        self._use = torch.get_device_module(device).stream
        self._clock = _DeviceClock(self.stream)

    def use(self) -> AbstractContextManager[object]:
        """Make it the current stream, and its device the current device, of the calling thread."""
        context: AbstractContextManager[object] = self._use(self.stream)
        return context

    def wait(self, event: torch.Event) -> None:
        """Run what is queued from now on after ``event``."""
        self.stream.wait_event(event)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of ``tensors``, allocated on other streams, until the work queued here now is done."""
        for tensor in tensors:
            if not tensor.is_cpu:
                tensor.record_stream(self.stream)

    def begin(self) -> Timing:
        """Start the clock of a task. (``None`` from a ``CpuStream``, where a task is done when its call returns.)"""
        return Timing(self.stream, self._clock)

    def tick(self) -> None:
        """Give the tasks from now on a new clock origin; called once a step."""
        self._clock.tick()


LaneStream = CpuStream | AcceleratorStream
"""Where the work of a lane is queued."""

_unused: defaultdict[torch.device, list[Any]] = defaultdict(list)


class Timing:
    """The time of a task on an accelerator, from when this is made to ``end``. A ``Completion`` for the executor."""

    def __init__(self, stream: Any, clock: _DeviceClock) -> None:
        self._stream = stream
        self._clock = clock
        self._origin = clock.origin
        self._started = _record(stream)
        self.ended: torch.Event | None = None

    def end(self) -> torch.Event:
        """Record the task's end."""
        self.ended = _record(self._stream)
        return self.ended

    def wait(self) -> tuple[float, float]:
        """Block until the device has finished the task; start and end in seconds of ``time.perf_counter``."""
        assert self.ended is not None
        origin = self._clock.resolve(self._origin)
        self.ended.synchronize()
        return origin + self._since_origin(self._started), origin + self._since_origin(self.ended)

    def _since_origin(self, event: torch.Event) -> float:
        return max(0.0, float(self._origin.event.elapsed_time(event)) * 1e-3)


class _ClockOrigin:
    """An event whose time is known on the device and, once the device has reached it, on the host (``host``)."""

    def __init__(self, stream: Any) -> None:
        self.recorded = time.perf_counter()
        self.event = _record(stream)
        self.host: float | None = None


class _DeviceClock:
    """Converts device times to host times. Each step gets a new origin: ``elapsed_time``, a float32, stays small.

    The host time of an origin is that of the previous origin plus the time between the two on the device, limited to
    the interval from when the host recorded the event to when the host saw it done. ``resolve`` is called on the lane's
    completion thread only.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._resolved: _ClockOrigin | None = None
        self.origin = _ClockOrigin(stream)

    def tick(self) -> None:
        self.origin = _ClockOrigin(self._stream)

    def resolve(self, origin: _ClockOrigin) -> float:
        if origin.host is None:
            origin.event.synchronize()
            host = time.perf_counter()
            before = self._resolved
            if before is not None and before.host is not None:
                host = min(host, before.host + before.event.elapsed_time(origin.event) * 1e-3)
            origin.host = max(host, origin.recorded)
            self._resolved = origin
        return origin.host


def _record(stream: Any) -> torch.Event:
    # `blocking`: a thread that synchronizes sleeps instead of spinning on a core.
    event: torch.Event = torch.get_device_module(stream.device).Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


def make_streams(devices: Iterable[Device]) -> dict[Lane, LaneStream]:
    """A stream for every lane of every logical device."""
    return {
        Lane(device.name, queue): AcceleratorStream(device.physical) if device.is_accelerator else CpuStream()
        for device in devices
        for queue in Queue
    }


class Fence:
    """Orders a step after what its caller queued before it, and what the caller queues later after the step.

    Nothing blocks. Created and begun on the caller's thread, and ended there when the step's last task is issued.
    """

    def __init__(self, streams: Iterable[LaneStream]) -> None:
        self._streams = [stream for stream in streams if isinstance(stream, AcceleratorStream)]
        devices = {stream.device for stream in self._streams}
        self._callers = [torch.get_device_module(device).current_stream(device) for device in devices]

    def begin(self) -> None:
        """Make every lane wait for the caller's current streams."""
        for caller in self._callers:
            event = _record(caller)
            for stream in self._streams:
                # Hazard: the caller's streams have queued the optimizer's writes to the parameters and what makes the
                # batch. No lane may read either before. The wait also protects gradients that zero_grad freed: their
                # memory, allocated on a compute stream, is reused there only after the optimizer has read them.
                stream.wait(event)
        for stream in self._streams:
            stream.tick()

    def end(self, results: Iterable[Tensor] = ()) -> None:
        """Make the caller's streams wait for every lane; ``results`` as in ``hand_over``."""
        for stream in self._streams:
            event = _record(stream.stream)
            for caller in self._callers:
                # Hazard: the optimizer reads the gradients, and the caller the outputs, that the lanes still write.
                caller.wait_event(event)
        self.hand_over(results)

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Let the caller read ``tensors``, which the lanes have made, on its own streams; after ``end``."""
        for tensor in tensors:
            for caller in self._callers:
                # Hazard: the caller's stream reads memory allocated on a compute stream. If the tensor is freed, the
                # memory must not be reused before that read is done.
                if tensor.device == caller.device:
                    tensor.record_stream(caller)
