"""The V family: each device has one stage on the way down and one on the way up, and backwards are split.

The stages are placed as a V over the devices, so the device that starts a micro-batch also ends it::

    device 0   stage 0   stage 7    A micro-batch is held for a long time at stage 0 and a short one at stage 7, and
    device 1   stage 1   stage 6    for about the same time at 3 and 4. So every device holds about the same memory,
    device 2   stage 2   stage 5    where 1F1B holds p micro-batches on the first device and 1 on the last. The faster
    device 3   stage 3   stage 4    micro-batches travel along the V, the less memory a schedule takes.

``zbv`` is from the zero-bubble paper (Qi et al. 2023, arXiv 2401.10241), ``v-half`` and ``v-min`` are from the paper
on controllable memory (Qi et al. 2024, arXiv 2405.15362). All support any number p of devices and m of micro-batches.

Figures below are in the time of F, I or W of one stage, taken as equal, so each device has 6m to do. The bubble is
counted from the start of the step. A micro-batch is held at a stage from F to W and counts 1/2 there; counted from F to
I the peaks are the same, since W is never deferred while memory is short.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.schedules.protocol import Action, F, I, OrderedSchedule, Shape, W, zigzag_placement
from asyncpipe.errors import ScheduleError

__all__ = ["VHalf", "VMin", "VShaped", "ZeroBubbleV"]

_F, _I, _W = (TaskKind.FORWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT)


class VShaped(OrderedSchedule):
    """Base of the schedules whose stages are placed in a V, two on each device."""

    virtual = 2

    def placement(self, shape: Shape) -> Sequence[int]:
        return zigzag_placement(shape)

    def check(self, shape: Shape) -> None:
        if shape.stages != 2 * shape.devices:
            raise ScheduleError(
                f"schedule {self.name!r} needs two stages on each device, got {shape.stages} stages for "
                f"{shape.devices} devices; give {2 * shape.devices} stages"
            )


class ZeroBubbleV(VShaped):
    """ZB-V of arXiv 2401.10241, section 6: no device idles between its first task and its last.

    Bubble max(p-1, 4p-2-2m). From m = (3p-1)/2 on it is p-1, the time until the last device starts, which is
    (p-1)t_F/2 with the t_F of a device's two stages; 1F1B has 6(p-1). With fewer micro-batches the pipe does not fill,
    and each missing one costs 2. Peak min(m, p) micro-batches on a device, as 1F1B on its first. If t_F, t_I and t_W
    differ, devices also idle in between.
    """

    name = "zbv"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        full = _zero_bubble(device, shape.devices, max(shape.microbatches, 2 * shape.devices - 1))
        # Leaving out whole micro-batches cannot deadlock, because no other micro-batch depends on them.
        return (action for action in full if action.microbatch < shape.microbatches)


def _zero_bubble(r: int, p: int, m: int) -> Iterator[Action]:
    """The order of device ``r`` for ``m`` micro-batches, at least 2p-1.

    ::

        fill     F-down ... F-down | F-up F-down ... | F-up I-up W-up ...     until the first I-down can run
        steady   F-down I-down W-down F-up I-up W-up ...                     m-p times, at the end without F-down
        drain    I-down I-up ... | I-down W-down ... | W-up ... | W-down ... first what other devices wait for
    """
    down, up = r, 2 * p - 1 - r
    lead, steady = 2 * (p - r) - 1, m - p
    yield from (F(i, down) for i in range(lead))
    for i in range(r):
        yield from (F(i, up), F(lead + i, down))
    for i in range(p - r):
        yield from (F(r + i, up), I(i, up), W(i, up))
    for i in range(steady):
        if lead + r + i < m:
            yield F(lead + r + i, down)
        yield from (I(i, down), W(i, down), F(p + i, up), I(p - r + i, up), W(p - r + i, up))
    for i in range(r):
        yield from (I(steady + i, down), I(m - r + i, up))
    for i in range(p - r):
        yield from (I(steady + r + i, down), W(steady + i, down))
    yield from (W(i, up) for i in range(m - r, m))
    yield from (W(i, down) for i in range(m - r, m))


class _Block(NamedTuple):
    """The times of the first micro-batch along the V; each next one starts 6 units later, a device's work for one."""

    down: int
    """Units from a stage to the next on the way down, for forwards and backwards."""
    up: int
    """The same on the way up."""
    turn: int
    """Idle units between the last forward and the first backward."""
    bottom: int
    """Idle units at the bottom of the V, for backwards only."""


class _Repeated(VShaped):
    """Base of schedules that repeat a building block, put W where a device idles, and then run actions earlier if
    they are ready."""

    @abstractmethod
    def block(self, devices: int) -> _Block:
        """The building block for ``devices`` devices."""

    def order(self, device: int, shape: Shape) -> Iterable[Action]:
        return _pulled(self.block(shape.devices), shape)[device]


class VHalf(_Repeated):
    """V-Half of arXiv 2405.15362: half the memory of 1F1B, and half its bubble.

    Peak min(m, (p+2)//2) micro-batches on a device, as in the paper. The paper's bubble is about 3p. Here it is less
    for every m >= p: 3p-4 for odd p from 3 on, 3p-7 for even p from 4 to 12 and 3p-5 above, and p-1 for 1 and 2; 1F1B
    has 6(p-1). For m < p it is at most 4p-5, that of a single micro-batch. The building block is the paper's; which
    actions run earlier differs. If times differ, the bubble is longer, but does not grow with m as long as
    t_W + 2t_I >= 2t_F and t_W + 2t_F >= 2t_I.
    """

    name = "v-half"

    def block(self, devices: int) -> _Block:
        return _Block(down=2, up=1, turn=0 if devices % 2 else 3, bottom=1)


class VMin(_Repeated):
    """V-Min of arXiv 2405.15362: a third of the memory of 1F1B, and two thirds of its bubble.

    Peak min(m, (p+4)//3) micro-batches on a device, as in the paper. The paper's bubble is about 4p. Here it is less
    for every m >= p: 4p-7, or 4p-5 where p mod 3 is 1 and the cap leaves no slack, and 0 for one device; 1F1B has
    6(p-1). For m < p it is at most 4p-5, that of a single micro-batch. There is no slack: if t_F or t_I is longer
    than the others, the bubble grows with m and soon exceeds that of 1F1B.
    """

    name = "v-min"

    def block(self, devices: int) -> _Block:
        return _Block(down=1, up=1, turn=0 if devices % 3 else 2, bottom=0)


def _pattern(block: _Block, shape: Shape, r: int) -> list[Action]:
    """The order of device ``r`` in the repeated block: F and I at their times, W in the first idle unit after its I."""
    p = shape.devices
    way = (block.down + block.up) * (p - 1) + 1
    back = way + 1 + block.turn
    starts = {
        block.down * r: F(0, r),
        way - block.up * r: F(0, 2 * p - 1 - r),
        back + block.down * r: I(0, 2 * p - 1 - r),
        back + way + block.bottom - block.up * r: I(0, r),
    }
    at = {
        start + 6 * i: action._replace(microbatch=i)
        for start, action in starts.items()
        for i in range(shape.microbatches)
    }
    order: list[Action] = []
    waiting: list[Action] = []
    for time in range(max(at) + 1):
        action = at.get(time)
        if action is not None:
            order.append(action)
            if action.kind is _I:
                waiting.append(action._replace(kind=_W))
        elif waiting:
            order.append(waiting.pop(0))
    return order + waiting


@lru_cache(maxsize=16)
def _pulled(block: _Block, shape: Shape) -> tuple[tuple[Action, ...], ...]:
    """The order of each device, from list scheduling on units of time.

    In each unit a device runs the first action of its pattern that is ready, a W only if there is no other. An F runs
    earlier only if its stage then holds no more micro-batches than in the pattern, and its device no more than any
    device does in the pattern. This cannot deadlock: of all remaining actions, the one that is earliest in the pattern
    is ready and next on its device.
    """
    devices = [_DeviceScheduler(_pattern(block, shape, device)) for device in range(shape.devices)]
    cap = max(device.cap for device in devices)
    done: Counter[tuple[TaskKind, int]] = Counter()
    while any(device.pending for device in devices):
        picked = [device.pick(done, cap, shape.stages - 1) for device in devices]
        done.update((action.kind, action.stage) for action in picked if action is not None)
    return tuple(tuple(device.order) for device in devices)


class _DeviceScheduler:
    """List scheduling of one device: ``pending`` actions of its pattern move into ``order``."""

    def __init__(self, pattern: list[Action]) -> None:
        self.pending = pattern
        self.order: list[Action] = []
        self.cap, self._caps = _most_held(pattern)
        self._held: Counter[int] = Counter()

    def pick(self, done: Counter[tuple[TaskKind, int]], cap: int, last: int) -> Action | None:
        """The action of this unit of time, if any is ready; ``done`` counts the actions that ended before."""
        position = self._position(done, cap, last)
        if position is None:
            return None
        action = self.pending.pop(position)
        self._held[action.stage] += (action.kind is _F) - (action.kind is _W)
        self.order.append(action)
        return action

    def _position(self, done: Counter[tuple[TaskKind, int]], cap: int, last: int) -> int | None:
        held = most = self._held.total()
        weight = None
        seen: set[tuple[TaskKind, int]] = set()
        for position, action in enumerate(self.pending):
            kind, _, stage = action
            # Micro-batches are in order, so if one is not ready, later ones of the same kind and stage are not.
            if (kind, stage) not in seen and _is_ready(action, done, last):
                if kind is _I or (kind is _F and most < cap and self._held[stage] < self._caps[stage]):
                    return position
                if kind is _W and weight is None:
                    weight = position
            seen.add((kind, stage))
            if len(seen) == 6:
                break
            held += (kind is _F) - (kind is _W)
            most = max(most, held)
        return weight


def _is_ready(action: Action, done: Counter[tuple[TaskKind, int]], last: int) -> bool:
    """Whether everything that ``action`` depends on is done."""
    kind, i, stage = action
    if kind is _F:
        return stage == 0 or done[_F, stage - 1] > i
    if kind is _W:
        return done[_I, stage] > i
    return done[_F, stage] > i and (stage == last or done[_I, stage + 1] > i)


def _most_held(order: Iterable[Action]) -> tuple[int, Counter[int]]:
    """The most micro-batches that a device holds, summed over its stages, and the most at each stage."""
    most, held, by_stage = 0, Counter[int](), Counter[int]()
    for kind, _, stage in order:
        held[stage] += (kind is _F) - (kind is _W)
        by_stage[stage] = max(by_stage[stage], held[stage])
        most = max(most, held.total())
    return most, by_stage
