"""1F1B: as few forwards ahead as keep the pipe full, or, eagerly, as many as hide the copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncpipe.core.schedules.protocol import Action, B, F, OrderedSchedule, Shape
from asyncpipe.errors import OptionError

__all__ = ["EagerOneFOneB", "OneFOneB"]


class OneFOneB(OrderedSchedule):
    """Fill the pipe, then alternate one backward and one forward (PipeDream-flush, arXiv 2006.09503).

    Bubble (p-1)(t_F + t_B), as GPipe; p - r micro-batches in flight on device r (at most m). Any m, also
    m < p; one stage a device.
    """

    name = "1f1b"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        return _alternate(device, shape.microbatches, shape.stages - device)


@dataclass(frozen=True)
class EagerOneFOneB(OrderedSchedule):
    """1F1B with twice the forwards ahead, so that copies hide behind compute (JaxPP, arXiv 2412.14374).

    Bubble (p-1)(t_F + t_B) with free copies, as 1F1B. There a micro-batch that has left device r comes back just in
    time; here it may be late by the p - r - 1 extra micro-batches in flight, so copies and uneven micro-batches cost
    little: with copies as long as a forward, t_B = 2 t_F, p = 4 and m = 16, a step takes 63 t_F instead of 85. The
    price is memory: 2(p-r) - 1 micro-batches in flight on device r (at most m). Any m, also m < p; one stage a device.

    ``cap`` is the most micro-batches in flight on any device; one that all m, or 2p - 1, stay within changes nothing.
    Under a smaller one, each device's forwards ahead shrink in proportion: p gives 1F1B, the numbers from there to
    2p - 1 trade memory for slack, and below p the cap still holds, but the step gets longer (with 1, one micro-batch
    goes through at a time).
    """

    cap: int | None = None

    name = "eager-1f1b"

    def __post_init__(self) -> None:
        if self.cap is not None and self.cap < 1:
            raise OptionError(f"cap must be a positive integer, got {self.cap}")

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        ahead, most = 2 * (shape.devices - device) - 1, 2 * shape.devices - 1
        if self.cap is not None and self.cap < min(most, shape.microbatches):
            # Rounded up. With min(ahead, cap), devices with the same number would have no slack between them.
            ahead = -(-ahead * self.cap // most)
        return _alternate(device, shape.microbatches, ahead)


def _alternate(stage: int, microbatches: int, ahead: int) -> Iterator[Action]:
    """``ahead`` forwards (at most all), then a backward and a forward in turn, then the backwards that are left."""
    warmup = min(ahead, microbatches)
    yield from (F(i, stage) for i in range(warmup))
    for i in range(microbatches):
        yield B(i, stage)
        if i + warmup < microbatches:
            yield F(i + warmup, stage)
