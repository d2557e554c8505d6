"""Hanayo: 1F1B over stages placed in waves (Liu et al. 2023, arXiv 2308.15762).

A wave is a V: its stages go down over the devices and up again. Two waves on three devices::

    device 0   stage 0   stage 5   stage 6   stage 11
    device 1   stage 1   stage 4   stage 7   stage 10
    device 2   stage 2   stage 3   stage 8   stage 9

Time is counted in ticks. Micro-batches start in rounds of p, two ticks apart, and move on by one stage each tick. On a
device, micro-batches on their way down and those on their way up run in ticks of different parity, so they do not
collide. A wave takes 2p ticks, in which p micro-batches start, so the next wave of a round follows without a gap, and
the next round follows the last wave. Backwards run the same pattern from the last stage. Device 0 with p = 3 and one
wave::

    tick   0       1       2       3       4       5       6       7       8       9
    down   F(0,0)          F(1,0)          F(2,0)          F(3,0)          F(4,0)
    up                                             F(0,5)          F(1,5)          F(2,5)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from asyncpipe.core.schedules.one_f_one_b import alternate
from asyncpipe.core.schedules.protocol import Action, OrderedSchedule, Shape, demand_even_stages, zigzag_placement

__all__ = ["Hanayo"]


class Hanayo(OrderedSchedule):
    """1F1B in W waves, 2W stages on each device (two by default); any p and any m, best where p divides m.

    Bubble 2(p-1)max(t_F, t_B) where p divides m, in the times of one stage, for any W: with more waves the same number
    of shorter stage times is a smaller share of the step. 1F1B with each device's stages as one has
    2W(p-1)(t_F + t_B). At m = p and t_B = 2t_F the share is (2p-2)/(3pW+2p-2), a little less than the
    (2p-2)/(3pW+p-1) attributed to the paper. For other m the order is that of the next multiple of p without the
    surplus micro-batches, each of which costs at most the t_F + t_B of 2W-1 stages; at t_B = 2t_F the bubble is never
    more than that of 1F1B.

    Peak min(m, p) micro-batches on a device for m <= p, and p + (p-1)/2W above, as the interleaved schedule with 2W
    stages: p-1 more forwards run ahead, without which a device would wait between rounds.
    """

    name = "hanayo"
    virtual = 2

    def placement(self, shape: Shape) -> Sequence[int]:
        return zigzag_placement(shape)

    def check(self, shape: Shape) -> None:
        demand_even_stages(self.name, shape, unit=2)

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        return (action for action in _padded_order(device, shape) if action.microbatch < shape.microbatches)


def _padded_order(device: int, shape: Shape) -> Iterator[Action]:
    """The order for the next multiple of p micro-batches."""
    p, last = shape.devices, shape.stages - 1

    def tick(microbatch: int, way: int) -> int:
        """The tick in which a micro-batch runs its stage number ``way`` of the path; see the module's docstring."""
        return microbatch // p * shape.stages + microbatch % p * 2 + way

    microbatches = range(-(-shape.microbatches // p) * p)
    mine = [stage for stage, at in enumerate(zigzag_placement(shape)) if at == device]
    forwards = sorted(product(microbatches, mine), key=lambda at: tick(at[0], at[1]))
    backwards = sorted(product(microbatches, mine), key=lambda at: tick(at[0], last - at[1]))
    ahead = 0 if shape.microbatches <= p else p - 1
    warmup = sum(tick(i, j) <= last + device + ahead for i, j in forwards)
    return alternate(forwards, backwards, warmup)
