"""The collector: the values of its metrics, and how they reach Prometheus."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from urllib.request import urlopen

import pytest
from metric_helpers import failed, lowered, value
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.idle_reasons import IdleReason
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_notes import DeviceMemory, StepNotes
from asyncpipe.core.records.worker_notes import EdgeTraffic, WorkerChange, WorkerNotes, WorkerState, WorkerUse
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics import PipelineCollector, serve_metrics
from asyncpipe.observe.metrics import collector as metrics

ALLOWED_LABELS = {"job", "stage", "device", "worker", "kind", "reason", "src", "dst", "outcome", "le", "version"}


WORKERS = {
    "a": WorkerNotes(WorkerState.UP, 7, ("dev:0",), 0.001, 0.0, WorkerUse(5000, {"b": EdgeTraffic(3, 300, 0.25)})),
    "b": WorkerNotes(WorkerState.UP, 8, ("dev:1", "dev:2"), 0.002, 2.5),
}


# What the families say


def test_a_step_is_counted(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    before = time.time()
    collector.step_completed(simulate(lowered("1f1b", checkpoint="except_last"), Costs(copy=0.5)))
    assert value(registry, "steps_total", outcome="ok") == 1
    assert value(registry, "tasks_total", kind="R", outcome="completed") == 9
    assert value(registry, "tasks_total", kind="C", outcome="completed") == 16
    assert value(registry, "task_duration_seconds_count", stage="1", kind="B") == 4
    assert value(registry, "task_duration_seconds_sum", stage="1", kind="B") == 8
    assert value(registry, "task_duration_seconds_bucket", stage="1", kind="B", le="1.0") == 0
    assert value(registry, "task_duration_seconds_bucket", stage="1", kind="B", le="2.0") == 4
    assert value(registry, "stage_busy_seconds_total", stage="2", device="dev:2") == 4 * 3 + 3
    assert value(registry, "step_duration_seconds_count") == 1
    assert [value(registry, "inflight_microbatches", stage=stage) for stage in "012"] == [3, 2, 1]
    assert before <= (value(registry, "last_step_timestamp_seconds") or 0) <= time.time()
    [build] = [sample for family in registry.collect() if family.name == "asyncpipe_build" for sample in family.samples]
    assert (build.value, build.labels["job"]) == (1, "demo")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", build.labels["version"])


def test_gauges_tell_about_the_last_step(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    for shape in (Shape(3, 4, 3), Shape(2, 6, 2)):
        record = simulate(lowered(shape=shape))
        collector.step_completed(record)
    assert value(registry, "bubble_ratio") == pytest.approx(report(record).bubble_ratio)
    assert [value(registry, "inflight_microbatches", stage=stage) for stage in "012"] == [6, 6, None]
    assert value(registry, "step_duration_seconds_sum") == 18 + 21


def test_a_failed_step_counts_its_tasks_by_outcome(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    collector.step_completed(failed(lowered(), ValueError("no")))
    assert value(registry, "steps_total", outcome="failed") == 1
    assert [value(registry, "tasks_total", kind="F", outcome=o) for o in ("completed", "failed", "dropped")] == [1] * 3
    assert value(registry, "step_duration_seconds_count") is None
    assert value(registry, "bubble_ratio") is None


def test_what_the_training_loop_knows(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    assert value(registry, "loss") is None
    collector.training_step(loss=2.5, samples=32, tokens=4096, duration=0.5)
    collector.training_step(loss=2.25, samples=32, tokens=4096, duration=0.25)
    assert value(registry, "loss") == 2.25
    assert value(registry, "samples_total") == 64
    assert value(registry, "tokens_total") == 8192
    assert value(registry, "training_seconds_total") == 0.75


def test_series_that_alerts_ask_for_begin_at_0(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    assert [value(registry, "observer_failures_total", reason=reason) for reason in metrics.FAILURES] == [0] * 5
    assert [value(registry, "snapshots_total", outcome=outcome) for outcome in ("ok", "failed")] == [0, 0]
    assert value(registry, "steps_total", outcome="ok") is None
    collector.step_completed(simulate(lowered()))
    assert [value(registry, "steps_total", outcome=o) for o in ("ok", "failed", "cancelled")] == [1, 0, 0]
    for kind in "FBC":
        assert [value(registry, "tasks_total", kind=kind, outcome=o) for o in ("failed", "dropped")] == [0, 0]
    assert value(registry, "tasks_total", kind="R", outcome="failed") is None
    for reason in IdleReason:
        assert value(registry, "stage_idle_seconds_total", stage="1", device="dev:1", reason=reason) is not None


def test_snapshots_and_failures_of_observers(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    collector.snapshot_taken(0.75, at=1234.5)
    collector.snapshot_failed()
    collector.observer_failed("trace")
    collector.observer_failed("trace")
    collector.observer_failed("slow")
    assert [value(registry, "snapshots_total", outcome=outcome) for outcome in ("ok", "failed")] == [1, 1]
    assert value(registry, "last_snapshot_timestamp_seconds") == 1234.5
    assert value(registry, "snapshot_duration_seconds_sum") == 0.75
    assert [value(registry, "observer_failures_total", reason=reason) for reason in metrics.FAILURES] == [0, 1, 0, 2, 0]
    with pytest.raises(OptionError, match=r"reason must be one of 'raised', 'slow', .* got 'tired'"):
        collector.observer_failed("tired")


def test_what_a_step_noted_beside_its_journal(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    graph = lowered()
    copies = [task.number for task in graph.tasks if (task.source, task.stage) == (0, 1)]
    notes = StepNotes(
        copied=dict.fromkeys(copies, 1000),
        memory={"cpu": DeviceMemory(10, 20, 30)},
        streams={"cuda:0": 9},
        wakeups=[(0.25, 0.001), (0.5, 0.002)],
    )
    collector.step_completed(replace(simulate(graph), notes=notes))
    assert value(registry, "copy_bytes_total", src="dev:0", dst="dev:1") == 4000
    assert [value(registry, f"memory_{name}_bytes", device="cpu") for name in DeviceMemory._fields] == [10, 20, 30]
    assert value(registry, "streams", device="cuda:0") == 9
    assert value(registry, "scheduler_loop_lag_seconds_sum") == 0.75
    assert value(registry, "scheduler_loop_lag_seconds_bucket", le="0.25") == 1
    assert value(registry, "scheduler_dispatch_seconds_count") == 2
    collector.step_completed(simulate(graph))
    assert value(registry, "memory_peak_bytes", device="cpu") == 20


def test_workers_and_their_edges(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    collector.worker_changed(WorkerChange("a", WorkerState.UP, 7))
    collector.worker_changed(WorkerChange("b", WorkerState.UP, 8))
    for counter in ("worker_losses_total", "worker_restarts_total"):
        assert [value(registry, counter, worker=name) for name in "ab"] == [0, 0]
    record = replace(simulate(lowered()), notes=StepNotes(workers=WORKERS))
    collector.step_completed(record)
    collector.step_completed(record)
    ends = {"src": "a", "dst": "b"}
    for name, wanted in (("messages", 6), ("bytes", 600), ("waiting_seconds", 0.5)):
        assert value(registry, f"edge_{name}_total", **ends) == wanted
    for name, wanted in (("up", 1), ("resident_bytes", 5000), ("round_trip_seconds", 0.001)):
        assert value(registry, f"worker_{name}", worker="a") == wanted
    assert value(registry, "worker_clock_offset_seconds", worker="b") == 2.5
    assert value(registry, "worker_resident_bytes", worker="b") is None
    collector.worker_changed(WorkerChange("b", WorkerState.LOST, 8, how="was killed by SIGKILL"))
    assert [value(registry, "worker_up", worker=name) for name in "ab"] == [1, 0]
    collector.worker_changed(WorkerChange("b", WorkerState.UP, 9, is_restart=True))
    assert [value(registry, "worker_up", worker=name) for name in "ab"] == [1, 1]
    for counter in ("worker_losses_total", "worker_restarts_total"):
        assert [value(registry, counter, worker=name) for name in "ab"] == [0, 1]


def test_the_ideal_bubble_is_that_of_even_stages(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    graph = lowered()
    collector.step_completed(simulate(graph, Costs(forward=5, copy=2)))
    assert value(registry, "ideal_bubble_ratio") == pytest.approx(report(simulate(graph)).bubble_ratio)
    assert value(registry, "bubble_ratio") != pytest.approx(report(simulate(graph)).bubble_ratio)


# How they reach Prometheus


def test_a_scrape_over_http_can_be_parsed(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    collector.step_completed(simulate(lowered("interleaved", Shape(4, 3, 2), "always"), Costs(copy=0.5)))
    collector.step_completed(failed(lowered(), ValueError("no")))
    collector.training_step(1.5, 8, 64, 0.5)
    with serve_metrics(registry, 0) as server:
        assert server.port > 0
        with urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
            text = answer.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families.keys() == {family.name for family in collector.describe()} - {"asyncpipe_build"} | {
        "asyncpipe_build_info"
    }
    assert families["asyncpipe_steps"].type == "counter"
    assert families["asyncpipe_step_duration_seconds"].type == "histogram"
    samples = [sample for family in families.values() for sample in family.samples]
    assert {label for sample in samples for label in sample.labels} <= ALLOWED_LABELS
    assert not any(sample.name.endswith("_created") for sample in samples)
    assert len({(sample.name, *sorted(sample.labels.items())) for sample in samples}) == len(samples)
    idle = [sample.value for sample in families["asyncpipe_stage_idle_seconds"].samples]
    busy = [sample.value for sample in families["asyncpipe_stage_busy_seconds"].samples]
    # The interleaved step on 2 devices, and the failed one, of which 1 s is known, on 3.
    whole = report(simulate(lowered("interleaved", Shape(4, 3, 2), "always"), Costs(copy=0.5))).seconds
    assert sum(idle) + sum(busy) == pytest.approx(2 * whole + 3 * 1.0)
