"""What a case is, drawn from its seed: a pipeline over some workers, and what hangs in one of its steps."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from asyncpipe.core.graph.part import part
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.hangs.roots import HangState
from asyncpipe.core.schedules.protocol import OrderedSchedule, Shape
from asyncpipe.core.schedules.registry import BUILT_IN, find_schedule
from asyncpipe.errors import ScheduleError
from tests.campaigns.hangs.planted import HELD, Plant

__all__ = ["KINDS", "MAPPING", "Expected", "Layout", "draw_layout", "draw_plant"]

KINDS = ("sleep", "stop", "credit", "take", "link")
WORKERS = "abcd"
MAPPING = {f"cpu:{k}": WORKERS[k % len(WORKERS)] for k in range(2 * len(WORKERS))}
"""The worker of each device of a pool; a case has some of them."""


@dataclass(frozen=True)
class Layout:
    """A pipeline."""

    devices: tuple[str, ...]
    stages: int
    microbatches: int
    schedule: str
    order: str
    checkpoint: str
    has_tie: bool
    overlaps: bool
    """Whether steps are under way together."""


@dataclass(frozen=True)
class Expected:
    """What the error must say."""

    state: HangState
    worker: str
    task: str = ""
    device: str = ""
    peer: str = ""


def draw_layout(chance: random.Random, workers: int | None = None) -> Layout:
    """A pipeline over so many workers, by default two to four."""
    names = chance.sample(WORKERS, workers or chance.randint(2, len(WORKERS)))
    devices = [device for device, worker in MAPPING.items() if worker in names]
    first = {worker: next(device for device in devices if MAPPING[device] == worker) for worker in names}
    rest = [device for device in devices if device not in first.values()]
    chosen = [*first.values(), *chance.sample(rest, chance.choice([0, 0, 1, len(rest)]))]
    chance.shuffle(chosen)
    while True:
        name, each = chance.choice(sorted(BUILT_IN)), chance.choice([1, 1, 2])
        shape = Shape(each * len(chosen), chance.randint(2, 6), len(chosen))
        order = chance.choice(["strict", "strict", "hint"])
        try:
            schedule = find_schedule(name, order=order)
            schedule.check(shape)
            placement = list(schedule.placement(shape))
        except ScheduleError:
            continue
        if set(placement) == set(range(len(chosen))):
            is_ordered = isinstance(schedule, OrderedSchedule)
            checkpoint = chance.choice(["always", "never", "except_last"])
            has_tie, overlaps = chance.random() < 0.3, is_ordered and chance.random() < 0.4
            return Layout(tuple(chosen), shape.stages, shape.microbatches, name, order, checkpoint, has_tie, overlaps)


def draw_plant(
    kind: str, chance: random.Random, graph: TaskGraph, numbers: dict[str, int], note: Path
) -> tuple[Plant, Expected]:
    """Something of ``kind`` that hangs in a step of ``graph``. ``numbers`` are those of the workers, by name."""
    home = {device: MAPPING[device] for device in graph.devices}
    messages = _messages(graph, home)
    sender, receiver = chance.choice(sorted(messages))
    edge, count = (numbers[sender], numbers[receiver]), messages[sender, receiver]
    if kind in ("sleep", "stop") and (kind == "sleep" or chance.random() < 0.75):
        letter = chance.choice(sorted({task.kind for task in graph.tasks}))
        task = chance.choice([task for task in graph.tasks if task.kind == letter])
        way = chance.choice(["wait", "sleep", "below Python"] if kind == "sleep" else ["stop", "stop", HELD])
        device = task.lane.device
        state = HangState.COMPUTING if kind == "sleep" else HangState.SILENT
        return Plant(kind, note, task.id, device, way), Expected(state, home[device], task.id, device)
    after = chance.randrange(count)
    if kind == "stop":
        return Plant(kind, note, edge=edge, after=after), Expected(HangState.SILENT, receiver)
    if kind == "credit":
        plant = Plant(kind, note, edge=edge, after=after, window=chance.choice([0, chance.randint(1, count)]))
        return plant, Expected(HangState.WAITS_FOR_CREDIT, receiver, peer=sender)
    state = HangState.NOT_TAKING if kind == "take" else HangState.WAITS_FOR_EDGE
    return Plant(kind, note, edge=edge, after=after), Expected(state, receiver, peer=sender)


def _messages(graph: TaskGraph, home: dict[str, str]) -> Counter[tuple[str, str]]:
    """How many messages of a step each edge has, by the workers that it leads from and to."""
    found: Counter[tuple[str, str]] = Counter()
    for worker in set(home.values()):
        own = part(graph, [device for device, of in home.items() if of == worker])
        for device, count in own.arrivals_from.items():
            found[home[device], worker] += count
    return found
