"""Streams and events, for CPU and CUDA behind one face.

Each lane has a stream. On a CPU that is the lane's own thread: work is done when the call returns, so there is
nothing to record, and waiting for a CUDA event blocks that thread (never the loop). On CUDA it is a
non-default stream, and waiting is queued on the device.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol
from weakref import finalize

import torch
from torch import Tensor

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.ops.device.devices import Device

__all__ = ["CpuStream", "CudaStream", "Fence", "LaneStream", "Timing", "make_streams"]


class LaneStream(Protocol):
    """Where the work of a lane is queued."""

    device: torch.device

    def use(self) -> AbstractContextManager[object]:
        """Make it the current stream (and device) of the calling thread."""

    def wait(self, event: torch.cuda.Event) -> None:
        """Order what is queued from now on behind ``event``."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Do not reuse the memory of ``tensors``, allocated on other streams, before what is queued here is done."""

    def begin(self) -> Timing | None:
        """Start to time a task; ``None`` where it is done when its call returns."""


class CpuStream:
    """The lane's thread itself."""

    device = torch.device("cpu")

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self, event: torch.cuda.Event) -> None:
        # The tensors come from a copy out of CUDA memory: the host must not read them before it is done.
        event.synchronize()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        pass

    def begin(self) -> Timing | None:
        return None


class CudaStream:
    """A non-default CUDA stream, of its own while this lives (where not more than 32 of a device are in use)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _borrow(device)
        finalize(self, _unused[device].append, self.stream).atexit = False
        self._clock = _DeviceClock(self.stream)

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def wait(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.stream)

    def begin(self) -> Timing | None:
        return Timing(self.stream, self._clock)

    def tick(self) -> None:
        """Set the clock of the tasks to come; called once a step."""
        self._clock.tick()


_unused: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def _borrow(device: torch.device) -> torch.cuda.Stream:
    """A stream that no other ``CudaStream`` has.

    torch has 32 of a device and hands them out in turn, so in a long process two pipelines would come to share one.
    One's next task could then reuse gradients that the other's optimizer has freed and, on its caller's stream, still
    reads: ``Fence.begin`` orders only the streams of its own pipeline behind that.
    """
    try:
        return _unused[device].pop()
    except IndexError:
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream


class Timing:
    """A task on a CUDA stream: began where this was made, ends at ``end``. A ``Completion`` for the executor."""

    def __init__(self, stream: torch.cuda.Stream, clock: _DeviceClock) -> None:
        self._clock = clock
        self._origin = clock.origin
        self._started = _record(stream)
        self.ended: torch.cuda.Event | None = None

    def end(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record the task's end on ``stream`` (a copy may end on another one than it began on)."""
        self.ended = _record(stream)
        return self.ended

    def wait(self) -> tuple[float, float]:
        """Block until the device is done; start and end in seconds of ``time.perf_counter``."""
        assert self.ended is not None
        origin = self._clock.resolve(self._origin)
        self.ended.synchronize()
        return origin + self._since_origin(self._started), origin + self._since_origin(self.ended)

    def _since_origin(self, event: torch.cuda.Event) -> float:
        return max(0.0, float(self._origin.event.elapsed_time(event)) * 1e-3)


class _ClockOrigin:
    """An event that fixes device time to host time; ``host`` is known once the device has reached it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.recorded = time.perf_counter()
        self.event = _record(stream)
        self.host: float | None = None


class _DeviceClock:
    """Device times as host times. Each step gets an origin near by, since ``elapsed_time`` is a float32 of ms.

    An origin's host time is that of an earlier one plus the device's own measure of the distance, kept between
    when the host recorded it and when the host saw it done. Resolved on the lane's completion thread alone.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
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


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # `blocking`: a thread that synchronizes sleeps instead of spinning on a core.
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def make_streams(devices: Iterable[Device]) -> dict[Lane, LaneStream]:
    """A stream for every lane of every logical device."""
    return {
        Lane(device.name, queue): CudaStream(device.physical) if device.is_cuda else CpuStream()
        for device in devices
        for queue in Queue
    }


class Fence:
    """Orders a step between what its caller queued before it and queues after it; nothing blocks.

    Made and begun on the caller's thread, ended there when the step's last task is issued.
    """

    def __init__(self, streams: Iterable[LaneStream]) -> None:
        self._streams = [stream for stream in streams if isinstance(stream, CudaStream)]
        devices = {stream.device for stream in self._streams}
        self._callers = [torch.cuda.current_stream(device) for device in devices]

    def begin(self) -> None:
        """Order every lane behind the caller's current streams."""
        for caller in self._callers:
            event = _record(caller)
            for stream in self._streams:
                # The optimizer has just written the parameters and the batch was just made, both on the caller's
                # streams: no lane may read them earlier. It also guards gradients that zero_grad freed: their
                # memory, allocated on a compute stream, is reused there only behind the optimizer that read them.
                stream.wait(event)
        for stream in self._streams:
            stream.tick()

    def end(self, results: Iterable[Tensor] = ()) -> None:
        """Order the caller's streams behind every lane; ``results`` as in ``hand_over``."""
        for stream in self._streams:
            event = _record(stream.stream)
            for caller in self._callers:
                # The optimizer reads the gradients, and the caller the outputs, that the lanes are still writing.
                caller.wait_event(event)
        self.hand_over(results)

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Let the caller read ``tensors``, which the lanes have made, on its own streams; after ``end``."""
        for tensor in tensors:
            for caller in self._callers:
                # Allocated on a compute stream and read on the caller's: freeing it must wait for that read.
                if tensor.is_cuda and tensor.device == caller.device:
                    tensor.record_stream(caller)
