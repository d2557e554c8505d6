"""GPipe: every forward, then every backward (Huang et al. 2019, arXiv 1811.06965)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncpipe.core.schedules.protocol import Action, B, F, OrderedSchedule, Shape

__all__ = ["GPipeSchedule"]


class GPipeSchedule(OrderedSchedule):
    """All forwards in order, then all backwards in reverse, as in Figure 2 of torchgpipe.

    Bubble (p-1)(t_F + t_B); m micro-batches in flight on every device. Any m; one stage a device.
    """

    name = "gpipe"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        yield from (F(i, device) for i in range(shape.microbatches))
        yield from (B(i, device) for i in reversed(range(shape.microbatches)))
