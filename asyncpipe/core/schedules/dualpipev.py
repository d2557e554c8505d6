"""DualPipeV: half of DualPipe, a forward and a backward side by side (DeepSeek-V3, arXiv 2412.19437).

DualPipe feeds micro-batches into the pipe from both ends and keeps two copies of the model. DualPipeV keeps one half of
the devices and one copy, with stages placed in a V: the second leg of the V replaces the feed from the other end. Most
of the time a device has a forward of one leg and a backward of the other to run together::

    fill     F-down ... | F-down F-up ... | I-up W-up F-up ...
    steady   F-down+B-up  F-up+B-down ...
    drain    B-up F-up+B-down ... | B-up B-down ... | I-up I-down ... | W I-down ... | W ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count

from asyncpipe.core.schedules.protocol import Action, B, F, I, Overlap, Shape, W
from asyncpipe.core.schedules.v_shaped import VShaped
from asyncpipe.errors import ScheduleError

__all__ = ["DualPipeV"]


class DualPipeV(VShaped):
    """Each device runs a forward of one leg of the V beside a backward of the other (DeepSeek-V3, arXiv 2412.19437).

    Pairs of F and B are ``Overlap`` entries. Backwards are split into I and W at the beginning and the end of the step
    only. Needs m >= 2p micro-batches: with fewer, the pipe is never full enough to pair.

    At t_F = t_I = t_W the bubble is p-1 stage times, that of ``zbv``. DeepSeek's closed form, (p-1)(F&B + B - 3W) with
    p devices, gives 2(p-1), because a fused pair releases both results at its end. Here F of a pair runs first and
    releases its result before B begins. Peak p + 1/2 micro-batches on every device, from F to W or B.
    """

    name = "dualpipev"

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if shape.microbatches < 2 * shape.devices:
            raise ScheduleError(
                f"schedule 'dualpipev' needs at least as many micro-batches as stages, got {shape.microbatches} "
                f"micro-batches for {shape.stages} stages; give at least {shape.stages}, or use 'zbv'"
            )

    def order(self, device: int, shape: Shape) -> Iterator[Action | Overlap]:
        p, r, m = shape.devices, device, shape.microbatches
        actions = _NextActions(r, 2 * p - 1 - r)
        yield from _fill(actions, p, r)
        for i in range(m - 2 * p + r + 1):
            if i == 0 and r == p - 1:
                # The last device runs its first backward directly after the forward that it depends on, so not as a
                # pair.
                yield from (actions.forward(actions.down), actions.backward(actions.up))
            else:
                yield actions.overlap(actions.down, actions.up)
            yield actions.overlap(actions.up, actions.down)
        yield from _drain(actions, p, r)


class _NextActions:
    """Counts the micro-batches of a device's two stages; each method returns the next action of a kind."""

    def __init__(self, down: int, up: int) -> None:
        self.down, self.up = down, up
        self._forwards: defaultdict[int, count[int]] = defaultdict(count)
        self._backwards: defaultdict[int, count[int]] = defaultdict(count)
        self._weights: list[Action] = []

    def forward(self, stage: int) -> Action:
        return F(next(self._forwards[stage]), stage)

    def backward(self, stage: int) -> Action:
        return B(next(self._backwards[stage]), stage)

    def input_gradient(self, stage: int) -> Action:
        """I of the next micro-batch; its W is queued for ``weight_gradients``."""
        microbatch = next(self._backwards[stage])
        self._weights.append(W(microbatch, stage))
        return I(microbatch, stage)

    def weight_gradients(self, most: int) -> list[Action]:
        """The oldest queued W, at most ``most``."""
        taken, self._weights = self._weights[:most], self._weights[most:]
        return taken

    def overlap(self, forward: int, backward: int) -> Overlap:
        return Overlap(self.forward(forward), self.backward(backward))


def _fill(actions: _NextActions, p: int, r: int) -> Iterator[Action]:
    """Forwards on the down leg, then on both legs, then I-up W-up F-up until the pipe is full."""
    yield from (actions.forward(actions.down) for _ in range(2 * (p - r - 1)))
    for _ in range(r + 1):
        yield from (actions.forward(actions.down), actions.forward(actions.up))
    for _ in range(p - r - 1):
        yield actions.input_gradient(actions.up)
        yield from actions.weight_gradients(1)
        yield actions.forward(actions.up)


def _drain(actions: _NextActions, p: int, r: int) -> Iterator[Action | Overlap]:
    """The last forwards of the up leg, then backwards; the later ones are split, with W where the device would idle."""
    for _ in range(p - r - 1):
        yield actions.backward(actions.up)
        yield actions.overlap(actions.up, actions.down)
    for i in range(2 * (r + 1)):
        backward = actions.backward if i <= r else actions.input_gradient
        yield backward(actions.down if i % 2 else actions.up)
    for _ in range(p - r - 1):
        yield from actions.weight_gradients(1)
        yield actions.input_gradient(actions.down)
    yield from actions.weight_gradients(r + 1)
