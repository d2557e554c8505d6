"""OpenTelemetry: a span for every completed step, for programs that trace their requests and jobs.

Give a ``StepSpans`` to a pipeline as an observer. It uses only OpenTelemetry's API, so the program decides whether and
where spans go; if it has set up nothing, a step costs two calls that do nothing::

    asyncpipe.step  ├──────────────────────────┤   each step is a trace of its own, so that sampling selects single
          │ link                                   steps and no trace grows with the training
          ▼
    the span that was current when the ``StepSpans`` was made

A span is made from the record of a completed step, and has the times at which the step was submitted and done.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from asyncpipe.core.engine.events import Outcome, StepCompleted
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import missing_package

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import Attributes

__all__ = ["StepSpans"]

NAME = "asyncpipe.step"


class StepSpans:
    """An observer that makes a span of every completed step: what ran, how it ended, how busy the devices were.

    ``job`` is the job's name, an attribute of every span. ``tracer`` makes the spans; the default is that of the global
    tracer provider, also if it is set later. Raises ``OptionError`` if OpenTelemetry is not installed.

    Attributes start with ``asyncpipe.``: job, step, phase, schedule, stages, microbatches, devices, tasks, outcome,
    tasks_completed and, if the step succeeded, bubble_ratio, busiest_device and busiest_utilization (from 0 to 1).
    A failed step has the status *error*, failed_task, and an event ``exception`` with its type, message and traceback.
    Nothing of a record is kept: neither its error, whose traceback would hold tensors, nor its graph.
    """

    def __init__(self, job: str, tracer: Tracer | None = None) -> None:
        try:
            from opentelemetry import context, trace
        except ImportError as error:
            raise missing_package("spans need OpenTelemetry's API", "otel") from error
        self.job = job
        self._tracer = tracer if tracer is not None else trace.get_tracer("asyncpipe")
        current = trace.get_current_span().get_span_context()
        self._nothing = context.Context()
        self._links = [trace.Link(current)] if current.is_valid else []

    def step_completed(self, record: StepRecord) -> None:
        """Make the span of ``record``, or none if the step is not sampled; takes about 5 µs a task."""
        if not record.journal:
            return
        to_wall = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            NAME,
            context=self._nothing,
            attributes=_identity(self.job, record),
            links=self._links,
            start_time=to_wall + _nanoseconds(record.journal[0][0]),
        )
        end = record.journal[-1][0]
        if span.is_recording():
            result = report(record)
            _describe(span, record, result)
            end = max(end, result.origin + result.end)
        span.end(end_time=to_wall + _nanoseconds(end))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _identity(job: str, record: StepRecord) -> Attributes:
    """The attributes that are known before the pass over the journal; a sampler may decide by them."""
    graph = record.graph
    return {
        "asyncpipe.job": job,
        "asyncpipe.step": record.step,
        "asyncpipe.phase": graph.phase.value,
        "asyncpipe.schedule": graph.schedule,
        "asyncpipe.stages": graph.shape.stages,
        "asyncpipe.microbatches": graph.shape.microbatches,
        "asyncpipe.devices": graph.devices,
        "asyncpipe.tasks": len(graph.tasks),
        "asyncpipe.outcome": record.outcome.value,
    }


def _describe(span: Span, record: StepRecord, result: Report) -> None:
    """Set the attributes that follow from the journal, and the status."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("asyncpipe.tasks_completed", len(result.tasks))
    if record.outcome is Outcome.OK:
        busiest = max(result.device_utilization, key=result.device_utilization.__getitem__)
        span.set_attribute("asyncpipe.bubble_ratio", result.bubble_ratio)
        span.set_attribute("asyncpipe.busiest_device", busiest)
        span.set_attribute("asyncpipe.busiest_utilization", result.device_utilization[busiest])
    for _, event in record.journal:
        if isinstance(event, StepCompleted) and event.error is not None:
            if event.failed_task is not None:
                span.set_attribute("asyncpipe.failed_task", record.graph.tasks[event.failed_task].id)
            span.record_exception(event.error)
            span.set_status(Status(StatusCode.ERROR, f"{type(event.error).__name__}: {event.error}"))
