"""Random graphs of a step: every built-in order, random orders and rules, with skips, ties and updates."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Phase, TaskGraph, Wiring
from asyncpipe.core.schedules.protocol import Action, B, F, HintedSchedule, I, OrderedSchedule, RuledSchedule, Shape, W
from asyncpipe.core.schedules.registry import find_schedule, known_schedules
from asyncpipe.errors import ScheduleError

__all__ = ["random_graph", "random_ordered_graph", "random_partition", "random_ruled_graph"]

ORDERED = [name for name in known_schedules() if isinstance(find_schedule(name), OrderedSchedule)]


class Random(RuledSchedule):
    """Any placement, any priorities, any cap of at least 1 for what comes in at each stage."""

    def __init__(self, shape: Shape, draw: random.Random) -> None:
        self.splits_backward = draw.random() < 0.5
        self.ahead = draw.choice([1, 1, 2, 3])
        self._caps = [draw.randint(1, 4) for _ in range(shape.stages)]
        self._placement = [draw.randrange(shape.devices) for _ in range(shape.stages)]
        self._draw = draw
        self.mood = 0.0
        """How often the rule refuses or raises for no reason."""
        mine = [[c for c, at in zip(self._caps, self._placement, strict=True) if at == d] for d in range(shape.devices)]
        self.caps = [max(caps, default=0) for caps in mine]

    def placement(self, shape: Shape) -> Sequence[int]:
        return self._placement

    def check(self, shape: Shape) -> None:
        pass

    def priority(self, action: Action, shape: Shape) -> float:
        return self._draw.choice([0.0, self._draw.random()])

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        if self._draw.random() < self.mood:
            if self._draw.random() < 0.5:
                raise OSError("gone")
            return False
        return live < self._caps[action.stage]


class RandomOrder(OrderedSchedule):
    """A random run of the whole step, cut up by device; backwards are split with the probability ``split``."""

    def __init__(self, shape: Shape, draw: random.Random, split: float = 0.5) -> None:
        self._placement = [draw.randrange(shape.devices) for _ in range(shape.stages)]
        self._orders: list[list[Action]] = [[] for _ in range(shape.devices)]
        ways = []
        for i in range(shape.microbatches):
            way = [F(i, j) for j in range(shape.stages)]
            for j in reversed(range(shape.stages)):
                way += [I(i, j), W(i, j)] if draw.random() < split else [B(i, j)]
            ways.append(way)
        while ways := [way for way in ways if way]:
            action = draw.choice(ways).pop(0)
            self._orders[self._placement[action.stage]].append(action)

    def order(self, device: int, shape: Shape) -> Iterable[Action]:
        return self._orders[device]

    def placement(self, shape: Shape) -> Sequence[int]:
        return self._placement

    def check(self, shape: Shape) -> None:
        pass


def random_wiring(stages: int, draw: random.Random) -> Wiring:
    """Any links from earlier to later stages; some stages may not be joined at all."""
    links = [(a, b) for a in range(stages) for b in range(a + 1, stages) if draw.random() < 0.4]
    ties = [(a, b) for a in range(stages) for b in range(a + 1, stages) if draw.random() < 0.1]
    return Wiring(tuple(links), tuple(ties), tuple(j for j in range(stages) if draw.random() < 0.3))


def random_ruled_graph(draw: random.Random, mood: float = 0.0) -> tuple[TaskGraph, list[int]]:
    """A ruled or hinted graph, and the cap of each device; from here on a rule has its ``mood``."""
    shape = Shape(draw.randint(1, 5), draw.randint(1, 6), draw.randint(1, 3))
    schedule: RuledSchedule
    if draw.random() < 0.5:
        schedule = Random(shape, draw)
        caps = schedule.caps
    else:
        cap = draw.choice([None, 1, 2])
        order = RandomOrder(shape, draw)
        schedule = HintedSchedule(order, cap)
        caps = [cap or shape.microbatches] * shape.devices
    wiring = random_wiring(shape.stages, draw)
    placement = schedule.placement(shape)
    # A parameter is tied where its users are on several devices.
    ties = tuple((a, b) for a, b in wiring.ties if placement[a] != placement[b])
    graph = lower(
        schedule, shape, wiring=Wiring(wiring.links, ties, wiring.updates), checkpoint=draw.choice(list(CheckpointMode))
    )
    if isinstance(schedule, Random):
        schedule.mood = mood
    return graph, caps


def random_ordered_graph(draw: random.Random, most_devices: int = 3) -> TaskGraph:
    """Of an ordered schedule: a built-in one, or any order."""
    devices = draw.randint(1, most_devices)
    phase, microbatches = draw.choice([Phase.STEP, *Phase]), draw.randint(1, 4)
    checkpoint = draw.choice(list(CheckpointMode))
    while True:
        schedule = find_schedule(draw.choice(ORDERED))
        shape = Shape(devices * draw.randint(1, 2), microbatches, devices)
        if draw.random() < 0.2:
            schedule = RandomOrder(shape, draw)
        try:
            schedule.check(shape)
            placement = schedule.placement(shape)
            wiring = _wiring(placement, draw)
            offload = [draw.choice([0.0, 0.5, 1.0]) for _ in placement] if draw.random() < 0.3 else ()
            return lower(schedule, shape, checkpoint=checkpoint, phase=phase, wiring=wiring, offload=offload)
        except ScheduleError:
            continue


def _wiring(placement: Sequence[int], draw: random.Random) -> Wiring:
    """A chain with skips. A tie joins stages on several devices, and is a link as well."""
    stages = range(len(placement))
    skips = {(a, b) for a in stages for b in stages[a + 2 :] if draw.random() < 0.2}
    tied = [(a, b) for a in stages for b in stages[a + 1 :] if placement[a] != placement[b]]
    ties = set(draw.sample(tied, min(len(tied), draw.choice([0, 0, 1, 2]))))
    updates = tuple(j for j in stages if draw.random() < 0.7) if draw.random() < 0.5 else ()
    return Wiring(tuple(sorted({*Wiring.chain(len(stages)).links, *skips, *ties})), tuple(sorted(ties)), updates)


def random_graph(draw: random.Random, most_devices: int = 3, ruled: float = 0.15) -> TaskGraph:
    """Of an ordered schedule, or with the probability ``ruled`` of a rule or a hint."""
    return random_ruled_graph(draw)[0] if draw.random() < ruled else random_ordered_graph(draw, most_devices)


def random_partition(devices: Sequence[str], draw: random.Random) -> list[list[str]]:
    """The devices of one to four workers, each at least one, in any mixture."""
    workers = draw.randint(1, min(4, len(devices)))
    mixed = draw.sample(devices, len(devices))
    found = [[name] for name in mixed[:workers]]
    for name in mixed[workers:]:
        draw.choice(found).append(name)
    return found
