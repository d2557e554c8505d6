"""What a check is given: the devices that it may use, and how to keep them busy, wait for them and time them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

__all__ = ["Machine", "Stopwatch", "cuda"]

cuda: Any = torch.cuda
"""Whose functions have no types."""


class _NoStream:
    """Stands for a stream where there is none."""

    def wait_stream(self, other: object) -> None:
        """Nothing is queued."""

    def synchronize(self) -> None:
        """Nothing is queued."""

    def record_event(self) -> _NoStream:
        return self


@dataclass(frozen=True)
class Machine:
    """The first GPU as several logical devices, or CPU devices in its place."""

    gpus: int
    """How many there are; 0: CPU devices are used."""

    @property
    def cuda(self) -> bool:
        return self.gpus > 0

    @property
    def device(self) -> torch.device:
        """The physical one."""
        return torch.device("cuda", 0) if self.cuda else torch.device("cpu")

    @property
    def one(self) -> list[str]:
        return ["cuda:0"] if self.cuda else ["cpu:0"]

    @property
    def two(self) -> list[str]:
        """Two logical devices, on one GPU."""
        return self.many(2)

    @property
    def mixed(self) -> list[str]:
        """A CPU and a GPU."""
        return ["cpu:0", "cuda:0"] if self.cuda else ["cpu:0", "cpu:1"]

    def many(self, count: int) -> list[str]:
        """So many logical devices, on one GPU."""
        return ["cuda:0"] * count if self.cuda else [f"cpu:{index}" for index in range(count)]

    # Streams

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()

    def default_stream(self) -> Any:
        return torch.cuda.default_stream() if self.cuda else _NoStream()

    def new_stream(self) -> Any:
        return cuda.Stream() if self.cuda else _NoStream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` the current one."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream) if self.cuda else nullcontext()
        return context

    # Work

    @cached_property
    def cycles_per_second(self) -> float:
        """The rate of the clock that ``torch.cuda._sleep`` counts by, once the GPU is awake."""
        return 3e7 / self.median_seconds(lambda: cuda._sleep(30_000_000), times=5)

    def busy(self, seconds: float) -> None:
        """Keep the current stream busy, with one thread of one multiprocessor; on a CPU, this thread."""
        if self.cuda:
            cuda._sleep(int(seconds * self.cycles_per_second))
        else:
            time.sleep(seconds)

    def late(self, seconds: float, *tensors: Tensor) -> list[Tensor]:
        """``tensors`` on the GPU, which the current stream writes after so many seconds; zeros until then."""
        ready = [tensor.to(self.device) for tensor in tensors]
        empty = [torch.zeros_like(tensor) for tensor in ready]
        self.synchronize()
        self.busy(seconds)
        return [to.copy_(tensor) for to, tensor in zip(empty, ready, strict=True)]

    def poison_pinned(self, size: int) -> None:
        """Free pinned memory full of NaN, for the next tensors of so many bytes: read too early, they are NaN."""
        if self.cuda:
            _ = [torch.full((max(1, size // 8),), math.nan).double().pin_memory() for _ in range(64)]

    # Times

    def median_seconds(self, work: Callable[[], Any], times: int = 20, warm_up: int = 3) -> float:
        """Of ``work`` and of what it leaves on the GPU."""
        found = []
        for _ in range(warm_up + times):
            self.synchronize()
            began = time.perf_counter()
            work()
            self.synchronize()
            found.append(time.perf_counter() - began)
        return median(found[warm_up:])

    def kernel_seconds(self, work: Callable[[], Any], times: int = 20, warm_up: int = 3) -> float:
        """What the GPU takes for the kernels of ``work``; on a CPU, the time of ``work``."""
        if not self.cuda:
            return self.median_seconds(work, times, warm_up)
        found: list[float] = []
        for _ in range(warm_up + times):
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            self.busy(0.002)  # So that the host is ahead, and no kernel waits for it.
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e-3)
        return median(found[warm_up:])

    def sleep_until_done(self) -> None:
        """Wait for the GPU without using the processor."""
        if self.cuda:
            event = cuda.Event(blocking=True)
            event.record()
            event.synchronize()


@dataclass
class Stopwatch:
    """Seconds of parts of a plain loop on the host, without what is left on the device."""

    found: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of ``work``."""
        began = time.perf_counter()
        result = work()
        self.found.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def median(self, name: str, last: int = 0) -> float:
        """Of the ``last`` ones; of all by default."""
        values: Sequence[float] = self.found[name]
        return median(values[-last:])
