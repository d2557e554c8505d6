"""The collector's queue: steps wait for a scrape, are folded in stacks by any thread, and add up in the totals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_helpers import failed, lowered, value
from prometheus_client import CollectorRegistry, generate_latest

from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics import MergedCollector, PipelineCollector
from asyncpipe.observe.metrics import collector as metrics
from asyncpipe.observe.metrics.totals import bucket_of


def watched_folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps of each fold so far."""
    folded: list[int] = []
    fold = metrics.fold
    monkeypatch.setattr(
        metrics, "fold", lambda totals, steps, arrays: folded.append(len(steps)) or fold(totals, steps, arrays)
    )
    return folded


def test_steps_wait_for_the_scrape_which_folds_them_in_stacks(
    registry: CollectorRegistry, collector: PipelineCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded, record = watched_folds(monkeypatch), simulate(lowered())
    monkeypatch.setattr(metrics, "STACK", 4 * len(record.graph.tasks))
    for _ in range(10):
        collector.step_completed(record)
    assert folded == []
    assert value(registry, "steps_total", outcome="ok") == 10
    assert folded == [4, 4, 2]


@pytest.mark.parametrize("limit", ["MOST_STEPS", "MOST_TASKS"])
def test_more_steps_than_may_wait_are_folded_before_the_scrape(
    registry: CollectorRegistry, collector: PipelineCollector, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    folded, record = watched_folds(monkeypatch), simulate(lowered())
    tasks = len(record.graph.tasks)
    monkeypatch.setattr(metrics, limit, 5 if limit == "MOST_STEPS" else 5 * tasks)
    monkeypatch.setattr(metrics, "STACK", 3 * tasks)
    for number in range(1, 11):
        collector.step_completed(record)
        assert number - sum(folded) <= 5
    assert folded == [3, 3]
    assert value(registry, "steps_total", outcome="ok") == 10


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


def test_what_is_known_of_a_graph_goes_with_it(collector: PipelineCollector) -> None:
    graph = lowered()
    gone = weakref.ref(graph)
    collector.step_completed(simulate(graph))
    assert collector.snapshot().gauges["ideal_bubble_ratio"][()] == pytest.approx(1 / 3)
    collector.step_completed(simulate(lowered(shape=Shape(1, 1, 1))))
    collector.snapshot()
    del graph
    gc.collect()
    assert gone() is None


def test_what_one_collector_drains_and_another_merges_is_what_one_alone_counts() -> None:
    """As in a job's process, which sends its totals again and again, and in its service."""
    far, here, alone = (PipelineCollector(name) for name in ("far", "here", "alone"))
    for number in range(3):
        for collector in (far, alone):
            collector.step_completed(simulate(lowered()))
            collector.training_step(1.0 / (number + 1), 2, 3, 0.5)
        here.merge(far.drain())
    merged, wanted = here.snapshot(), alone.snapshot()
    assert merged.counters["tasks"] == wanted.counters["tasks"]
    assert merged.counters["stage_idle_seconds"] == pytest.approx(wanted.counters["stage_idle_seconds"])
    for name in ("bubble_ratio", "ready_tasks", "inflight_microbatches", "loss"):
        assert merged.gauges[name] == wanted.gauges[name]
    whole, counted = (found.histograms["step_duration_seconds"][()] for found in (wanted, merged))
    assert counted.counts.tolist() == whole.counts.tolist()


def test_scrapes_and_steps_at_the_same_time_lose_nothing(
    registry: CollectorRegistry, collector: PipelineCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MOST_STEPS", 2)
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


def test_several_jobs_share_a_registry_through_a_merged_collector(registry: CollectorRegistry) -> None:
    first, second = PipelineCollector("demo"), PipelineCollector("other")
    merged = MergedCollector([first])
    registry.register(merged)
    merged.add(second)
    second.step_completed(simulate(lowered()))
    first.training_step(1.0, 1, 1, 1.0)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE asyncpipe_loss gauge") == 1
    assert text.count("asyncpipe_build_info{") == 2
    assert registry.get_sample_value("asyncpipe_steps_total", {"job": "other", "outcome": "ok"}) == 1
    with pytest.raises(OptionError, match="job 'demo' already"):
        merged.add(PipelineCollector("demo"))
    merged.remove(second)
    assert registry.get_sample_value("asyncpipe_steps_total", {"job": "other", "outcome": "ok"}) is None
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(PipelineCollector("third"))


def test_gauges_are_those_of_the_newest_step_though_steps_of_one_graph_are_folded_together(
    registry: CollectorRegistry, collector: PipelineCollector
) -> None:
    one, two = lowered(shape=Shape(1, 2, 1)), lowered(shape=Shape(2, 2, 2))
    for graph in (two, one, two, one):
        collector.step_completed(simulate(graph))
    assert value(registry, "ready_tasks", device="dev:0") is not None
    assert value(registry, "ready_tasks", device="dev:1") is None
    assert value(registry, "inflight_microbatches", stage="1") is None


@given(st.one_of(st.floats(0, 64), st.integers(-20, 8).map(lambda exponent: 2.0**exponent)))
def test_a_bucket_holds_what_is_not_above_its_bound(seconds: float) -> None:
    bounds = [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, inf]
    (bucket,) = bucket_of(np.array([seconds]), range(-4, 3))
    assert bucket == next(number for number, bound in enumerate(bounds) if seconds <= bound)
