"""The training loop: right numbers, prompt ends, and whom it tells what."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from threading import Event, current_thread
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from resume_helpers import batches, make_job
from torch import Generator, Tensor, nn

from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.errors import JobFileError, TaskError
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.train.adamw import BETAS, learning_rate
from asyncpipe.train.job_file import TrainingTable
from asyncpipe.train.progress import ProgressSink, RunStarted, StepProgress
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Workload

pytestmark = pytest.mark.usefixtures("no_leaks")


def make_workload() -> Workload:
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).double()
    return Workload(model, nn.functional.mse_loss, batches, tokens_per_sample=5)


class Sink(ProgressSink):
    """Keeps what it is told; ``on_step`` runs at every step."""

    def __init__(self, on_step: Callable[[], object] = lambda: None) -> None:
        self.runs: list[RunStarted] = []
        self.steps: list[StepProgress] = []
        self.phases: list[str] = []
        self._on_step = on_step

    def started(self, run: RunStarted) -> None:
        self.runs.append(run)

    def stepped(self, progress: StepProgress) -> None:
        self.steps.append(progress)
        self._on_step()

    def entered(self, phase: str) -> None:
        self.phases.append(phase)


class Watcher:
    """An observer and a listener that keeps what it is shown and told."""

    def __init__(self, on_record: Callable[[int], object] = lambda count: None) -> None:
        self.records: list[StepRecord] = []
        self.losses: list[float] = []
        self._on_record = on_record

    def step_completed(self, record: StepRecord) -> None:
        self.records.append(record)
        self._on_record(len(self.records))

    def training_step(self, loss: float, samples: int, tokens: int, duration: float) -> None:
        self.losses.append(loss)


def counted(collector: PipelineCollector, name: str, **labels: str) -> float:
    """The value of one series, as Prometheus would have it."""
    return sum(
        sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def unsplit_losses(training: TrainingTable) -> list[float]:
    """What the same loop gives without a pipeline."""
    torch.manual_seed(training.seed)
    workload = make_workload()
    parameters = list(workload.model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS)
    data = workload.batches(training.batch_size, Generator().manual_seed(training.seed))
    losses = []
    for step in range(training.steps):
        x, target = next(data)
        loss = workload.loss_fn(workload.model(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, training.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


async def test_losses_are_those_of_the_unsplit_model():
    sink, job = Sink(), make_job(training={"warmup_steps": 2})
    summary = await TrainingRun(job, make_workload, progress=sink).run()
    wanted = unsplit_losses(job.training)
    assert [progress.loss for progress in sink.steps] == pytest.approx(wanted, rel=1e-12)
    assert summary.loss == pytest.approx(sum(wanted) / len(wanted))
    assert (summary.steps, summary.stopped) == (6, False)
    assert (summary.evaluation, summary.sample, summary.trace, summary.timeline) == (None, None, None, None)


async def test_the_sink_the_collector_and_observers_are_told_of_every_step():
    class Silent:
        count = 0

        def step_completed(self, record: StepRecord) -> None:
            self.count += 1

    sink, collector, watcher, silent = Sink(), PipelineCollector("linear"), Watcher(), Silent()
    await TrainingRun(make_job(), make_workload, progress=sink, collector=collector, observers=[watcher, silent]).run()
    assert [record.step for record in watcher.records] == list(range(6))
    assert watcher.losses == [progress.loss for progress in sink.steps]
    assert silent.count == 6
    assert sink.runs == [RunStarted("linear", 6, 3 * 16 + 16 + 2 * 16 + 16 * 3 + 3, ("cpu:0", "cpu:1"))]
    assert [(p.step, p.steps, p.samples, p.tokens) for p in sink.steps] == [(n, 6, 8, 40) for n in range(1, 7)]
    assert all(0 <= p.report.bubble_ratio < 1 and len(p.report.stage_utilization) == 2 for p in sink.steps)
    assert sink.steps[-1].remaining_seconds == 0
    assert counted(collector, "asyncpipe_steps_total") == counted(collector, "asyncpipe_steps_total", outcome="ok") == 6
    assert counted(collector, "asyncpipe_tokens_total") == 240
    assert counted(collector, "asyncpipe_loss") == sink.steps[-1].loss


async def test_an_observer_that_raises_is_left_out_logged_and_counted(caplog):
    def fail(count: int) -> None:
        if count == 2:
            raise ZeroDivisionError("observed")

    watcher, collector = Watcher(fail), PipelineCollector("linear")
    summary = await TrainingRun(make_job(), make_workload, collector=collector, observers=[watcher]).run()
    assert summary.steps == 6
    assert len(watcher.records) == 2
    assert counted(collector, "asyncpipe_observer_failures_total", reason="raised") == 1
    assert counted(collector, "asyncpipe_steps_total", outcome="ok") == 6
    assert len(caplog.records) == 1
    assert "ZeroDivisionError: observed" in caplog.text
    caplog.clear()  # The traceback's frames hold the run.


async def test_an_observer_that_blocks_for_a_second_is_put_aside_logged_and_counted(caplog):
    threads: list[str] = []

    def block(count: int) -> None:
        threads.append(current_thread().name)
        if count == 2:
            Event().wait(1)

    watcher, collector = Watcher(block), PipelineCollector("linear")
    summary = await TrainingRun(make_job(), make_workload, collector=collector, observers=[watcher]).run()
    assert summary.steps == 6
    assert [record.step for record in watcher.records] == list(range(6))
    assert len(set(threads[:2])) == len(set(threads[2:])) == 1
    assert threads[1] != threads[2]
    assert counted(collector, "asyncpipe_observer_failures_total", reason="slow") == 1
    assert counted(collector, "asyncpipe_observer_failures_total") == 1
    assert len(caplog.records) == 1


async def test_a_listener_that_raises_is_told_no_more_and_counted(caplog):
    class Failing(Watcher):
        def training_step(self, loss: float, samples: int, tokens: int, duration: float) -> None:
            super().training_step(loss, samples, tokens, duration)
            raise ZeroDivisionError("told")

    failing, watcher, collector = Failing(), Watcher(), PipelineCollector("linear")
    summary = await TrainingRun(make_job(), make_workload, collector=collector, observers=[failing, watcher]).run()
    assert summary.steps == 6
    assert (len(failing.losses), len(failing.records), len(watcher.losses)) == (1, 6, 6)
    assert counted(collector, "asyncpipe_observer_failures_total", reason="raised") == 1
    assert len(caplog.records) == 1
    caplog.clear()  # The traceback's frames hold the run.


async def test_a_trace_that_cannot_be_written_does_not_hide_why_a_run_failed(tmp_path, caplog):
    observe = {"trace": str(tmp_path / "below" / "t.json")}

    def on_step() -> None:
        (tmp_path / "below").rmdir()
        raise ArithmeticError("shown")

    collector = PipelineCollector("linear")
    with pytest.raises(ArithmeticError, match="shown"):
        await TrainingRun(make_job(observe=observe), make_workload, progress=Sink(on_step), collector=collector).run()
    assert counted(collector, "asyncpipe_observer_failures_total", reason="trace") == 1
    assert len(caplog.records) == 1


async def test_snapshots_are_counted(tmp_path):
    collector = PipelineCollector("linear")
    job = make_job(snapshots={"folder": str(tmp_path), "every": 6})
    summary = await TrainingRun(job, make_workload, collector=collector).run()
    assert summary.snapshot == tmp_path / "step-6"
    assert counted(collector, "asyncpipe_snapshots_total", outcome="ok") == 1
    assert counted(collector, "asyncpipe_snapshot_duration_seconds_count") == 1
    assert counted(collector, "asyncpipe_last_snapshot_timestamp_seconds") > 1.7e9


async def test_a_job_may_ask_for_spans_and_ranges_and_a_trace_samples_memory(tmp_path, monkeypatch):
    spans: list[Watcher] = []
    options: dict[str, Any] = {}

    class Spans(Watcher):
        def __init__(self, job: str) -> None:
            super().__init__()
            assert job == "linear"
            spans.append(self)

    class Noted(Pipeline):
        def __init__(self, *arguments: Any, **given: Any) -> None:
            options.update(given)
            super().__init__(*arguments, **(given | {"nvtx": False}))

    monkeypatch.setattr("asyncpipe.observe.otel.StepSpans", Spans)
    monkeypatch.setattr("asyncpipe.train.training_run.Pipeline", Noted)
    await TrainingRun(make_job(), make_workload).run()
    assert (spans, options["nvtx"], options["sample_memory"]) == ([], False, False)
    observe = {"opentelemetry": True, "nvtx": True, "trace": str(tmp_path / "t.json")}
    await TrainingRun(make_job(observe=observe), make_workload).run()
    assert [len(watcher.records) for watcher in spans] == [6]
    assert (options["nvtx"], options["sample_memory"]) == (True, True)


async def test_evaluation_and_sample_go_through_the_pipeline_and_change_nothing():
    seen: list[tuple[bool, Tensor]] = []

    async def sample(forward: Callable[[Tensor], Any]) -> str:
        output = await forward(torch.ones(1, 3, dtype=torch.float64))
        seen.append((output.requires_grad, output))
        return "spoken"

    built: list[Workload] = []

    def make() -> Workload:
        held_out = [next(batches(size, Generator().manual_seed(size))) for size in (8, 3)]
        built.append(replace(make_workload(), held_out=lambda _: held_out, sample=sample))
        return built[0]

    sink, collector = Sink(), PipelineCollector("linear")
    summary = await TrainingRun(make_job(), make, progress=sink, collector=collector).run()
    model = built[0].model
    held_out = built[0].held_out(8)
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(x), target, reduction="sum") for x, target in held_out]
    assert summary.evaluation == pytest.approx(sum(losses).item() / (11 * 3))
    assert summary.sample == "spoken"
    assert sink.phases == ["evaluating", "sampling"]
    assert torch.equal(seen[0][1], model(torch.ones(1, 3, dtype=torch.float64)))
    assert not seen[0][0]
    assert not model.training
    assert counted(collector, "asyncpipe_steps_total") == 6


async def test_stop_ends_between_steps_and_writes_the_trace(tmp_path):
    sink = Sink(lambda: run.orders.stop() if len(sink.steps) == 2 else None)
    observe = {"trace": str(tmp_path / "a" / "t.json"), "timeline": str(tmp_path / "b" / "t.svg"), "trace_steps": 1}
    run = TrainingRun(make_job(observe=observe), make_workload, progress=sink)
    summary = await run.run()
    assert (summary.steps, summary.stopped) == (2, True)
    assert sink.phases == []
    assert_trace(summary.trace, steps={1})
    assert ElementTree.parse(summary.timeline).getroot().tag.endswith("svg")


async def test_stop_ends_a_sampler_and_an_evaluation():
    async def sample(forward: Callable[[Tensor], Any]) -> str:
        run.orders.stop()
        await forward(torch.ones(1, 3, dtype=torch.float64))
        raise AssertionError("the run was stopped")

    run = TrainingRun(make_job(), lambda: replace(make_workload(), sample=sample))
    summary = await run.run()
    assert (summary.sample, summary.stopped) == (None, True)


async def test_cancellation_closes_the_pipeline_and_writes_the_trace(tmp_path):
    sink = Sink(lambda: running.cancel() if len(sink.steps) == 2 else None)
    observe = {"trace": str(tmp_path / "t.json")}
    running = asyncio.ensure_future(TrainingRun(make_job(observe=observe), make_workload, progress=sink).run())
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(sink.steps) == 2
    assert_trace(tmp_path / "t.json", steps={0, 1})


async def test_a_task_that_fails_ends_the_run_and_the_trace_shows_it(tmp_path):
    class Faulty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("out of numbers")

    def make() -> Workload:
        return replace(make_workload(), model=nn.Sequential(nn.Linear(3, 3).double(), Faulty()))

    observe = {"trace": str(tmp_path / "t.json")}
    with pytest.raises(TaskError, match="out of numbers"):
        await TrainingRun(make_job(observe=observe), make).run()
    names = [event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]]
    assert "F(0,1) failed: ArithmeticError" in names


async def test_a_job_that_does_not_fit_its_workload_is_told_by_the_name_of_its_file():
    job = make_job(pipeline={"devices": [f"cpu:{n}" for n in range(5)]})
    with pytest.raises(JobFileError, match=r"job\.toml: pipeline: cannot split 4 layers into 5 stages"):
        await TrainingRun(job, make_workload).run()


def test_the_learning_rate_warms_up_as_long_as_the_run_at_most_and_follows_a_cosine():
    def rates(**training: Any) -> list[float]:
        table = make_job(training={"learning_rate": 1.0, **training}).training
        return [learning_rate(step, table) for step in range(table.steps)]

    found = rates(steps=10, warmup_steps=2)
    assert found[:3] == [0.5, 1.0, 1.0]
    assert found[6] == pytest.approx(0.5)
    assert 0 < found[9] < 0.04
    assert found[2:] == sorted(found[2:], reverse=True)
    assert rates(steps=4, warmup_steps=100) == [0.25, 0.5, 0.75, 1.0]


def assert_trace(path: Any, steps: set[int]) -> None:
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and "kind" in event["args"]]
    # A step that was cut short may have left some tasks as well.
    assert {event["args"]["step"] for event in slices} >= steps
    assert {event["args"]["kind"] for event in slices} == {"F", "R", "B", "C"}
