"""The record of a step that several workers ran: what each of them told, in one order in which it can have happened."""

from __future__ import annotations

import random
from dataclasses import fields

from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph, random_partition

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepSubmitted, TaskCompleted, TaskDropped, TaskFailed
from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.core.records.parts_record import TaskEvent, WorkerPart, parts_record
from asyncpipe.core.records.step_notes import DeviceMemory, StepNotes, StepSize
from asyncpipe.core.records.worker_notes import WorkerNotes, WorkerState

Told = list[tuple[float, TaskEvent]]


def told(draw: random.Random) -> tuple[TaskGraph, Told]:
    """A graph, and what became of its tasks, by a simulation."""
    graph = random_graph(draw, most_devices=5, ruled=0.4)
    while graph.gates:
        graph = random_graph(draw, most_devices=5, ruled=0.4)
    record = simulate(graph, lambda task: draw.choice([0.0, 1.0, 2.5]))
    return graph, [(at, event) for at, event in record.journal if isinstance(event, TaskCompleted)]


def parts_of(graph: TaskGraph, events: Told, draw: random.Random) -> list[WorkerPart]:
    """The events by worker. Those of one moment may be told in any order of the workers."""
    parts = []
    for devices in random_partition(graph.devices, draw):
        own = frozenset(task.number for task in graph.tasks if task.lane.device in devices)
        parts.append(WorkerPart(own, [(at, event) for at, event in events if event.task in own]))
    draw.shuffle(parts)
    return parts


@settings(max_examples=50)
@given(st.randoms(use_true_random=False))
def test_the_record_has_all_that_happened(draw: random.Random) -> None:
    graph, events = told(draw)
    record = parts_record(0, graph, Share(), 0.0, parts_of(graph, events, draw), 1e6, after=7)
    assert record.outcome is Outcome.OK
    assert [event.after for _, event in record.journal if isinstance(event, StepSubmitted)] == [7]
    happened = [event for _, event in record.journal if isinstance(event, TaskCompleted)]
    assert sorted(happened, key=lambda event: event.task) == sorted(
        (event for _, event in events), key=lambda event: event.task
    )
    times = [at for at, _ in record.journal]
    assert times == sorted(times)


@settings(max_examples=50)
@given(st.randoms(use_true_random=False))
def test_a_failure_ends_the_record_after_what_others_have_done_meanwhile(draw: random.Random) -> None:
    graph, events = told(draw)
    at, failing = draw.choice(events)
    after = {failing.task}
    for task in graph.tasks:
        if after.intersection(graph.dependencies[task.number]):
            after.add(task.number)
    kept = [(when, event) for when, event in events if event.task not in after]
    kept.append((at, TaskFailed(0, failing.task, ValueError())))
    record = parts_record(0, graph, Share(), 0.0, parts_of(graph, kept, draw), 1e6)
    assert record.outcome is Outcome.FAILED
    ends = (TaskCompleted, TaskFailed, TaskDropped)
    assert {event.task for _, event in record.journal if isinstance(event, ends)} >= {event.task for _, event in kept}


@settings(max_examples=50)
@given(st.randoms(use_true_random=False))
def test_what_a_task_has_sent_before_it_failed_is_left_out(draw: random.Random) -> None:
    graph, events = told(draw)
    at, failing = draw.choice(events)
    kept = [each for each in events if each[1] is not failing]
    kept.append((at, TaskFailed(0, failing.task, ValueError())))
    record = parts_record(0, graph, Share(), 0.0, parts_of(graph, kept, draw), 1e6)
    assert record.outcome is Outcome.FAILED
    done = {event.task for _, event in record.journal if isinstance(event, TaskCompleted)}
    assert all(done.issuperset(graph.dependencies[task]) for task in done)


@settings(max_examples=50)
@given(st.randoms(use_true_random=False))
def test_what_a_lost_worker_did_not_tell_leaves_a_cancelled_step(draw: random.Random) -> None:
    graph, events = told(draw)
    lost = {event.task for _, event in draw.sample(events, draw.randint(1, len(events)))}
    kept = [(when, event) for when, event in events if event.task not in lost]
    record = parts_record(0, graph, Share(), 0.0, parts_of(graph, kept, draw), 1e6)
    assert record.outcome is Outcome.CANCELLED
    error = ValueError()
    failed = parts_record(0, graph, Share(), 0.0, parts_of(graph, kept, draw), 1e6, error)
    assert failed.outcome is Outcome.FAILED
    (end,) = [event for _, event in failed.journal if isinstance(event, StepCompleted)]
    assert (end.outcome, end.failed_task, end.error) == (Outcome.FAILED, None, error)
    for _, event in record.journal:
        if isinstance(event, TaskCompleted):
            assert lost.isdisjoint(graph.dependencies[event.task])


# Notes of parts: no field is lost when they get other numbers or times, or are put together.

LANE = Lane("cpu:0", Queue.COMPUTE)
WORKERS = {"a": WorkerNotes(WorkerState.UP, 1, ("cpu:0",), 0.0, 0.0)}


def notes(number: int = 0) -> StepNotes:
    """Something in every field, which is another thing for another number."""
    made = StepNotes(
        copied={number: 8},
        memory={"cuda:0": DeviceMemory(1, 2 + number, 10)},
        streams={"cuda:0": 3},
        samples=[(1.0 + number, "cuda:0", 7 + number)],
        wakeups=[(0.5, 0.25)],
        arrived={number: 2.0},
        left={(number, 5): 3.0},
        workers=WORKERS,
        drew={number},
        compilations=[Compilation(number, "inductor", "training", 1, 1, (), "", 2.0)],
        size=StepSize(4, 40, 1e9, 1e12),
        gradient_norm=0.5,
        why_workers="measured",
        taken={LANE: ((4.0, 0.5),)},
    )
    assert all(getattr(made, field.name) for field in fields(made))
    return made


def test_renumbered_changes_what_is_of_single_tasks_alone() -> None:
    made, after = notes(1), notes(1).renumbered([10, 11])
    assert (after.copied, after.arrived) == ({11: 8}, {11: 2.0})
    assert [f.name for f in fields(made) if getattr(made, f.name) != getattr(after, f.name)] == ["copied", "arrived"]


def test_shifted_changes_times_alone() -> None:
    made, after = notes(), notes().shifted(1.5)
    assert (after.samples, after.arrived, after.left) == ([(2.5, "cuda:0", 7)], {0: 3.5}, {(0, 5): 4.5})
    assert after.taken == {LANE: ((5.5, 0.5),)}
    changed = {f.name for f in fields(made) if getattr(made, f.name) != getattr(after, f.name)}
    assert changed == {"samples", "arrived", "left", "taken"}


def test_merged_has_all_of_one_and_adds_what_two_have_of_a_device() -> None:
    one = StepNotes.merged({"a": notes()}, WORKERS, notes().size, "measured")
    assert {f.name for f in fields(one) if getattr(one, f.name) != getattr(notes(), f.name)} == {"gradient_norm"}
    both = StepNotes.merged({"a": notes(0), "b": notes(1)}, WORKERS)
    assert both.memory == {"cuda:0": DeviceMemory(2, 5, 10)}
    assert both.streams == {"cuda:0": 6}
    assert both.samples == [(1.0, "cuda:0", 7), (2.0, "cuda:0", 15)]
    assert (both.copied, both.arrived, both.drew) == ({0: 8, 1: 8}, {0: 2.0, 1: 2.0}, {0, 1})
    assert (both.left, len(both.wakeups), len(both.compilations)) == ({(0, 5): 3.0, (1, 5): 3.0}, 2, 2)
