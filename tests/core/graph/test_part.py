"""Parts of a graph: together they are the whole graph, and what one sends is what another waits for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph, random_partition

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.part import BEGINNING, Departure, Part, part
from asyncpipe.core.graph.programs import programs
from asyncpipe.core.graph.task_graph import Phase, TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import DeviceError


def cut(graph: TaskGraph, draw: random.Random) -> list[Part]:
    return [part(graph, devices) for devices in random_partition(graph.devices, draw)]


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_parts_together_are_the_whole_graph(draw: random.Random) -> None:
    graph = random_graph(draw, most_devices=5, ruled=0.4)
    parts = cut(graph, draw)
    assert sorted(number for each in parts for number in each.whole) == list(range(len(graph.tasks)))
    for each in parts:
        own, whole = each.graph, each.whole
        ordered = [(graph.placement[graph.tasks[number].stage], number) for number in whole]
        assert ordered == sorted(ordered), "one device after the other, each in its order"
        assert [task._replace(number=whole[task.number]) for task in own.tasks] == [graph.tasks[n] for n in whole]
        assert [own.lanes[lane] for lane in own.lane_of] == [task.lane for task in own.tasks]
        assert {lane.device for lane in own.lanes}.isdisjoint(
            lane.device for other in parts if other is not each for lane in other.graph.lanes
        )
        crossing = {task: [before for waiting, before in each.arrivals if waiting == task] for task in whole}
        for task, before in enumerate(own.dependencies):
            real = [other for other in crossing[whole[task]] if other != BEGINNING]
            assert sorted([whole[other] for other in before] + real) == sorted(graph.dependencies[whole[task]])
        for task in range(len(own.tasks)):
            after = [whole[other] for other in (*own.local_dependents[task], *own.remote_dependents[task])]
            sent = [departure.task for departure in each.departures[task]]
            expected = (*graph.local_dependents[whole[task]], *graph.remote_dependents[whole[task]])
            assert sorted(after + sent) == sorted(expected)
        if graph.rule is not None:
            assert own.rule is not None
            assert [own.rule.ranks[task] for task in own.rule.by_rank] == list(range(len(whole)))
            by_rank = [number for number in graph.rule.by_rank if number in set(whole)]
            assert [whole[task] for task in own.rule.by_rank] == by_rank


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_what_one_part_sends_another_waits_for(draw: random.Random) -> None:
    graph = random_graph(draw, most_devices=5, ruled=0.4)
    parts = cut(graph, draw)
    home = {number: each for each in parts for number in each.whole}
    callers = 0
    for each in parts:
        mine = [gated for gated in graph.gates if home[gated] is each]
        assert [each.whole[gated] for gated in each.graph.gates[: len(mine)]] == mine, "the caller's gates come first"
        callers += len(mine)
        assert sorted(each.arrivals.values()) == list(range(len(mine), len(each.graph.gates)))
        assert all(each.whole[each.graph.gates[gate]] == task for (task, _), gate in each.arrivals.items())
    assert callers == len(graph.gates)
    sent = [departure for each in parts for found in (each.at_start, *each.departures) for departure in found]
    expected = [arrival for each in parts for arrival in each.arrivals]
    assert sorted((departure.task, departure.dependency) for departure in sent) == sorted(expected)
    for departure in sent:
        task = graph.tasks[departure.task]
        assert departure.device == task.lane.device
        assert departure.tensors == (task.kind is TaskKind.COPY)
        if departure.tensors:
            same = sum(other.task == departure.task for other in sent)
            assert departure.among == same, "all that a copy reads comes from one part"
    assert graph.rule is not None or all(departure.tensors and departure.among == 1 for departure in sent)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_devices_run_the_programs_of_the_whole_graph(draw: random.Random) -> None:
    graph = random_graph(draw, most_devices=5, ruled=0.0)
    whole = {program.device: program for program in programs(graph).programs}
    for each in cut(graph, draw):
        made = programs(each.graph)
        assert [made.programs[p].tasks[k] for p, k in made.gates] == list(each.graph.gates)
        beginnings = [task for task, before in each.arrivals if before == BEGINNING]
        for program in made.programs:
            expected = whole.pop(program.device)
            assert [each.whole[task] for task in program.tasks] == list(expected.tasks)
            extra = [beginnings.count(each.whole[task]) for task in program.tasks]
            awaits = [count - more for count, more in zip(program.awaits, extra, strict=True)]
            assert awaits == list(expected.awaits), "a message counts as a task of another device does"
    assert not whole


# Written out


def two(**options: object) -> TaskGraph:
    arguments = {"wiring": Wiring(((0, 1),)), "checkpoint": CheckpointMode.NEVER, "phase": Phase.STEP} | options
    return lower(find_schedule("gpipe"), Shape(2, 1, 2), **arguments)  # type: ignore[arg-type]


def test_tied_parameters_leave_when_the_step_begins() -> None:
    graph = two(wiring=Wiring(((0, 1),), ((0, 1),), (0, 1)))
    owner, user = part(graph, ["dev:0"]), part(graph, ["dev:1"])
    (copy,) = (task.number for task in graph.tasks if task.id == "C(0>1)")
    assert owner.at_start == (Departure("dev:1", copy, BEGINNING, tensors=True),)
    assert (copy, BEGINNING) in user.arrivals
    assert user.at_start == ()


def test_under_a_rule_the_last_of_several_messages_brings_the_gradient_of_tied_parameters() -> None:
    schedule = find_schedule("1f1b", order="hint")
    wiring = Wiring(((0, 1),), ((0, 1),))
    graph = lower(schedule, Shape(2, 3, 2), checkpoint=CheckpointMode.ALWAYS, wiring=wiring)
    user = part(graph, ["dev:1"])
    (copy,) = (task.number for task in graph.tasks if task.id == "C(1>0)")
    last = [departure for sent in user.departures for departure in sent if departure.task == copy]
    assert [graph.tasks[departure.dependency].id for departure in last] == ["B(0,1)", "B(1,1)", "B(2,1)"]
    assert {(departure.tensors, departure.among) for departure in last} == {(True, 3)}
    order = [departure for sent in user.departures for departure in sent if not departure.tensors]
    assert {graph.tasks[departure.task].kind for departure in order} == {TaskKind.RECOMPUTE}


def test_a_device_that_is_not_the_steps_is_refused() -> None:
    with pytest.raises(DeviceError, match="the step has no device 'cpu:7'; its devices are dev:0, dev:1"):
        part(two(), ["dev:0", "cpu:7"])
