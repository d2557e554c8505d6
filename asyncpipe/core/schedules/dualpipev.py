"""DualPipeV: half of DualPipe, a forward and a backward side by side (DeepSeek-V3, arXiv 2412.19437).

DualPipe sends micro-batches through the pipe from both ends and keeps two copies of the model. Its upper half alone is
a V: what would come from the other end is what comes back up. A device's two stages then give it, nearly all the
time, a forward of one leg and a backward of the other to run at the same time::

    fill     F-down ... | F-down F-up ... | I-up W-up F-up ...
    steady   F-down+B-up  F-up+B-down ...
    drain    B-up F-up+B-down ... | B-up B-down ... | I-up I-down ... | W I-down ... | W ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from asyncpipe.core.schedules.protocol import Action, B, F, I, Overlap, Shape, W
from asyncpipe.core.schedules.v_shaped import VShaped
from asyncpipe.errors import ScheduleError

__all__ = ["DualPipeV"]


class DualPipeV(VShaped):
    """Each device runs a forward of one leg of the V beside a backward of the other (DeepSeek-V3, arXiv 2412.19437).

    Pairs of F and B are ``Overlap`` entries; B is whole where nothing waits for its first half, I and W are at the
    ends. Needs m >= 2p, as many micro-batches as stages: with fewer, the pipe is never full enough to pair.

    At t_F = t_I = t_W the bubble is p-1 stage times, that of ``zbv``. DeepSeek's closed form, (p-1)(F&B + B - 3W) with
    p devices, gives 2(p-1): a fused pair hands on both results at its end. Here a pair runs one after the other and
    hands on that of F before B begins. Peak p + 1/2 micro-batches on every device, from F to W or B.
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
        line = _NextActions(r, 2 * p - 1 - r)
        yield from _fill(line, p, r)
        for i in range(m - 2 * p + r + 1):
            if i == 0 and r == p - 1:
                # The last device's first backward comes at once after its forward, and nothing waits for F here.
                yield from (line.forward(line.down), line.backward(line.up))
            else:
                yield line.overlap(line.down, line.up)
            yield line.overlap(line.up, line.down)
        yield from _drain(line, p, r)


class _NextActions:
    """Counts the micro-batches of a device's two stages; each method makes the next action."""

    def __init__(self, down: int, up: int) -> None:
        self.down, self.up = down, up
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._weights: list[Action] = []

    def forward(self, stage: int) -> Action:
        self._forwards[stage] += 1
        return F(self._forwards[stage] - 1, stage)

    def backward(self, stage: int) -> Action:
        self._backwards[stage] += 1
        return B(self._backwards[stage] - 1, stage)

    def input_gradient(self, stage: int) -> Action:
        """I of the next micro-batch; its W joins those that wait."""
        microbatch = self._backwards[stage]
        self._backwards[stage] += 1
        self._weights.append(W(microbatch, stage))
        return I(microbatch, stage)

    def weight_gradients(self, count: int) -> list[Action]:
        """The oldest W that wait, at most ``count``."""
        taken, self._weights = self._weights[:count], self._weights[count:]
        return taken

    def overlap(self, forward: int, backward: int) -> Overlap:
        return Overlap(self.forward(forward), self.backward(backward))


def _fill(line: _NextActions, p: int, r: int) -> Iterator[Action]:
    """Forwards down, then both ways, then I-up W-up F-up until the pipe is full."""
    yield from (line.forward(line.down) for _ in range(2 * (p - r - 1)))
    for _ in range(r + 1):
        yield from (line.forward(line.down), line.forward(line.up))
    for _ in range(p - r - 1):
        yield line.input_gradient(line.up)
        yield from line.weight_gradients(1)
        yield line.forward(line.up)


def _drain(line: _NextActions, p: int, r: int) -> Iterator[Action | Overlap]:
    """The last forwards up, then backwards; those of the second half split, with W where the device would idle."""
    for _ in range(p - r - 1):
        yield line.backward(line.up)
        yield line.overlap(line.up, line.down)
    for i in range(2 * (r + 1)):
        backward = line.backward if i <= r else line.input_gradient
        yield backward(line.down if i % 2 else line.up)
    for _ in range(p - r - 1):
        yield from line.weight_gradients(1)
        yield line.input_gradient(line.down)
    yield from line.weight_gradients(r + 1)
