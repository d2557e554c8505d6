"""A worker that lowers its own part alone gets the part that the whole graph has for it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from random_graphs import ORDERED, RandomOrder, random_partition, random_wiring

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.part import BEGINNING, Departure, Part, part
from asyncpipe.core.graph.rows import Rows
from asyncpipe.core.graph.task_graph import Phase, TaskGraph, Wiring
from asyncpipe.core.schedules.gpipe import GPipeSchedule
from asyncpipe.core.schedules.protocol import Action, OrderedSchedule, Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import ScheduleError

Identity = tuple[object, ...] | None


def seen(graph: TaskGraph, cut: Part) -> dict[str, object]:
    """What the runtime sees of a part, and other processes, without the numbers of the graph that it was cut from."""
    names = cut.names
    assert [names.number(names.of(task.number)) for task in graph.tasks] == list(range(len(graph.tasks)))

    def identity(number: int) -> Identity:
        if number == BEGINNING:
            return None
        return names.of(number), *graph.tasks[number][1:5], *graph.tasks[number][6:]

    def message(sent: Departure) -> Identity:
        return sent.device, identity(sent.task), identity(sent.dependency), sent.tensors, sent.among

    own = cut.graph
    return {
        "tasks": [(task.number, identity(number)) for task, number in zip(own.tasks, cut.whole, strict=True)],
        "dependencies": own.dependencies,
        "dependents": (own.local_dependents, own.remote_dependents),
        "lanes": (own.lanes, own.lane_of, own.placement, own.devices),
        "step": (own.schedule, own.shape, own.phase, own.wiring),
        "gates": own.gates[: len(own.gates) - len(cut.arrivals)],
        "arrivals": {(identity(a), identity(b)): own.gates[gate] for (a, b), gate in cut.arrivals.items()},
        "senders": cut.arrivals_from,
        "departures": [sorted(map(message, sent), key=str) for sent in cut.departures],
        "at start": sorted(map(message, cut.at_start), key=str),
        "rule": None if own.rule is None else (own.rule.ranks, own.rule.by_rank, own.rule.ahead),
    }


@dataclass
class Case:
    """The arguments of ``lower``."""

    arguments: dict[str, object]

    def lower(self, **more: object) -> TaskGraph:
        return lower(**self.arguments, **more)  # type: ignore[arg-type]


def random_case(draw: random.Random) -> Case:
    """A step of one to three rows, with skips, ties in a row and over rows, updates, norms, reductions and offload."""
    rows, devices, virtual = draw.choice([1, 1, 2, 3]), draw.randint(1, 4), draw.randint(1, 2)
    count, microbatches = devices * virtual, draw.randint(1, 5) * rows - draw.randrange(rows)
    schedule: OrderedSchedule = find_schedule(draw.choice(ORDERED))  # type: ignore[assignment]
    if rows == 1 and draw.random() < 0.3:
        schedule = RandomOrder(Shape(count, microbatches, devices), draw)
    placement = schedule.placement(Shape(count, microbatches, devices))
    links = random_wiring(count, draw).links
    inside = [(a, b) for a in range(count) for b in range(a + 1, count) if placement[a] != placement[b]]
    ties = set(draw.sample(inside, min(len(inside), draw.randrange(3))))
    updates, reduces = tuple(j for j in range(count) if draw.random() < 0.6), ()
    in_rows = {(a + row * count, b + row * count) for a, b in ties for row in range(rows)}
    if rows > 1 and draw.random() < 0.7:
        # Whatever is updated is reduced first; of shared parameters that is the owner's.
        reduces = tuple((j, draw.randint(1, 3)) for j in range(count) if j in updates or draw.random() < 0.3)
        updates = updates if draw.random() < 0.8 else ()
    else:
        in_rows |= {(j, j + row * count) for j in range(count) for row in range(1, rows) if draw.random() < 0.5}
    wiring = Wiring(
        tuple((a + row * count, b + row * count) for row in range(rows) for a, b in links),
        tuple(sorted(in_rows)),
        updates,
        tuple(each for each in sorted(in_rows) if draw.random() < 0.3),
        reduces,
        bool(reduces and updates) and draw.random() < 0.5,
        rows,
        min(updates) if updates and (reduces or rows == 1) and draw.random() < 0.5 else None,
    )
    offload = [draw.choice([0.0, 0.5, 1.0]) for _ in range(count)] * rows if draw.random() < 0.3 else ()
    shape = Shape(count * rows, microbatches, devices * rows)
    chosen = {"checkpoint": draw.choice(list(CheckpointMode)), "phase": draw.choice([Phase.STEP, *Phase])}
    return Case({"schedule": schedule, "shape": shape, "wiring": wiring, "offload": offload, **chosen})


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_a_part_that_is_lowered_alone_is_that_of_the_whole_graph(draw: random.Random) -> None:
    while True:
        case = random_case(draw)
        try:
            whole = case.lower()
            break
        except ScheduleError:
            continue
    assert all(edge.dependency < edge.task for edge in whole.edges())
    for devices in random_partition(whole.devices, draw):
        alone = case.lower(around=devices)
        event(f"reduces: {bool(whole.wiring.reduces)}, ties: {bool(whole.wiring.ties)}, norm: {whole.wiring.norm}")
        assert seen(alone, part(alone, devices)) == seen(whole, part(whole, devices))


@pytest.mark.parametrize("order", ["strict", "hint"])
def test_a_worker_asks_a_schedule_for_its_own_orders_and_those_of_its_neighbours(order: str) -> None:
    asked: list[int] = []

    class Counted(GPipeSchedule):
        def order(self, device: int, shape: Shape) -> list[Action]:
            asked.append(device)
            return list(super().order(device, shape))  # type: ignore[arg-type]

    schedule = find_schedule(Counted(), order=order)
    graph = lower(schedule, Shape(8, 2, 8), around=["dev:3"])
    assert set(asked) == ({2, 3, 4} if order == "strict" else set(range(8))), "a rule needs all"
    assert len(graph.tasks) == (3 * 4 + 4 * 2 if order == "strict" else 8 * 4 + 7 * 4)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_what_a_worker_lowers_does_not_grow_with_the_number_of_workers(name: str) -> None:
    def tasks(devices: int) -> int:
        shape = Shape(devices * (2 if name == "interleaved" else 1), 8, devices)
        return len(lower(find_schedule(name), shape, around=["dev:3"]).tasks)

    assert tasks(8) == tasks(64)


def test_rows_sum_over_their_replicas_alone() -> None:
    wiring = Wiring(((0, 1), (2, 3)), updates=(0, 1), reduces=((0, 1), (1, 1)), rows=2)
    near = wiring.around(frozenset([3]), Rows.of(Shape(4, 4, 4), 2))
    assert (near.links, near.updates, near.reduces) == (((2, 3),), (1,), ((1, 1),))
