"""Programs of devices: every order that ``programs`` makes runs to its end, and keeps every dependency."""

from __future__ import annotations

import contextlib
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import random_ordered_graph

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.programs import programs
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.schedules.protocol import RuledSchedule, Shape
from asyncpipe.core.schedules.registry import find_schedule, known_schedules
from asyncpipe.core.schedules.validate import checked_actions
from asyncpipe.errors import ScheduleError

SCHEDULES = [name for name in known_schedules() if not isinstance(find_schedule(name), RuledSchedule)]


@given(st.randoms(use_true_random=False))
def test_every_program_runs_to_its_end_after_what_it_needs(chance: random.Random) -> None:
    graph = random_ordered_graph(chance, most_devices=4)
    made = programs(graph).programs
    open_gates = set(graph.gates)
    awaits = [list(program.awaits) for program in made]
    places = {task: (p, k) for p, program in enumerate(made) for k, task in enumerate(program.tasks)}
    assert sorted(places) == list(range(len(graph.tasks)))
    for gated in open_gates:  # The caller opens them all, sooner or later.
        awaits[places[gated][0]][places[gated][1]] -= 1
    at = [0] * len(made)
    done: set[int] = set()
    while len(done) < len(graph.tasks):
        able = [p for p, program in enumerate(made) if at[p] < len(program.tasks) and not awaits[p][at[p]]]
        assert able, "every program waits"
        program, position = made[p := chance.choice(able)], at[p]
        task = program.tasks[position]
        assert done.issuperset(graph.dependencies[task])
        done.add(task)
        at[p] += 1
        for other, place in program.releases[position]:
            awaits[other][place] -= 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_compute_runs_in_the_order_of_the_schedule(name: str) -> None:
    graph, shape = _lowered(name)
    for program in programs(graph).programs:
        order = [graph.tasks[task] for task in program.tasks if graph.tasks[task].source is None]
        wanted = checked_actions(find_schedule(name), shape, graph.placement, program.device)
        assert [(task.kind, task.microbatch, task.stage) for task in order] == wanted


def _lowered(name: str) -> tuple[TaskGraph, Shape]:
    """The schedule's graph for the first of some shapes that it can serve."""
    for shape in (Shape(4, 8, 4), Shape(8, 8, 4), Shape(2, 8, 1)):
        with contextlib.suppress(ScheduleError):
            return lower(find_schedule(name), shape), shape
    raise AssertionError(f"{name} serves none of the shapes")


def test_a_copy_comes_just_before_what_needs_it() -> None:
    graph = lower(find_schedule("1f1b"), Shape(2, 4, 2))
    first = programs(graph).programs[0]
    ids = deque(graph.tasks[task].id for task in first.tasks)
    assert list(ids) == [
        "F(0,0)", "F(1,0)", "C(0,1>0)", "B(0,0)", "F(2,0)", "C(1,1>0)", "B(1,0)", "F(3,0)", "C(2,1>0)", "B(2,0)",
        "C(3,1>0)", "B(3,0)",
    ]  # fmt: skip
