"""Several virtual stages on each device, placed in a loop: device r has the stages r, r + p, r + 2p …

Each device's part of the model is cut into v stages, so filling the pipe takes 1/v of the time and there are v times
as many copies. The schedules differ in what a device runs next: another micro-batch or another virtual stage. The
forwards of device 0 (micro-batch.stage), p = 2, v = 2, m = 4::

    interleaved   0.0 1.0 0.2 1.2 2.0 3.0 2.2 3.2   rounds of p micro-batches, backwards in between
    looped-bfs    0.0 1.0 2.0 3.0 0.2 1.2 2.2 3.2   all micro-batches before the next virtual stage
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncpipe.core.schedules.one_f_one_b import alternate
from asyncpipe.core.schedules.protocol import Action, B, F, OrderedSchedule, Shape, demand_even_stages

__all__ = ["Interleaved", "LoopSchedule", "LoopedBreadthFirst", "rounds"]


class LoopSchedule(OrderedSchedule):
    """Base of schedules with several virtual stages on each device: two by default, the same number everywhere."""

    virtual = 2

    def check(self, shape: Shape) -> None:
        demand_even_stages(self.name, shape)


class Interleaved(LoopSchedule):
    """1F1B over v virtual stages a device (Narayanan et al. 2021, arXiv 2104.04473).

    Micro-batches run in rounds of p: a device runs one round at its first virtual stage, the same round at its second,
    and so on. Bubble (p-1)(t_F + t_B)/v where p divides m, with t_F and t_B the times of all v virtual stages of a
    device; p + (p-1)/v micro-batches in flight on device 0. For other m the order is that of the next multiple of p
    without the surplus micro-batches; that cannot deadlock and has a little more bubble.
    """

    name = "interleaved"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        p, v = shape.devices, shape.stages // shape.devices
        forwards = list(rounds(device, shape, range(v)))
        backwards = rounds(device, shape, range(v)[::-1])
        # As in Megatron-LM.
        padded = alternate(forwards, backwards, ahead=(v - 1) * p + 2 * (p - device - 1) + 1)
        return (action for action in padded if action.microbatch < shape.microbatches)


class LoopedBreadthFirst(LoopSchedule):
    """All micro-batches at a device's first virtual stage, then all at its second … (Lamy-Poirier, arXiv 2211.05953).

    The backwards run in the reverse order: the last virtual stage and the last micro-batch first. Bubble
    (p-1)(t_F + t_B)/v where m is at least p, with t_F and t_B the times of all v virtual stages of a device. With
    m < p, a device waits for the first micro-batch to return to it, and each of the p - m missing ones costs (v-1)/v
    of t_F + t_B more. m micro-batches in flight on every device, as with GPipe. Its advantage over ``interleaved``: all
    micro-batches of a virtual stage run without a break, so its weights are fetched and its gradients reduced once a
    step. Any m, any v.
    """

    name = "looped-bfs"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        forwards = [F(i, j) for j in range(device, shape.stages, shape.devices) for i in range(shape.microbatches)]
        yield from forwards
        yield from (B(i, j) for _, i, j in reversed(forwards))


def rounds(device: int, shape: Shape, virtual_stages: range) -> Iterator[tuple[int, int]]:
    """(micro-batch, stage) pairs of ``device``: rounds of p micro-batches, each through all ``virtual_stages``.

    The last round is full: if p does not divide m, it has micro-batches that do not exist, for the caller to drop.
    """
    p = shape.devices
    for start in range(0, shape.microbatches, p):
        for k in virtual_stages:
            for i in range(start, start + p):
                yield i, k * p + device
