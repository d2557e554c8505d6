"""Notes of parts: no field is lost when a worker's notes get other numbers or times, or are put together."""

from __future__ import annotations

from dataclasses import fields

from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.core.records.step_notes import DeviceMemory, StepNotes
from asyncpipe.core.records.worker_notes import WorkerNotes, WorkerState

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
        taken={LANE: ((4.0, 0.5),)},
    )
    assert all(getattr(made, field.name) for field in fields(made))
    return made


def test_renumbered_changes_copies_alone() -> None:
    made, after = notes(1), notes(1).renumbered([10, 11])
    assert after.copied == {11: 8}
    assert [f.name for f in fields(made) if getattr(made, f.name) != getattr(after, f.name)] == ["copied"]


def test_shifted_changes_times_alone() -> None:
    made, after = notes(), notes().shifted(1.5)
    assert (after.samples, after.arrived, after.left) == ([(2.5, "cuda:0", 7)], {0: 3.5}, {(0, 5): 4.5})
    assert after.taken == {LANE: ((5.5, 0.5),)}
    changed = {f.name for f in fields(made) if getattr(made, f.name) != getattr(after, f.name)}
    assert changed == {"samples", "arrived", "left", "taken"}


def test_merged_has_all_of_one_and_adds_what_two_have_of_a_device() -> None:
    one = StepNotes.merged({"a": notes()}, WORKERS)
    assert {f.name for f in fields(one) if getattr(one, f.name) != getattr(notes(), f.name)} == set()
    both = StepNotes.merged({"a": notes(0), "b": notes(1)}, WORKERS)
    assert both.memory == {"cuda:0": DeviceMemory(2, 5, 10)}
    assert both.streams == {"cuda:0": 6}
    assert both.samples == [(1.0, "cuda:0", 7), (2.0, "cuda:0", 15)]
    assert (both.copied, both.arrived, both.drew) == ({0: 8, 1: 8}, {0: 2.0, 1: 2.0}, {0, 1})
    assert (both.left, len(both.wakeups), len(both.compilations)) == ({(0, 5): 3.0, (1, 5): 3.0}, 2, 2)
