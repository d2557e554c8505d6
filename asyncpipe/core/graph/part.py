"""Parts: what one of several workers runs of a step's graph, and what the parts tell each other.

Each worker has some of the devices, and runs the tasks of these as a task graph of its own. Where a task waits for one
of another part, it waits at a gate, and the other part has a *departure*: what is to be sent there. So one message is
one dependency that crosses, named by its two tasks::

    whole graph      F(0,0) ─▶ C(0,0>1) ─▶ F(0,1)        cpu:0 │ cpu:1

    part of cpu:0    F(0,0) ─▶ departure  (C(0,0>1), F(0,0)), with tensors
    part of cpu:1              arrival    (C(0,0>1), F(0,0)) opens a gate ─▶ C(0,0>1) ─▶ F(0,1)

Tensors cross only to a copy, or to what replicas reduce and gather, which run where they go; and norms, to N and U.
Other dependencies that cross are mere order: under a rule R(i,j) waits for the task that makes its gradient. A copy of
tied parameters waits for no task, since they are complete when the step begins; its message is named by ``BEGINNING``,
and leaves when the step begins at the owner.

Numbers of tasks are those of the graph that a part is cut from. A worker need not have the whole one (``lower`` with
``around``), so between processes tasks have names (``TaskNames``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import Rule, TaskGraph
from asyncpipe.core.kinds import COLLECTIVE_KINDS, TaskKind
from asyncpipe.errors import DeviceError

__all__ = ["BEGINNING", "Departure", "Part", "TaskNames", "owner_of", "part", "tasks_by_device"]

BEGINNING = -1
"""In place of a task that is waited for: the beginning of the step in the other part."""


_POSITIONS = {kind: position for position, kind in enumerate(TaskKind)}


class TaskNames:
    """The names of a graph's tasks: the same in every process, however much of a step's graph each has lowered."""

    def __init__(self, graph: TaskGraph) -> None:
        stages = graph.shape.stages
        self._names = []
        for _, kind, microbatch, stage, _, _, source, bucket in graph.tasks:
            which = (microbatch + 1 if bucket is None else bucket) * len(_POSITIONS) + _POSITIONS[kind]
            self._names.append((which * stages + stage) * (stages + 1) + (0 if source is None else source + 1))
        self._numbers = {name: number for number, name in enumerate(self._names)}

    def of(self, number: int) -> int:
        """The name of a task, 0 or more; ``BEGINNING`` has its own."""
        return self._names[number] if number >= 0 else number

    def number(self, name: int) -> int:
        """The inverse of ``of``."""
        return self._numbers[name] if name >= 0 else name


class Departure(NamedTuple):
    """What a task of another part waits for."""

    device: str
    """The device of the task that waits."""
    task: int
    """The task that waits."""
    dependency: int
    """The task of this part that it waits for, or ``BEGINNING``."""
    tensors: bool
    """Whether the message carries tensors: the task that waits, a copy for instance, reads what this one has made."""
    among: int = 1
    """For how many tasks of this part it waits. Of several, whose messages all name the same ``task``, the last one to
    be sent carries the tensors: under a rule, the gradient of tied parameters is complete after any of some tasks."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a task graph, and how it is joined to the others."""

    graph: TaskGraph
    """The tasks of the part's devices: of one device after the other, each in its order. ``shape``, ``devices``,
    ``placement``, ``phase`` and ``wiring`` are those of the whole step, so that indices of devices and stages keep
    their meaning; ``lanes`` are the part's own. Gates of the whole graph come first, in their order, then arrivals."""
    whole: tuple[int, ...]
    """The number of each task in the graph that the part was cut from."""
    names: TaskNames
    """Of that graph's tasks."""
    arrivals: Mapping[tuple[int, int], int]
    """The gate that each message opens, by (task that waits, dependency): numbers of that graph."""
    arrivals_from: Mapping[str, int]
    """How many messages come from each device of the other parts."""
    departures: tuple[tuple[Departure, ...], ...]
    """What to send once each task has released its dependents on other devices: when it is issued, or under a rule,
    completed. A step that was aborted sends nothing."""
    at_start: tuple[Departure, ...]
    """What to send when the step begins."""

    def name(self, task: int) -> int:
        """The name of a task of the part."""
        return self.names.of(self.whole[task])


def tasks_by_device(graph: TaskGraph) -> list[list[int]]:
    """The tasks of each device, in their order. A part has those of its devices, of one after the other."""
    found: list[list[int]] = [[] for _ in graph.devices]
    for task in graph.tasks:
        found[graph.placement[task.stage]].append(task.number)
    return found


def part(graph: TaskGraph, devices: Iterable[str]) -> Part:
    """The part of ``graph`` that runs on ``devices`` (names); time and memory are linear in the number of tasks.

    A scheduler runs it as it runs a whole graph. The parts of all workers run to their end together if the whole graph
    does: they have its order, or its rule, and every message is sent as soon as its task is done. Raises
    ``DeviceError`` for a device that is not the graph's.
    """
    own = set(devices)
    if unknown := own.difference(graph.devices):
        raise DeviceError(f"the step has no device {min(unknown)!r}; its devices are {', '.join(graph.devices)}")
    is_own = [graph.devices[device] in own for device in graph.placement]
    by_device = zip(graph.devices, tasks_by_device(graph), strict=True)
    whole = tuple([number for device, tasks in by_device if device in own for number in tasks])
    number = {task: position for position, task in enumerate(whole)}
    gates = [number[gated] for gated in graph.gates if gated in number]
    awaited = list(_awaited(graph, is_own, number))
    lanes = {lane: position for position, lane in enumerate(lane for lane in graph.lanes if lane.device in own)}
    return Part(
        graph=replace(
            graph,
            tasks=tuple([Task(position, *graph.tasks[task][1:]) for position, task in enumerate(whole)]),
            dependencies=_renumbered(graph.dependencies, whole, number),
            local_dependents=_renumbered(graph.local_dependents, whole, number),
            remote_dependents=_renumbered(graph.remote_dependents, whole, number),
            lanes=tuple(lanes),
            lane_of=tuple([lanes[graph.tasks[task].lane] for task in whole]),
            gates=(*gates, *(number[task] for task, _, _ in awaited)),
            rule=None if graph.rule is None else _restricted(graph.rule, number),
        ),
        whole=whole,
        names=TaskNames(graph),
        arrivals={(task, before): gate for gate, (task, before, _) in enumerate(awaited, len(gates))},
        arrivals_from=Counter(sender for _, _, sender in awaited),
        departures=tuple(
            [
                tuple(
                    [
                        _departure(graph, after, task, number)
                        for after in graph.remote_dependents[task]
                        if after not in number
                    ]
                )
                for task in whole
            ]
        ),
        at_start=tuple(
            [
                Departure(task.lane.device, task.number, BEGINNING, tensors=True)
                for task in graph.tasks
                if task.number not in number and (owner := owner_of(graph, task)) is not None and is_own[owner]
            ]
        ),
    )


def _awaited(graph: TaskGraph, is_own: Sequence[bool], own: Mapping[int, int]) -> Iterator[tuple[int, int, str]]:
    """Each message that a part waits for: the task, its dependency, and the device that sends it."""
    for task in [graph.tasks[each] for each in own]:
        for before in graph.dependencies[task.number]:
            if before not in own:
                yield task.number, before, graph.devices[graph.placement[graph.tasks[before].stage]]
        if (owner := owner_of(graph, task)) is not None and not is_own[owner]:
            yield task.number, BEGINNING, graph.devices[graph.placement[owner]]


def owner_of(graph: TaskGraph, task: Task) -> int | None:
    """The stage whose parameters ``task`` copies as they are when the step begins; ``None`` of any other task."""
    return None if task.source is None or graph.read_by(task.number) else task.source


def _departure(graph: TaskGraph, task: int, dependency: int, own: Mapping[int, int]) -> Departure:
    waiting = graph.tasks[task]
    among = [before for before in graph.dependencies[task] if before in own]
    if waiting.kind in (TaskKind.NORM, *COLLECTIVE_KINDS):  # Each stage sends what it has.
        among = [before for before in among if graph.tasks[before].stage == graph.tasks[dependency].stage]
    tensors = waiting.kind in (TaskKind.COPY, *COLLECTIVE_KINDS) or graph.tasks[dependency].kind is TaskKind.NORM
    return Departure(waiting.lane.device, task, dependency, tensors, len(among))


def _renumbered(
    lists: tuple[tuple[int, ...], ...], whole: tuple[int, ...], number: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Of each task of the part, those of its list that are in the part as well."""
    return tuple([tuple([number[other] for other in lists[task] if other in number]) for task in whole])


def _restricted(rule: Rule, number: Mapping[int, int]) -> Rule:
    """The rule among the tasks of a part. Loads stay those of all devices; nobody asks about the others."""
    by_rank = tuple([number[task] for task in rule.by_rank if task in number])
    ranks = [0] * len(by_rank)
    for rank, task in enumerate(by_rank):
        ranks[task] = rank
    return replace(rule, ranks=tuple(ranks), by_rank=by_rank)
