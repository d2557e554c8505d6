"""OpenTelemetry: one span a step, made of the record and holding none of it."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import Any

import pytest

from asyncpipe.core.engine.events import (
    Journal,
    Outcome,
    StepCompleted,
    StepSubmitted,
    TaskCompleted,
    TaskFailed,
)
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.observe.otel import StepSpans

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk: pip install opentelemetry-sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

MILLISECOND = 1_000_000


class Spans:
    """A tracer provider that keeps its finished spans."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def only(self) -> ReadableSpan:
        (span,) = self.all()
        return span


@pytest.fixture
def spans() -> Spans:
    return Spans()


def graph_of(phase: Phase = Phase.STEP) -> TaskGraph:
    return lower(find_schedule("1f1b"), Shape(3, 4, 3), phase=phase)


def at_present(record: StepRecord, step: int = 5, ago: float = 100.0) -> StepRecord:
    """The simulated step, moved to some seconds ago on the clock of real steps."""
    offset = time.perf_counter() - ago
    journal: list[tuple[float, Any]] = []
    for at, event in record.journal:
        if isinstance(event, TaskCompleted):
            event = TaskCompleted(step, event.task, event.started + offset, event.ended + offset)
        journal.append((at + offset, event))
    return StepRecord(step, record.graph, journal, record.outcome)


def failed(graph: TaskGraph, error: BaseException) -> StepRecord:
    number = graph.find(TaskKind.FORWARD, 0, 0).number
    begin = time.perf_counter()
    journal: Journal = [
        (begin, StepSubmitted(3, graph)),
        (begin + 0.25, TaskFailed(3, number, error)),
        (begin + 0.5, StepCompleted(3, Outcome.FAILED, number, error)),
    ]
    return StepRecord(3, graph, journal, Outcome.FAILED)


def test_a_step_is_a_span_that_tells_what_ran(spans: Spans) -> None:
    record = at_present(simulate(graph_of(), Costs(copy=0.5)))
    StepSpans("toy", spans.tracer).step_completed(record)
    span = spans.only()
    found = report(record)
    assert span.start_time is not None
    assert span.end_time is not None
    assert time.time_ns() - span.start_time == pytest.approx(100e9, abs=10e9)
    assert span.end_time - span.start_time == pytest.approx(found.seconds * 1e9, abs=2)
    assert span.name == "asyncpipe.step"
    assert dict(span.attributes or {}) == {
        "asyncpipe.job": "toy",
        "asyncpipe.step": 5,
        "asyncpipe.phase": "step",
        "asyncpipe.schedule": "1f1b",
        "asyncpipe.stages": 3,
        "asyncpipe.microbatches": 4,
        "asyncpipe.devices": ("dev:0", "dev:1", "dev:2"),
        "asyncpipe.tasks": len(record.graph.tasks),
        "asyncpipe.tasks_completed": len(record.graph.tasks),
        "asyncpipe.outcome": "ok",
        "asyncpipe.bubble_ratio": pytest.approx(found.bubble_ratio),
        "asyncpipe.busiest_device": "dev:0",
        "asyncpipe.busiest_utilization": pytest.approx(found.device_utilization["dev:0"]),
    }
    assert span.status.status_code is StatusCode.UNSET
    assert span.events == ()


def test_a_failed_step_has_the_error_and_its_task_and_a_cancelled_one_none(spans: Spans) -> None:
    graph, now = graph_of(), time.perf_counter()
    observer = StepSpans("toy", spans.tracer)
    observer.step_completed(failed(graph, ValueError("no such layer")))
    journal: Journal = [(now, StepSubmitted(1, graph)), (now, StepCompleted(1, Outcome.CANCELLED))]
    observer.step_completed(StepRecord(1, graph, journal, Outcome.CANCELLED))
    span, cancelled = spans.all()
    attributes = span.attributes or {}
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "ValueError: no such layer"
    assert attributes["asyncpipe.outcome"] == "failed"
    assert attributes["asyncpipe.failed_task"] == "F(0,0)"
    assert attributes["asyncpipe.tasks_completed"] == 0
    assert "asyncpipe.bubble_ratio" not in attributes
    (event,) = span.events
    assert (event.name, (event.attributes or {})["exception.message"]) == ("exception", "no such layer")
    assert (cancelled.attributes or {})["asyncpipe.outcome"] == "cancelled"
    assert cancelled.status.status_code is StatusCode.UNSET


# The host


def test_each_step_is_a_trace_of_its_own_linked_to_the_hosts_span(spans: Spans) -> None:
    with spans.tracer.start_as_current_span("the host's job") as job:
        observer = StepSpans("toy", spans.tracer)
        for step in range(3):
            observer.step_completed(at_present(simulate(graph_of()), step))
    steps = [span for span in spans.all() if span.name == "asyncpipe.step"]
    contexts = [span.get_span_context() for span in steps]
    assert len({context.trace_id for context in contexts if context} | {job.get_span_context().trace_id}) == 4
    assert all(span.parent is None for span in steps)
    assert all([link.context for link in span.links] == [job.get_span_context()] for span in steps)
    assert [(span.attributes or {})["asyncpipe.step"] for span in steps] == [0, 1, 2]


# Missing


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(OptionError, match=r"pip install -e '\.\[otel\]'"):
        StepSpans("toy")


# In a pipeline


def test_a_pipeline_makes_spans(spans: Spans) -> None:
    import torch
    from torch import nn

    import asyncpipe

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    observer = StepSpans("toy", spans.tracer)
    with asyncpipe.Pipeline(
        model, ["cpu:0", "cpu:1"], microbatches=2, loss_fn=nn.functional.mse_loss, observers=[observer]
    ).sync() as pipe:
        before = time.time_ns()
        for _ in range(2):
            pipe.step(torch.randn(4, 4), torch.randn(4, 2))
        after = time.time_ns()
        with pytest.raises(asyncpipe.TaskError):
            pipe.step(torch.randn(4, 5), torch.randn(4, 2))
    first, second, third = spans.all()
    times = [before, first.start_time, first.end_time, second.start_time, second.end_time, after]
    # The two clocks are read one after the other for every span.
    assert all(earlier <= later + MILLISECOND for earlier, later in pairwise(times) if earlier and later)
    assert (second.attributes or {})["asyncpipe.devices"] == ("cpu:0", "cpu:1")
    assert third.status.status_code is StatusCode.ERROR
    assert (third.attributes or {})["asyncpipe.failed_task"] == "F(0,0)"
