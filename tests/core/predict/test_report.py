"""Reports: hand-made journals, so that each number can be told from a drawing."""

from __future__ import annotations

import pytest

from asyncpipe.core.engine.events import (
    Command,
    Dispatch,
    Event,
    Outcome,
    StepCompleted,
    StepFinished,
    StepSubmitted,
    TaskCompleted,
    TaskFailed,
)
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.report import report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule

ORIGIN = 100.0


def record(graph: TaskGraph, ran: dict[str, tuple[float, float]], outcome: Outcome = Outcome.OK) -> StepRecord:
    """A step that was submitted at ``ORIGIN`` and whose tasks ran at these times after that."""
    numbers = {task.id: task.number for task in graph.tasks}
    journal: list[tuple[float, Event | Command]] = [(ORIGIN, StepSubmitted(3, graph))]
    for name, (start, end) in sorted(ran.items(), key=lambda item: item[1][1]):
        journal.append((ORIGIN + start, Dispatch(3, numbers[name])))
        journal.append((ORIGIN + end, TaskCompleted(3, numbers[name], ORIGIN + start, ORIGIN + end)))
    journal.append((ORIGIN + 1000, StepFinished(3, outcome)))
    journal.append((ORIGIN + 1000, StepCompleted(3, outcome)))
    return StepRecord(3, graph, journal, outcome)


PIPE = lower(find_schedule("gpipe"), Shape(2, 2, 2))
#            0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15
# dev:0      ·  F0F0 F1F1F1F1           ·    ·    ·    ·    B1B1B1B1  ·   B0B0B0B0
# dev:1      ·    ·    F0F0   F1F1 B1B1B1B1 B0B0B0B0B0B0
PIPE_TIMES = {
    "F(0,0)": (1.0, 2.0),
    "C(0,0>1)": (2.0, 2.5),
    "F(1,0)": (2.0, 4.0),
    "F(0,1)": (2.5, 3.5),
    "C(1,0>1)": (4.0, 4.5),
    "F(1,1)": (4.5, 5.5),
    "B(1,1)": (5.5, 7.5),
    "C(1,1>0)": (7.5, 8.0),
    "B(0,1)": (7.5, 10.5),
    "B(1,0)": (8.0, 10.0),
    "C(0,1>0)": (10.5, 11.0),
    "B(0,0)": (11.0, 13.0),
}


def test_the_numbers_of_a_step() -> None:
    found = report(record(PIPE, PIPE_TIMES))
    assert found.step == 3
    assert found.seconds == 13.0
    assert found.device_busy == {"dev:0": 1 + 2 + 2 + 2, "dev:1": 1 + 1 + 2 + 3}
    assert found.stage_busy == (7.0, 7.0)
    assert found.device_utilization == {"dev:0": 7 / 13, "dev:1": 7 / 13}
    assert found.stage_utilization == (7 / 13, 7 / 13)
    assert found.bubble_ratio == pytest.approx(1 - 7 / 13)
    assert found.peak_in_flight == (2, 2)


def test_a_failed_step_reports_what_completed() -> None:
    graph = lower(find_schedule("gpipe"), Shape(1, 2, 1))
    base = record(graph, {"F(0,0)": (0.0, 2.0)}, Outcome.FAILED)
    failed = graph.find(*graph.tasks[1][1:4]).number
    journal = [*base.journal[:-2], (ORIGIN + 5.0, TaskFailed(3, failed, RuntimeError())), *base.journal[-2:]]
    found = report(StepRecord(3, graph, journal, Outcome.FAILED))
    assert (found.seconds, found.device_busy, found.peak_in_flight) == (2.0, {"dev:0": 2.0}, (1,))


def test_a_step_in_which_nothing_ran() -> None:
    found = report(record(PIPE, {}, Outcome.CANCELLED))
    assert (found.seconds, found.tasks, found.bound) == (0.0, (), 0.0)
    assert found.device_utilization == {"dev:0": 0.0, "dev:1": 0.0}
    assert found.bubble_ratio == 0.0
