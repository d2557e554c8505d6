"""Metrics: what they add up to, and how they reach Prometheus."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.request import urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from asyncpipe.core.costs import Costs
from asyncpipe.core.events import (
    Abort,
    Dispatch,
    Outcome,
    StepCompleted,
    StepRecord,
    StepSubmitted,
    TaskCompleted,
    TaskDropped,
    TaskFailed,
)
from asyncpipe.core.graph import TaskGraph
from asyncpipe.core.lower import CheckpointMode, lower
from asyncpipe.core.registry import find_schedule
from asyncpipe.core.report import report
from asyncpipe.core.schedule import Shape
from asyncpipe.core.simulate import simulate
from asyncpipe.core.task import TaskKind
from asyncpipe.errors import OptionError
from asyncpipe.observe import metrics
from asyncpipe.observe.metrics import MergedCollector, PipelineCollector, serve_metrics
from asyncpipe.observe.totals import Histogram, Totals

ALLOWED_LABELS = {"job", "stage", "device", "kind", "reason", "src", "dst", "outcome", "le", "version"}


def lowered(name: str = "gpipe", shape: Shape = Shape(3, 4, 3), checkpoint: str = "never") -> TaskGraph:  # noqa: B008
    return lower(find_schedule(name), shape, checkpoint=CheckpointMode(checkpoint))


def failed(graph: TaskGraph, error: BaseException) -> StepRecord:
    """F(0,0) completed, F(1,0) failed and F(2,0) dropped."""
    first, second, third = (graph.find(TaskKind.FORWARD, i, 0).number for i in range(3))
    journal = [
        (5.0, StepSubmitted(3, graph)),
        *((5.0, Dispatch(3, task)) for task in (first, second, third)),
        (6.0, TaskCompleted(3, first, 5.25, 6.0)),
        (7.0, TaskFailed(3, second, error)),
        (7.0, Abort(3)),
        (7.0, TaskDropped(3, third)),
        (7.0, StepCompleted(3, Outcome.FAILED, second, error)),
    ]
    return StepRecord(3, graph, journal, Outcome.FAILED)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def collector(registry: CollectorRegistry) -> PipelineCollector:
    made = PipelineCollector("demo")
    registry.register(made)
    return made


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"asyncpipe_{name}", {"job": "demo", **labels})


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
    assert registry.get_sample_value("asyncpipe_build_info", {"version": metrics._version()}) == 1


def test_gauges_tell_about_the_last_step(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    for shape in (Shape(3, 4, 3), Shape(2, 6, 2)):
        record = simulate(lowered(shape=shape))
        collector.step_completed(record)
    assert value(registry, "bubble_ratio") == pytest.approx(report(record).bubble_ratio)
    assert [value(registry, "inflight_microbatches", stage=stage) for stage in "012"] == [6, 6, None]
    assert value(registry, "step_duration_seconds_sum") == 18 + 21


def test_the_queue_time_runs_from_dispatch_to_start(registry: CollectorRegistry, collector: PipelineCollector) -> None:
    collector.step_completed(failed(lowered(), ValueError("no")))
    assert value(registry, "task_queue_seconds_count", device="dev:0") == 1
    assert value(registry, "task_queue_seconds_sum", device="dev:0") == 0.25


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


@given(st.one_of(st.floats(0, 64), st.integers(-20, 8).map(lambda exponent: 2.0**exponent)))
def test_a_bucket_holds_what_is_not_above_its_bound(seconds: float) -> None:
    histogram = Histogram(range(-4, 3), [0] * 8)
    histogram.observe(seconds)
    assert [count for _, count in histogram.cumulative()] == [
        int(seconds <= bound) for bound in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, float("inf"))
    ]


# How they are gathered


def test_more_records_than_may_wait_are_folded_before_the_scrape(
    registry: CollectorRegistry, collector: PipelineCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MOST_RECORDS", 3)
    folded: list[int] = []
    fold = metrics._fold
    monkeypatch.setattr(metrics, "_fold", lambda record, at: folded.append(record.step) or fold(record, at))
    graph = lowered()
    for step in range(10):
        collector.step_completed(replace(simulate(graph), step=step))
    assert folded == [0, 1, 2, 3, 4, 5, 6]
    assert value(registry, "steps_total", outcome="ok") == 10
    assert folded == list(range(10))


def test_large_journals_wait_in_smaller_numbers(collector: PipelineCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    record = simulate(lowered())
    monkeypatch.setattr(metrics, "MOST_EVENTS", 2 * len(record.journal))
    for _ in range(5):
        collector.step_completed(record)
    assert len(collector._waiting) == 2


def test_a_failed_step_is_let_go_of_at_once(collector: PipelineCollector) -> None:
    class Loud(Exception):
        pass

    error = Loud()
    gone = weakref.ref(error)
    collector.step_completed(simulate(lowered()))
    collector.step_completed(failed(lowered(), error))
    del error
    gc.collect()
    assert gone() is None


def test_scrapes_and_steps_at_the_same_time_lose_nothing(
    registry: CollectorRegistry, collector: PipelineCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MOST_RECORDS", 2)
    record = simulate(lowered(shape=Shape(1, 1, 1)))

    def repeat(action: Callable[[], object], times: int) -> None:
        for _ in range(times):
            action()

    with ThreadPoolExecutor(3) as pool:
        ran = [pool.submit(repeat, lambda: collector.step_completed(record), 200)]
        ran += [pool.submit(repeat, lambda: generate_latest(registry), 20) for _ in range(2)]
        for future in ran:
            future.result()
    assert value(registry, "steps_total", outcome="ok") == 200
    assert value(registry, "task_duration_seconds_count", stage="0", kind="F") == 200


def test_totals_are_touched_under_the_lock_and_folded_without_it(
    registry: CollectorRegistry, collector: PipelineCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[str, bool]] = set()

    def watch(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: object) -> object:
            if owner is metrics or args[0] is collector._totals:
                seen.add((name, collector._lock.locked()))
            return original(*args)

        monkeypatch.setattr(owner, name, watched)

    for name in ("merge", "copy", "add", "set"):
        watch(Totals, name)
    watch(metrics, "_fold")
    collector.step_completed(simulate(lowered()))
    collector.training_step(1.0, 1, 1, 1.0)
    generate_latest(registry)
    assert seen == {("merge", True), ("copy", True), ("add", True), ("set", True), ("_fold", False)}


def test_several_jobs_share_a_registry_through_a_merged_collector(registry: CollectorRegistry) -> None:
    first, second = PipelineCollector("demo"), PipelineCollector("other")
    merged = MergedCollector([first])
    registry.register(merged)
    merged.add(second)
    second.step_completed(simulate(lowered()))
    first.training_step(1.0, 1, 1, 1.0)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE asyncpipe_loss gauge") == 1
    assert text.count("asyncpipe_build_info{") == 1
    assert registry.get_sample_value("asyncpipe_steps_total", {"job": "other", "outcome": "ok"}) == 1
    with pytest.raises(OptionError, match="job 'demo' already"):
        merged.add(PipelineCollector("demo"))
    merged.remove(second)
    assert registry.get_sample_value("asyncpipe_steps_total", {"job": "other", "outcome": "ok"}) is None
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(PipelineCollector("third"))


def test_the_hot_path_takes_no_lock(collector: PipelineCollector) -> None:
    with collector._lock:
        collector.step_completed(simulate(lowered()))


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


def test_a_port_in_use_is_named(registry: CollectorRegistry) -> None:
    server = serve_metrics(registry, 0)
    with pytest.raises(OptionError, match=f"cannot serve metrics on 127.0.0.1:{server.port}: "):
        serve_metrics(registry, server.port)
    server.close()
    server.close()
    serve_metrics(registry, server.port).close()


def test_observing_needs_no_torch() -> None:
    names = ", ".join(f"asyncpipe.observe.{name}" for name in ("idle", "metrics", "svg", "timeline", "totals", "trace"))
    code = f"import sys, {names}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
