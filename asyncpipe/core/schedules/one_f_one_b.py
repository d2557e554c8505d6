"""1F1B: as few forwards ahead as keep the pipe full (PipeDream-flush, arXiv 2006.09503)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncpipe.core.schedule import Action, B, F, OrderedSchedule, Shape

__all__ = ["OneFOneB"]


class OneFOneB(OrderedSchedule):
    """Fill the pipe, then alternate one backward and one forward.

    Bubble (p-1)(t_F + t_B), as GPipe; p - r micro-batches in flight on device r (at most m). Any m, also
    m < p; one stage a device.
    """

    name = "1f1b"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        warmup = min(shape.stages - device, shape.microbatches)
        yield from (F(i, device) for i in range(warmup))
        for i in range(shape.microbatches):
            yield B(i, device)
            if i + warmup < shape.microbatches:
                yield F(i + warmup, device)
