"""Table 1's ablation as task graphs: the graph of a GPipe step with one of torchgpipe's three components taken out.

*Portals* are the wiring's: without them ``LayeredModel.split`` sends skips from stage to stage. The other two change
the graph that ``lower`` made::

    with dependency      last stage   F F F │ B  R B  R B          R(i) begins once B(i+1) is over
    without              last stage   F F F │ R R B B B            all gradients are there at once: all R come first
                         other stage                C R B          R(i) begins once the gradient is there

    with streams         compute      F(0)    F(1)    F(2)
                         copies            C(0)    C(1)
    without              compute      F(0) C(0) F(1) C(1)          on both the sender's and the receiver's device

What Fork and Join order is the backward, of which autograd otherwise knows nothing but the data. That it then
recomputes ahead was seen with torchgpipe 0.0.5, on a CPU, whose ``depend`` did nothing. A copy between two GPUs on
their compute streams keeps both from computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from asyncpipe.core.graph.task import Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind

__all__ = ["without_dependency", "without_streams"]


@dataclass(eq=False)
class _Node:
    """A task, and what it waits for besides the task before it on its compute lane."""

    task: Task
    waits: list[_Node]


Orders = Mapping[str, list[_Node]]
"""For each device, the tasks of its compute lane in their order."""


def without_dependency(graph: TaskGraph) -> TaskGraph:
    """``graph``, an ordered step, where nothing but data and what is ready decides when to recompute."""
    nodes, orders = _opened(graph)
    for node in nodes:
        if node.task.kind is TaskKind.RECOMPUTE:
            backward = nodes[graph.find(TaskKind.BACKWARD, node.task.microbatch, node.task.stage).number]
            node.waits += [before for before in backward.waits if before.task.kind is TaskKind.COPY]
    # Stable: the order within forwards, recomputations and backwards stays.
    ahead = [TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD]
    orders[graph.devices[graph.placement[-1]]].sort(key=lambda node: ahead.index(node.task.kind))
    return _closed(graph, nodes, orders)


def without_streams(graph: TaskGraph) -> TaskGraph:
    """``graph``, an ordered step, with each copy on the compute lanes of the two devices."""
    nodes, orders = _opened(graph)
    copies = [node for node in nodes if node.task.kind is TaskKind.COPY]
    for copy in copies:
        (producer,) = copy.waits = [node for node in copy.waits if node not in copies]
        consumer = next(node for node in nodes if copy in node.waits and node not in copies)
        # A task runs where its stage is; so this one is as if it brought something the other way.
        there, here = producer.task, consumer.task
        sent = _Node(copy.task._replace(stage=there.stage, source=here.stage, lane=there.lane), [producer])
        copy.task = copy.task._replace(lane=consumer.task.lane)
        nodes.append(sent)
        order = orders[producer.task.lane.device]
        order.insert(order.index(producer) + 1, sent)
        order = orders[consumer.task.lane.device]
        order.insert(order.index(consumer), copy)
    return _closed(graph, nodes, orders)


def _opened(graph: TaskGraph) -> tuple[list[_Node], dict[str, list[_Node]]]:
    """The tasks of ``graph`` by number, and the order of each compute lane, which the numbers follow."""
    nodes = [_Node(task, []) for task in graph.tasks]
    orders: dict[str, list[_Node]] = {device: [] for device in graph.devices}
    for node, before in zip(nodes, graph.dependencies, strict=True):
        node.waits = [nodes[number] for number in before if not _is_order(graph.tasks[number], node.task)]
        if node.task.lane.queue is Queue.COMPUTE:
            orders[node.task.lane.device].append(node)
    return nodes, orders


def _is_order(before: Task, task: Task) -> bool:
    """Whether the order of a compute lane implies this edge."""
    return before.lane == task.lane and task.lane.queue is Queue.COMPUTE


def _closed(graph: TaskGraph, nodes: Sequence[_Node], orders: Orders) -> TaskGraph:
    """The graph of ``nodes`` in these orders, numbered by clock cycle, copies first, as ``lower`` does."""
    before: dict[_Node, list[_Node]] = {node: list(node.waits) for node in nodes}
    for order in orders.values():
        for first, second in pairwise(order):
            if first not in before[second]:
                before[second].append(first)
    cycles = _cycles(before)
    is_copy = {node: node.task.kind is TaskKind.COPY for node in nodes}
    numbered = sorted(cycles, key=lambda node: (cycles[node], not is_copy[node]))
    number = {node: position for position, node in enumerate(numbered)}
    dependents: dict[bool, list[list[int]]] = {here: [[] for _ in nodes] for here in (True, False)}
    for node in numbered:
        for each in before[node]:
            dependents[each.task.lane.device == node.task.lane.device][number[each]].append(number[node])
    return replace(
        graph,
        tasks=tuple(node.task._replace(number=number[node], cycle=cycles[node]) for node in numbered),
        dependencies=tuple(tuple(number[each] for each in before[node]) for node in numbered),
        local_dependents=_frozen(dependents[True]),
        remote_dependents=_frozen(dependents[False]),
        lane_of=tuple(graph.lanes.index(node.task.lane) for node in numbered),
    )


def _cycles(before: Mapping[_Node, Sequence[_Node]]) -> dict[_Node, int]:
    """For each task the longest chain of compute tasks before it; no task precedes what it waits for."""
    cycles: dict[_Node, int] = {}
    left = list(before)
    while left:
        ready = [node for node in left if all(each in cycles for each in before[node])]
        assert ready, "the orders are a circle"
        for node in ready:
            ends = (cycles[each] + (each.task.kind is not TaskKind.COPY) for each in before[node])
            cycles[node] = max(ends, default=0)
        left = [node for node in left if node not in cycles]
    return cycles


def _frozen(rows: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, rows))
