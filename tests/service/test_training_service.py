"""The service as a component, with real trainings of a small model, on a loop of its own."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from manager_helpers import ENTRY, Fakes, make_settings, submission, until
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from store_helpers import check_history
from torch import Generator, Tensor, nn

from asyncpipe.errors import OptionError
from asyncpipe.service import service_loop, training_service
from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs import manager
from asyncpipe.service.jobs.artifacts import UnknownArtifactError
from asyncpipe.service.store.job_store import IdempotencyConflictError, JobFilter, JobStore, UnknownJobError
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import SubmissionError
from asyncpipe.service.training_service import ServiceDrainingError, TrainingService
from asyncpipe.train.workload import Workload

pytestmark = [pytest.mark.usefixtures("no_leaks")]

QUEUED, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED, QUARANTINED = JobState
STEPS = 30


def batches(batch_size: int, generator: Generator) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        x = torch.randn(batch_size, 3, generator=generator, dtype=torch.float64)
        yield x, x.flip(1)


def mlp(width: int = 8) -> Workload:
    layers = [nn.Linear(3, width), nn.Dropout(0.2), nn.Linear(width, 3)]
    return Workload(nn.Sequential(*layers).double(), nn.functional.mse_loss, batches)


def service(folder: Path, **changed: object) -> TrainingService:
    return TrainingService(make_settings(folder, **changed), entries=Entries({ENTRY: mlp}))


def job(name: str = "job", seed: int = 1, steps: int = STEPS, **changed: object) -> dict[str, object]:
    training = {"steps": steps, "batch_size": 4, "learning_rate": 0.05, "seed": seed}
    return submission(name, training=training, snapshots={"every": 4}, **changed)


async def ended(opened: TrainingService, job: str) -> list[str]:
    """The kinds of all events until the job is at its end."""
    return [event.kind async for event in opened.follow(job)]


async def curve(opened: TrainingService, job: str) -> list[tuple[int, float, float, int]]:
    rows = await opened.losses(job)
    return [(row.step, row.loss, row.learning_rate, row.tokens) for row in rows]


async def check_artifacts(opened: TrainingService, job: str, folder: Path) -> None:
    """All that can be downloaded of a job of ``STEPS`` that has ended."""
    names = {each.name for each in await opened.artifacts(job)}
    assert names == {"model.pt", "losses.jsonl", "losses.csv", "log.jsonl", "trace.json", "timeline.svg"}
    content = {name: await downloaded(opened, job, name) for name in names}
    assert content["model.pt"] == (folder / "snapshots" / f"step-{STEPS}" / "model.pt").read_bytes()
    assert len(content["losses.csv"].splitlines()) == STEPS + 1
    assert len(content["losses.jsonl"].splitlines()) == STEPS
    events = [json.loads(line) for line in content["log.jsonl"].splitlines()]
    assert [event["data"]["to"] for event in events if event["kind"] == "state"] == ["queued", "running", "finished"]
    traced = {event.get("args", {}).get("step") for event in json.loads(content["trace.json"])["traceEvents"]}
    assert len(traced - {None}) == 3, "the last steps"
    assert content["timeline.svg"].startswith(b"<svg")
    for whose, name in ((job, "run.pt"), ("0" * 26, "model.pt")):
        with pytest.raises((UnknownArtifactError, UnknownJobError)):
            await opened.open_artifact(whose, name)


async def downloaded(opened: TrainingService, job: str, name: str) -> bytes:
    with (await opened.open_artifact(job, name)).file as file:
        return file.read()


async def alone(folder: Path, **changed: object) -> list[tuple[int, float, float, int]]:
    async with service(folder) as opened:
        record, _ = await opened.submit(job(**changed))
        await ended(opened, record.id)
        return await curve(opened, record.id)


async def test_a_job_trains_to_its_end(tmp_path):
    async with service(tmp_path) as opened:
        assert opened.status().ready
        record, new = await opened.submit(job(), "key")
        assert new
        again, new = await opened.submit(job(), "key")
        assert (again.id, new) == (record.id, False)
        with pytest.raises(IdempotencyConflictError):
            await opened.submit(job("other"), "key")
        kinds = await ended(opened, record.id)
        assert kinds.count("state") == 3
        assert kinds.count("snapshot") >= 2
        done = await opened.get(record.id)
        assert (done.state, done.step, done.snapshot) == (FINISHED, STEPS, f"step-{STEPS}")
        rows = await opened.losses(record.id)
        assert [row.step for row in rows] == list(range(1, STEPS + 1))
        assert all(math.isfinite(row.loss) and row.seconds > 0 for row in rows)
        assert await opened.losses(record.id, after=28) == rows[28:]
        assert [record.id for record in await opened.list(JobFilter(frozenset({FINISHED})))] == [record.id]
        check_history(await opened.history(record.id))
        assert opened.view(record.id) is None
        await check_artifacts(opened, record.id, tmp_path / "jobs" / record.id)
    assert not opened.status().ready
    with pytest.raises(ServiceDrainingError, match="is closed"):
        await opened.get(record.id)


async def test_a_curve_is_the_same_to_the_last_bit_whatever_interrupts_it(tmp_path):
    whole = await alone(tmp_path / "alone", steps=100)
    async with service(tmp_path / "other") as opened:
        record, _ = await opened.submit(job(steps=100))
        neighbour, _ = await opened.submit(job("neighbour", seed=2, steps=100_000))
        for _ in range(2):
            await moved(opened, record.id)
            await opened.pause(record.id)
            await comes(opened, record.id, PAUSED)
            await opened.resume(record.id)
        await moved(opened, record.id)
        await opened.drain("SIGTERM")
    async with service(tmp_path / "other") as opened:
        await ended(opened, record.id)
        assert await curve(opened, record.id) == whole
        page = (await opened.past_view(record.id)).snapshot()
        assert (page["ended"], page["training"]["steps"], len(page["history"])) == (True, 100, 100)
        assert page["timeline"]["tasks"]
        assert (await opened.outlooks([record.id]))[record.id].trained_seconds > 0
        view = opened.view(neighbour.id)
        await until(lambda: view.snapshot()["training"] is not None)
        # It went on from a snapshot, and its page counts from there.
        snapshot = (await opened.get(neighbour.id)).snapshot
        assert view.snapshot()["training"]["steps"] >= int(snapshot.removeprefix("step-")) > 0
        assert (await opened.outlooks([neighbour.id]))[neighbour.id].left_seconds > 0
        assert (await opened.get(record.id)).attempts == 4
        check_history(await opened.history(record.id))
        await opened.cancel(neighbour.id)
        await comes(opened, neighbour.id, CANCELLED)
        steps = [step for step, *_ in await curve(opened, neighbour.id)]
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.promise(
    "Right results",
    "A job with replicas has the figures, weights and states of one pipeline, also in a service beside other jobs.",
)
async def test_a_job_with_replicas_has_the_curve_of_one_pipeline_also_beside_others(tmp_path):
    one = await alone(tmp_path / "one", pipeline={"devices": ["cpu:0"], "microbatches": 4})
    rows = {"devices": [["cpu:0"], ["cpu:1"]], "microbatches": 2}
    async with service(tmp_path / "many", isolation="thread") as opened:
        beside, _ = await opened.submit(job("beside", seed=2, steps=10**6))
        record, _ = await opened.submit(job(pipeline=rows))
        await ended(opened, record.id)
        await opened.cancel(beside.id)
        many = await curve(opened, record.id)
        done = await opened.get(record.id)
    assert (done.state, done.replicas, done.devices) == (FINISHED, 2, ("cpu:0", "cpu:1"))
    assert many == [pytest.approx(row, rel=1e-10) for row in one]


@pytest.mark.promise(
    "Bit-identical results",
    "A job with `overlap = true` is bit-identical to one without, also after a resume and beside other jobs.",
)
async def test_a_job_whose_steps_may_overlap_has_the_curve_of_steps_one_by_one(tmp_path):
    async def train(folder: Path, *, overlap: bool) -> object:
        training = {"steps": STEPS, "batch_size": 4, "learning_rate": 0.05, "seed": 1, "overlap": overlap}
        async with service(folder) as opened:
            asked = {**job(), "training": training, "faults": {"step_retries": 0}}
            record, _ = await opened.submit(asked)
            await moved(opened, record.id)
            await opened.pause(record.id)
            await comes(opened, record.id, PAUSED, FINISHED)
            if (await opened.get(record.id)).state is PAUSED:
                await opened.resume(record.id)
            notes = [str(event.data) async for event in opened.follow(record.id) if event.kind == "note"]
            assert not any("one by one" in note for note in notes)
            assert (await opened.get(record.id)).state is FINISHED
            return await curve(opened, record.id)

    one = await train(tmp_path / "one", overlap=False)
    assert await train(tmp_path / "other", overlap=True) == one
    async with service(tmp_path / "workers", workers="processes") as opened:  # They start with the first job.
        with pytest.raises(SubmissionError, match=r"training\.overlap: must be true: this service"):
            await opened.submit(job())
    async with service(tmp_path / "refused") as opened:
        with pytest.raises(SubmissionError, match=r"training\.overlap: .* set faults\.step_retries = 0"):
            await opened.submit({**job(), "training": {**job()["training"], "overlap": True}})  # type: ignore[dict-item]


async def moved(opened: TrainingService, job: str) -> None:
    """Wait for a step of the job, or its end."""
    events = opened.follow(job, after=10**9)
    async for _ in events:
        break
    await events.aclose()


async def comes(opened: TrainingService, job: str, *states: JobState) -> None:
    while (await opened.get(job)).state not in states:  # noqa: ASYNC110 - in the store, which tells nobody
        await asyncio.sleep(0.005)  # It leaves the interpreter to the jobs.


class Flaky(nn.Module):
    """Fails at each of these forwards, counted over all runs of the process."""

    calls = 0
    fails: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        Flaky.calls += 1
        if Flaky.calls in Flaky.fails:
            raise OSError("a cable")
        return x


def flaky() -> Workload:
    layers = [nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 3), Flaky()]
    return Workload(nn.Sequential(*layers).double(), nn.functional.mse_loss, batches)


@pytest.mark.parametrize(("fails", "steps", "snapshots"), [((8,), 1, 0), ((8, 9), 1, 1), ((8, 20, 21), 2, 1)])
async def test_faults_leave_no_trace_in_the_curve(tmp_path, monkeypatch, fails, steps, snapshots):
    async def train(folder: Path, fails: tuple[int, ...]) -> tuple[object, object, dict[str, float]]:
        monkeypatch.setattr(Flaky, "calls", 0)
        monkeypatch.setattr(Flaky, "fails", fails)
        async with TrainingService(make_settings(folder), entries=Entries({ENTRY: flaky})) as opened:
            # One forward for each attempt at a step.
            pipeline = {"devices": ["cpu:0", "cpu:1"], "microbatches": 1, "checkpoint": "never"}
            record, _ = await opened.submit(job(pipeline=pipeline))
            await ended(opened, record.id)
            retries = {
                sample.labels["how"]: sample.value
                for family in opened.collector.collect()
                if family.name == "asyncpipe_job_retries"
                for sample in family.samples
            }
            return await curve(opened, record.id), (await opened.get(record.id)).state, retries

    whole = await train(tmp_path / "whole", ())
    assert whole[1:] == (FINISHED, {"step": 0, "snapshot": 0})
    assert await train(tmp_path / "faults", fails) == (*whole[:2], {"step": steps, "snapshot": snapshots})


class Stuck(nn.Module):
    """Blocks in one of its forwards, until it is let go."""

    calls = 0
    blocks = 0
    go_on = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        Stuck.calls += 1
        if Stuck.calls == Stuck.blocks:
            Stuck.go_on.wait(50)
        return x


def stuck() -> Workload:
    return Workload(nn.Sequential(nn.Linear(3, 3), Stuck()).double(), nn.functional.mse_loss, batches)


async def test_a_task_that_hangs_costs_a_snapshot_and_no_more(tmp_path, monkeypatch):
    async def train(folder: Path, blocks: int) -> object:
        monkeypatch.setattr(Stuck, "calls", 0)
        monkeypatch.setattr(Stuck, "blocks", blocks)
        settings = make_settings(folder, watchdog_floor=0.3)
        async with TrainingService(settings, entries=Entries({ENTRY: stuck})) as opened:
            pipeline = {"devices": ["cpu:0", "cpu:1"], "microbatches": 1, "checkpoint": "never"}
            # On a busy machine another task may be taken for hung, too.
            record, _ = await opened.submit(job(pipeline=pipeline, faults={"snapshot_retries": 9}))
            await ended(opened, record.id)
            causes = [each.cause for each in await opened.history(record.id)]
            assert (await opened.get(record.id)).state is FINISHED, causes
            assert opened.manager.pool.watchdog.hung >= (blocks > 0)
            assert any("did not end within" in cause for cause in causes) or not blocks
            return await curve(opened, record.id)

    try:
        assert await train(tmp_path / "hangs", 20) == await train(tmp_path / "whole", 0)
    finally:
        Stuck.go_on.set()


async def test_a_schedule_is_changed_between_steps_and_stays_changed(tmp_path):
    async with service(tmp_path) as opened:
        record, _ = await opened.submit(job(steps=100_000))
        await moved(opened, record.id)
        assert (await opened.change_schedule(record.id, "gpipe")).schedule == "gpipe"
        with pytest.raises(SubmissionError):
            await opened.change_schedule(record.id, "nothing")
        await moved(opened, record.id)
    async with service(tmp_path) as opened:
        await moved(opened, record.id)
        assert opened.manager.jobs.running[record.id].job.pipeline.schedule == "gpipe"
        await opened.cancel(record.id)
        await comes(opened, record.id, CANCELLED)


async def test_bad_requests_are_refused(tmp_path):
    async with service(tmp_path) as opened:
        with pytest.raises(SubmissionError):
            await opened.submit({"name": "job"})
        with pytest.raises(SubmissionError, match="parameters"):
            await opened.submit(job(parameters={"depth": 3}))
        for asking in (opened.get("7"), opened.pause("7"), opened.losses("7"), ended(opened, "7")):
            with pytest.raises(UnknownJobError):
                await asking
        assert await opened.list() == ()
        opened.take_no_more("SIGTERM")
        await opened.drain("told too late")
        assert not opened.status().ready
        assert opened.status().live
        assert "SIGTERM" in opened.status().reason
        with pytest.raises(ServiceDrainingError, match="SIGTERM"):
            await opened.submit(job())
        with pytest.raises(ServiceDrainingError, match="opens once"):
            await opened.__aenter__()


async def test_a_service_that_cannot_open_leaves_nothing(tmp_path):
    (tmp_path / "jobs.sqlite3").write_text("no database, and long enough to be taken for one" * 100)
    opened = service(tmp_path)
    with pytest.raises(Exception, match="damaged"):
        await opened.__aenter__()
    assert not opened.status().ready


def test_every_loop_may_ask(tmp_path):
    """Also one in another thread, and one whose own thread is blocked meanwhile does not stop training."""

    async def main() -> None:
        async with service(tmp_path) as opened:
            record, _ = await opened.submit(job())
            found: list[list[str]] = []
            other = threading.Thread(target=lambda: found.append(asyncio.run(ended(opened, record.id))))
            other.start()
            other.join(50)  # This loop does not turn.
            assert found[0].count("state") == 3
            assert (await opened.get(record.id)).state is FINISHED

    asyncio.run(main())


async def test_whoever_leaves_a_request_does_not_undo_it(tmp_path):
    async with service(tmp_path) as opened:
        record, _ = await opened.submit(job(steps=100_000))
        await moved(opened, record.id)
        pausing = asyncio.create_task(opened.pause(record.id, "ann asked"))
        await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.wait([pausing])
        await comes(opened, record.id, PAUSED)
        assert (await opened.get(record.id)).cause == "ann asked"
        follower = asyncio.create_task(ended(opened, record.id))
        await asyncio.sleep(0)
        follower.cancel()
        await asyncio.wait([follower])


async def test_followers_end_with_the_service(tmp_path):
    async with service(tmp_path) as opened:
        record, _ = await opened.submit(job(steps=100_000))
        follower = asyncio.create_task(ended(opened, record.id))
        await moved(opened, record.id)
    kinds = await follower
    assert kinds.count("state") == 3  # Submitted, begun, queued again.
    assert kinds.count("step") >= 1


async def test_prometheus_is_told_of_all_jobs_at_once(tmp_path):
    async with service(tmp_path) as opened:
        registry = CollectorRegistry()
        registry.register(opened.collector)
        records = [(await opened.submit(job("same")))[0] for _ in range(2)]
        for record in records:
            await ended(opened, record.id)
        families = {
            family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())
        }
    states = {sample.labels["state"]: sample.value for sample in families["asyncpipe_jobs"].samples}
    assert states == dict.fromkeys(map(str, JobState), 0) | {"finished": 2}
    to = {sample.labels["to"]: sample.value for sample in families["asyncpipe_job_transitions"].samples}
    assert (to["queued"], to["running"], to["finished"]) == (2, 2, 2)
    assert families["asyncpipe_service_ready"].samples[0].value == 1
    assert families["asyncpipe_store_commits"].samples[0].value >= 6
    waited = {sample.name: sample.value for sample in families["asyncpipe_job_queue_seconds"].samples}
    assert waited["asyncpipe_job_queue_seconds_count"] == 2
    steps = {
        sample.labels["job"]: sample.value
        for sample in families["asyncpipe_steps"].samples
        if sample.labels["outcome"] == "ok"
    }
    assert set(steps.values()) == {STEPS}
    assert "same" in steps
    assert len(steps) == 2
    assert {"asyncpipe_hung_tasks", "asyncpipe_job_retries"} <= families.keys()


async def test_a_service_that_does_not_answer_is_not_live(tmp_path, monkeypatch):
    monkeypatch.setattr(training_service, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(service_loop, "BEAT_SECONDS", 0.01)
    blocked, go_on = threading.Event(), threading.Event()

    def blocking(*_: object, **__: object) -> None:
        blocked.set()
        go_on.wait(50)
        raise OptionError("enough")

    entries = Entries({ENTRY: mlp})
    async with TrainingService(make_settings(tmp_path), entries=entries, make_trainer=blocking) as opened:
        assert opened.status().live
        await opened.submit(job())
        try:
            await until(lambda: blocked.is_set() and not opened.status().live)
            stuck = opened.status()
            assert (stuck.ready, stuck.live) == (False, False)
            assert "the service's loop has not answered for" in stuck.reason
        finally:
            go_on.set()
        await until(lambda: opened.status().live)
        monkeypatch.setattr(JobStore, "is_alive", property(lambda store: False))
        assert "store's thread" in opened.status().reason
        monkeypatch.undo()
    assert opened.status().live


async def test_a_scheduler_of_jobs_that_broke_is_told(tmp_path, monkeypatch):
    fakes = Fakes()
    opened = TrainingService(make_settings(tmp_path), entries=Entries({ENTRY: mlp}), make_trainer=fakes)
    async with opened:

        def broken(*_: object) -> None:
            raise RuntimeError("a mistake")

        monkeypatch.setattr(manager, "decisions", broken)
        await opened.submit(job())
        await until(lambda: not opened.status().live)
        assert opened.status().reason == "the job scheduler has failed"
