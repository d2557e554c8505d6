"""Interleaved 1F1B: several virtual stages a device (Narayanan et al. 2021, arXiv 2104.04473)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncpipe.core.schedule import Action, B, F, OrderedSchedule, Shape
from asyncpipe.errors import ScheduleError

__all__ = ["Interleaved"]


class Interleaved(OrderedSchedule):
    """1F1B over v virtual stages a device: device r holds the stages r, r + p, r + 2p …

    Micro-batches go through in rounds of p: a device runs one round at its first virtual stage, the same
    round at its second, and so on. Bubble (p-1)(t_F + t_B)/v where p divides m, with t_F and t_B the times
    of all v virtual stages of a device; p + (p-1)/v micro-batches in flight on device 0. Where p does not
    divide m, the order is that of the next multiple with the surplus micro-batches left out: leaving tasks
    out cannot make a deadlock, and costs a little more bubble.
    """

    name = "interleaved"
    virtual = 2

    def check(self, shape: Shape) -> None:
        if shape.stages % shape.devices:
            raise ScheduleError(
                f"schedule 'interleaved' needs the same number of stages on each device, got {shape.stages} stages "
                f"for {shape.devices} devices; give a multiple of {shape.devices}"
            )

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        return (action for action in _padded_order(device, shape) if action.microbatch < shape.microbatches)


def _padded_order(device: int, shape: Shape) -> Iterator[Action]:
    """The order for the next multiple of p micro-batches, as in Megatron-LM."""
    p, v = shape.devices, shape.stages // shape.devices
    padded = -(-shape.microbatches // p) * p
    forwards = [F(i, j) for i, j in _rounds(device, p, padded, range(v))]
    backwards = [B(i, j) for i, j in _rounds(device, p, padded, range(v)[::-1])]
    warmup = min((v - 1) * p + 2 * (p - device - 1) + 1, len(forwards))
    yield from forwards[:warmup]
    for done, action in enumerate(backwards):
        yield action
        yield from forwards[done + warmup : done + warmup + 1]


def _rounds(device: int, p: int, microbatches: int, virtual_stages: range) -> Iterator[tuple[int, int]]:
    """(micro-batch, stage) pairs of ``device``: rounds of p micro-batches, each through all virtual stages."""
    for start in range(0, microbatches, p):
        for k in virtual_stages:
            for i in range(start, start + p):
                yield i, k * p + device
