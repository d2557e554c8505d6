"""Steps that are too large for a task graph: a thousand devices, ten thousand tasks on each.

``predict_step`` runs the programs of all devices in the order of time, as the simulator does for ordered schedules,
without a scheduler and without an object for each task: a task is a number in an array, and so is the time at which
what it waits for is there. Its results are those of ``simulate`` (a test compares them). What it leaves out: schedules
with rules, skips, ties, and updates.

**Many micro-batches.** Once the pipeline is full, every few micro-batches take as long as the few before, so the time
of a step grows with their number along a line, but for a rhythm. With ``extrapolate``, two steps with fewer
micro-batches are run, and the line through them gives the time of the step. With links that hold nothing up this is
exact; with slow ones it is within some thousandths (a test has figures), since the two may end at different beats.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.kinds import SCHEDULED_KINDS, TaskKind
from asyncpipe.core.predict.costs import StageCosts
from asyncpipe.core.predict.topology import Topology
from asyncpipe.core.schedules.protocol import OrderedSchedule, Schedule, Shape, flat
from asyncpipe.core.schedules.validate import blaming, checked_placement
from asyncpipe.errors import OptionError, ScheduleError

__all__ = ["StepForecast", "predict_step"]

FEWEST = 96
"""Micro-batches of the shorter of the two steps that are run to extrapolate, and how many more the longer one has."""
ROUNDS = 6
"""Both are at least so many times the devices, and the difference is a multiple of these."""

_F, _B, _I, _W = SCHEDULED_KINDS
_NUMBER = {kind: number for number, kind in enumerate(SCHEDULED_KINDS)}
_COMES = -1.0
"""In place of a time: what a task waits for is not there yet."""


@dataclass(frozen=True, slots=True)
class StepForecast:
    """What a step would take. Times are in seconds."""

    seconds: float
    device_busy: tuple[float, ...]
    """Of compute, by device."""
    device_waits: tuple[float, ...]
    """By device: how long it stands still while what it waits for is on a link, or waits for one."""
    tasks: int
    """Of compute, in the whole step."""
    simulated: tuple[int, ...]
    """The micro-batches of the steps that were run: those of the step itself, or of the two that it was extrapolated
    from."""

    @property
    def bubble_ratio(self) -> float:
        """The idle share of the devices, as a mean."""
        return 1.0 - sum(self.device_busy) / (len(self.device_busy) * self.seconds) if self.seconds else 0.0

    @property
    def link_ratio(self) -> float:
        """The share of the devices' time in which they wait for links, as a mean."""
        return sum(self.device_waits) / (len(self.device_waits) * self.seconds) if self.seconds else 0.0


def predict_step(
    schedule: Schedule,
    shape: Shape,
    costs: StageCosts,
    topology: Topology,
    *,
    devices: Sequence[str] | None = None,
    checkpoint: CheckpointMode = CheckpointMode.NEVER,
    extrapolate: bool = False,
) -> StepForecast:
    """What one step takes on ``devices`` of ``topology`` (by default its first ones), each stage feeding the next.

    ``costs`` are those of a device of speed 1; what they say of copies but their bytes does not count. Time grows with
    the number of tasks, memory by some 30 bytes for each. With ``extrapolate`` both grow with the square of the devices
    at most, and the result may be off (see above); steps of fewer micro-batches than the two together are run whole.
    Raises ``OptionError`` for a schedule that decides by a rule, ``TopologyError`` for too few devices,
    ``DeviceError``, and ``ScheduleError`` as ``lower``.
    """
    if not isinstance(schedule, OrderedSchedule):
        raise OptionError(f"schedule {schedule.name!r} decides by a rule; give an ordered one, or simulate its graph")
    schedule.check(shape)
    names = topology.first_devices(shape.devices) if devices is None else tuple(devices)
    step = _StepOfPrograms(schedule, shape, costs, topology, names, checkpoint)
    m, p = shape.microbatches, shape.devices
    unit = p * max(ROUNDS, -(-FEWEST // p))
    # An order may depend on the remainder by the devices, so it is that of the step.
    first = unit + m % p
    second = first + unit
    if not extrapolate or first + second >= m:
        return step.run(m)
    short, long = step.run(first), step.run(second)
    slope = (m - second) / unit

    def beyond(one: float, other: float) -> float:
        return other + (other - one) * slope

    return StepForecast(
        seconds=beyond(short.seconds, long.seconds),
        device_busy=tuple(map(beyond, short.device_busy, long.device_busy)),
        device_waits=tuple(max(0.0, beyond(*pair)) for pair in zip(short.device_waits, long.device_waits, strict=True)),
        tasks=round(beyond(short.tasks, long.tasks)),
        simulated=(first, second),
    )


class _StepOfPrograms:
    """A step of any number of micro-batches, each device with its program."""

    def __init__(
        self,
        schedule: OrderedSchedule,
        shape: Shape,
        costs: StageCosts,
        topology: Topology,
        names: tuple[str, ...],
        checkpoint: CheckpointMode,
    ) -> None:
        self._schedule, self._shape, self._checkpoint = schedule, shape, checkpoint
        placement = self._placement = checked_placement(schedule, shape, names)
        speeds = topology.speeds
        for name in names:
            if name not in speeds:
                raise topology.unknown(name)
        self._seconds = [
            [
                costs.seconds[kind][stage] / speeds[names[placement[stage]]] if kind in costs.seconds else None
                for kind in (*SCHEDULED_KINDS, TaskKind.RECOMPUTE)
            ]
            for stage in range(shape.stages)
        ]
        channels: dict[tuple[str, ...], int] = {}
        way = partial(self._way, topology, names, costs, channels)
        self._onward = [way(stage, stage + 1) for stage in range(shape.stages)]
        self._back = [way(stage, stage - 1) for stage in range(shape.stages)]
        self._channels = len(channels)

    def _way(
        self,
        topology: Topology,
        names: tuple[str, ...],
        costs: StageCosts,
        channels: dict[tuple[str, ...], int],
        source: int,
        target: int,
    ) -> tuple[int, float, float] | None:
        """The channel between two stages, how long a message has it, and its latency; ``None`` on one device."""
        if not 0 <= target < self._shape.stages:
            return None
        here, there = names[self._placement[source]], names[self._placement[target]]
        if here == there:
            return None
        channel, link = topology.route(here, there)
        size = costs.sent[min(source, target)]
        return channels.setdefault(channel, len(channels)), size / link.bandwidth, link.latency

    def run(self, m: int) -> StepForecast:
        """The step with ``m`` micro-batches."""
        shape = Shape(self._shape.stages, m, self._shape.devices)
        programs = [self._program(device, shape) for device in range(shape.devices)]
        recomputes = [self._checkpoint.recomputes(i, m) for i in range(m)]
        clock = _Clock(programs, m, self._seconds, recomputes, self._channels)
        stages, placement, onward, back = shape.stages, self._placement, self._onward, self._back
        last, gradients = stages - 1, stages * m
        for device in range(shape.devices):
            clock.begin(device)
        while clock.ends:
            end, device = heappop(clock.ends)
            which, i = divmod(clock.end(device, end), m)
            stage, kind = divmod(which, 4)
            if kind == 0 and stage < last:
                clock.deliver((stage + 1) * m + i, end, onward[stage], placement[stage + 1])
            elif kind in (1, 2) and stage:
                clock.deliver(gradients + (stage - 1) * m + i, end, back[stage], placement[stage - 1])
            clock.begin(device)
        for device, program in enumerate(programs):
            if clock.position[device] < len(program):
                raise ScheduleError(f"schedule {self._schedule.name!r} deadlocks: device {device} waits for ever")
        return StepForecast(max(clock.free), tuple(clock.busy), tuple(clock.waits), sum(map(len, programs)), (m,))

    def _program(self, device: int, shape: Shape) -> array[int]:
        """The actions of ``device`` as numbers: (stage, kind, micro-batch) with the last running fastest."""
        m, number = shape.microbatches, _NUMBER
        where = f"schedule {self._schedule.name!r}, device {device}"
        with blaming(where):
            return array(
                "q",
                [(stage * 4 + number[kind]) * m + i for kind, i, stage in flat(self._schedule.order(device, shape))],
            )


class _Clock:
    """When tasks begin and end, and messages arrive, in one step. Slotted: its attributes are read for each task."""

    __slots__ = (
        "_channel_free", "_gradients", "_last", "_m", "_programs", "_recomputes", "_seconds", "_there", "_waiting",
        "_way", "busy", "ends", "free", "position", "waits",
    )  # fmt: skip

    def __init__(
        self,
        programs: Sequence[Sequence[int]],
        m: int,
        seconds: Sequence[Sequence[float | None]],
        recomputes: Sequence[bool],
        channels: int,
    ) -> None:
        self._programs, self._m, self._seconds, self._recomputes = programs, m, seconds, recomputes
        stages, devices = len(seconds), len(programs)
        self._last, self._gradients = stages - 1, stages * m
        # Where a value for (direction, stage, micro-batch) is, or will be: activations first, then gradients.
        self._there = array("d", [_COMES]) * (2 * stages * m)
        self._way = array("d", [0.0]) * (2 * stages * m)
        """How long it was on its way."""
        self._waiting = [-1] * devices
        """What a device waits for, as an index of ``_there``."""
        self._channel_free = [0.0] * channels
        self.position, self.free = [0] * devices, [0.0] * devices
        self.busy, self.waits = [0.0] * devices, [0.0] * devices
        self.ends: list[tuple[float, int]] = []
        """A heap of (end, device) for the tasks that run."""

    def begin(self, device: int) -> None:
        """Begin the next task of ``device``, or note what it waits for."""
        program, at = self._programs[device], self.position[device]
        if at == len(program):
            return
        which, i = divmod(program[at], self._m)
        stage, kind = divmod(which, 4)
        row, needs, extra = self._seconds[stage], -1, 0.0
        if kind == 0:
            if stage:
                needs = stage * self._m + i
        elif kind != 3:
            if stage < self._last:
                needs = self._gradients + stage * self._m + i
            if self._recomputes[i]:
                extra = row[4] or 0.0
        start = self.free[device] + extra
        if needs >= 0:
            arrives = self._there[needs]
            if arrives < 0:
                self._waiting[device] = needs
                return
            if arrives > start:
                self.waits[device] += arrives - max(start, arrives - self._way[needs])
                start = arrives
        cost = row[kind]
        assert cost is not None
        self.busy[device] += cost + extra
        heappush(self.ends, (start + cost, device))

    def end(self, device: int, end: float) -> int:
        """End the task that runs on ``device``; its number."""
        at = self.position[device]
        self.free[device] = end
        self.position[device] = at + 1
        return self._programs[device][at]

    def deliver(self, value: int, end: float, way: tuple[int, float, float] | None, user: int) -> None:
        """Send ``value``, which is made at ``end``, and begin what waits for it on the device ``user``."""
        arrives = end
        if way is not None:
            channel, transfer, latency = way
            sent = self._channel_free[channel] = max(self._channel_free[channel], end) + transfer
            arrives = sent + latency
            self._way[value] = arrives - end
        self._there[value] = arrives
        if self._waiting[user] == value:
            self._waiting[user] = -1
            self.begin(user)
