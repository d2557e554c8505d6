"""Lowering: which tasks and edges a schedule becomes, and how tasks are numbered and split by device."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import RandomOrder

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.export import to_dict, to_dot
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import WHOLE_STEP, Task
from asyncpipe.core.graph.task_graph import Phase, Reason, TaskGraph, Wiring
from asyncpipe.core.kinds import COMPUTE_KINDS, TaskKind
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError

ALWAYS, EXCEPT_LAST, NEVER = CheckpointMode.ALWAYS, CheckpointMode.EXCEPT_LAST, CheckpointMode.NEVER


def graphs(draw: random.Random) -> TaskGraph:
    """A graph of any kind."""
    devices, microbatches = draw.randint(1, 4), draw.randint(1, 6)
    shape = Shape(draw.randint(1, 6), microbatches, devices)
    pairs = [(source, user) for user in range(shape.stages) for source in range(user)]
    links = {*Wiring.chain(shape.stages).links, *draw.sample(pairs, draw.randint(0, len(pairs)))}
    return lower(
        RandomOrder(shape, draw, split=0.0),
        shape,
        checkpoint=draw.choice(list(CheckpointMode)),
        phase=draw.choice(list(Phase)),
        wiring=Wiring(tuple(sorted(links))),
    )


any_graph = st.randoms(use_true_random=False).map(graphs)


def of_kind(graph: TaskGraph, kind: TaskKind) -> list[Task]:
    return [task for task in graph.tasks if task.kind is kind]


def waits(graph: TaskGraph, task: Task) -> set[tuple[str, Reason]]:
    """What ``task`` waits for, and why."""
    return {(graph.tasks[e.dependency].id, e.reason) for e in graph.edges() if e.task == task.number}


# Tasks


def test_checkpoint_modes_are_parsed_or_listed() -> None:
    assert CheckpointMode.parse("except_last") is EXCEPT_LAST
    with pytest.raises(OptionError, match="one of 'always', 'except_last', 'selective', 'never', got 'sometimes'"):
        CheckpointMode.parse("sometimes")


@settings(max_examples=40)
@given(any_graph)
def test_each_task_is_there_once_and_copies_only_where_the_device_changes(graph: TaskGraph) -> None:
    counts = Counter((task.kind, task.microbatch, task.stage, task.source) for task in graph.tasks)
    m, n = graph.shape.microbatches, graph.shape.stages
    borders = [link for link in graph.wiring.links if graph.placement[link[0]] != graph.placement[link[1]]]
    expected: set[tuple[TaskKind, int, int, int | None]] = set()
    if graph.phase is not Phase.BACKWARD:
        expected |= {(TaskKind.FORWARD, i, j, None) for i, j in product(range(m), range(n))}
        expected |= {(TaskKind.COPY, i, user, source) for i, (source, user) in product(range(m), borders)}
    if graph.phase is not Phase.FORWARD:
        expected |= {(TaskKind.BACKWARD, i, j, None) for i, j in product(range(m), range(n))}
        expected |= {(TaskKind.COPY, i, source, user) for i, (source, user) in product(range(m), borders)}
    assert {key for key in counts if key[0] is not TaskKind.RECOMPUTE} == expected
    assert set(counts.values()) == {1}
    assert graph.phase is not Phase.FORWARD or not of_kind(graph, TaskKind.RECOMPUTE)


# Edges


def test_a_recomputation_follows_the_action_before_its_backward() -> None:
    """1F1B at stage 0 of 2: F0 F1 (R0) B0 F2 (R1) B1 B2, the last without recomputation."""
    graph = lower(find_schedule("1f1b"), Shape(2, 3, 2), checkpoint=EXCEPT_LAST)
    order, copy, recompute = Reason.ORDER, Reason.COPY, Reason.RECOMPUTE
    assert waits(graph, graph.find(TaskKind.RECOMPUTE, 0, 0)) == {("F(1,0)", order)}
    backward = {("F(1,0)", order), ("R(0,0)", recompute), ("C(0,1>0)", copy)}
    assert waits(graph, graph.find(TaskKind.BACKWARD, 0, 0)) == backward
    assert waits(graph, graph.find(TaskKind.FORWARD, 2, 0)) == {("B(0,0)", order)}
    assert waits(graph, graph.find(TaskKind.RECOMPUTE, 1, 0)) == {("F(2,0)", order)}
    last = {("B(1,0)", order), ("F(2,0)", Reason.DATA), ("C(2,1>0)", copy)}
    assert waits(graph, graph.find(TaskKind.BACKWARD, 2, 0)) == last


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.sampled_from(CheckpointMode))
def test_devices_keep_their_order(draw: random.Random, mode: CheckpointMode) -> None:
    """Each action waits for the one before it on its device, and each R too, for the same one as its B."""
    shape = Shape(draw.randint(1, 5), draw.randint(1, 4), draw.randint(1, 3))
    schedule = RandomOrder(shape, draw, split=0.0)
    graph = lower(schedule, shape, checkpoint=mode)
    for device in range(shape.devices):
        actions = [graph.find(*action) for action in schedule.order(device, shape)]
        assert not actions or not {reason for _, reason in waits(graph, actions[0])} & {Reason.ORDER}
        for before, task in pairwise(actions):
            assert before.number in graph.dependencies[task.number]
            if task.kind is TaskKind.BACKWARD and mode.recomputes(task.microbatch, shape.microbatches):
                recompute = graph.find(TaskKind.RECOMPUTE, task.microbatch, task.stage)
                assert graph.dependencies[recompute.number] == (before.number,)
                assert (recompute.id, Reason.RECOMPUTE) in waits(graph, task)


@settings(max_examples=40)
@given(any_graph)
def test_dependents_invert_dependencies_and_are_split_by_device(graph: TaskGraph) -> None:
    local, remote = set(), set()
    for task in graph.tasks:
        local |= {(task.number, dependent) for dependent in graph.local_dependents[task.number]}
        remote |= {(task.number, dependent) for dependent in graph.remote_dependents[task.number]}
        assert len(set(graph.dependencies[task.number])) == len(graph.dependencies[task.number]), "an edge is doubled"
    edges = {(edge.dependency, edge.task) for edge in graph.edges()}
    device = [task.lane.device for task in graph.tasks]
    assert local == {(before, after) for before, after in edges if device[before] == device[after]}
    assert remote == edges - local


# Numbers, cycles and lanes


@settings(max_examples=40)
@given(any_graph)
def test_numbers_are_topological_by_cycle_with_copies_before_what_needs_them_and_the_whole_steps_last(
    graph: TaskGraph,
) -> None:
    assert [task.number for task in graph.tasks] == list(range(len(graph.tasks)))
    assert all(edge.dependency < edge.task for edge in graph.edges())
    computed = [task for task in graph.tasks if task.kind in COMPUTE_KINDS]
    assert [task.cycle for task in computed] == sorted(task.cycle for task in computed)
    for task in graph.tasks:
        of_device = [other for other in graph.tasks[task.number :] if other.lane.device == task.lane.device]
        if task.microbatch != WHOLE_STEP and task.kind is TaskKind.COPY and graph.rule is None:
            after = next(other for other in of_device if other.kind is not TaskKind.COPY)
            assert after.number in graph.local_dependents[task.number]
        if task.microbatch == WHOLE_STEP and task.kind is not TaskKind.COPY:
            assert all(other.microbatch == WHOLE_STEP for other in of_device)


# Growth


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("mode", [NEVER, ALWAYS])
def test_tasks_and_edges_grow_linearly(name: str, mode: CheckpointMode) -> None:
    """The same number of tasks and edges for every further round of micro-batches, and at most three edges a task."""
    made = [lower(find_schedule(name), Shape(4, 4 * k, 4), checkpoint=mode) for k in range(2, 7)]
    for sizes in ([len(graph.tasks) for graph in made], [sum(1 for _ in graph.edges()) for graph in made]):
        assert len({after - before for before, after in pairwise(sizes)}) == 1, sizes
    assert all(len(before) <= 3 for graph in made for before in graph.dependencies)


# The graph as data


def test_plain_data_and_dot_name_every_task_and_edge() -> None:
    graph = lower(find_schedule("1f1b"), Shape(2, 2, 2), checkpoint=ALWAYS)
    data = to_dict(graph)
    assert [row["id"] for row in data["tasks"]] == [task.id for task in graph.tasks]
    assert {"from": "R(0,1)", "to": "B(0,1)", "reason": "recompute"} in data["edges"]
    assert len(data["edges"]) == sum(1 for _ in graph.edges())
    copy = next(row for row in data["tasks"] if row["id"] == "C(0,0>1)")
    assert copy == {
        "id": "C(0,0>1)",
        "kind": "C",
        "microbatch": 0,
        "stage": 1,
        "device": "dev:1",
        "lane": "dev:1/copy-in",
        "cycle": copy["cycle"],
        "src": 0,
        "dst": 1,
    }
    dot = to_dot(graph)
    assert all(f'"{task.id}" [' in dot for task in graph.tasks)
    assert dot.count(" -> ") == len(data["edges"])
    assert dot.count("style=dashed") == sum(edge.reason is Reason.ORDER for edge in graph.edges())
