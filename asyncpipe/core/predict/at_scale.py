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
        stages, placement = shape.stages, self._placement
        programs = [self._program(device, shape) for device in range(shape.devices)]
        # Where a value for (direction, stage, micro-batch) is, or will be: activations first, then gradients.
        there = array("d", [_COMES]) * (2 * stages * m)
        way = array("d", [0.0]) * (2 * stages * m)
        """How long it was on its way."""
        position, free = [0] * shape.devices, [0.0] * shape.devices
        busy, waits = [0.0] * shape.devices, [0.0] * shape.devices
        waiting: list[int] = [-1] * shape.devices
        """What a device waits for, as an index of ``there``."""
        channel_free = [0.0] * self._channels
        ends: list[tuple[float, int]] = []
        """A heap of (end, device) for the tasks that run."""
        recomputes = [self._checkpoint.recomputes(i, m) for i in range(m)]
        seconds, onward, back, last = self._seconds, self._onward, self._back, stages - 1
        gradients = stages * m
        tasks = 0

        def begin(device: int) -> None:
            """Begin the next task of ``device``, or note what it waits for."""
            program, at = programs[device], position[device]
            if at == len(program):
                return
            which, i = divmod(program[at], m)
            stage, kind = divmod(which, 4)
            since, row = free[device], seconds[stage]
            extra = 0.0
            if kind == 0:
                needs = stage * m + i if stage else -1
            elif kind == 3:
                needs = -1
            else:
                needs = gradients + stage * m + i if stage < last else -1
                if recomputes[i]:
                    extra = row[4] or 0.0
            start = since + extra
            if needs >= 0:
                arrives = there[needs]
                if arrives < 0:
                    waiting[device] = needs
                    return
                if arrives > start:
                    waits[device] += arrives - max(start, arrives - way[needs])
                    start = arrives
            cost = row[kind]
            assert cost is not None
            busy[device] += cost + extra
            heappush(ends, (start + cost, device))

        for device in range(shape.devices):
            begin(device)
        end = 0.0
        while ends:
            end, device = heappop(ends)
            which, i = divmod(programs[device][position[device]], m)
            stage, kind = divmod(which, 4)
            free[device] = end
            position[device] += 1
            tasks += 1
            goes, target = None, -1
            if kind == 0:
                if stage < last:
                    goes, target = onward[stage], stage + 1
                    made = target * m + i
            elif kind != 3 and stage:
                goes, target = back[stage], stage - 1
                made = gradients + target * m + i
            if target >= 0:
                arrives = end
                if goes is not None:
                    channel, transfer, latency = goes
                    channel_free[channel] = max(channel_free[channel], end) + transfer
                    arrives = channel_free[channel] + latency
                    way[made] = arrives - end
                there[made] = arrives
                user = placement[target]
                if waiting[user] == made:
                    waiting[user] = -1
                    begin(user)
            begin(device)
        for device, program in enumerate(programs):
            if position[device] < len(program):
                raise ScheduleError(f"schedule {self._schedule.name!r} deadlocks: device {device} waits for ever")
        return StepForecast(max(free), tuple(busy), tuple(waits), tasks, (m,))

    def _program(self, device: int, shape: Shape) -> array[int]:
        """The actions of ``device`` as numbers: (stage, kind, micro-batch) with the last running fastest."""
        m, number = shape.microbatches, _NUMBER
        where = f"schedule {self._schedule.name!r}, device {device}"
        with blaming(where):
            return array(
                "q",
                [(stage * 4 + number[kind]) * m + i for kind, i, stage in flat(self._schedule.order(device, shape))],
            )
