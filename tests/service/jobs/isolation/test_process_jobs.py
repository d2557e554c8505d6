"""Jobs in processes of their own: the bits and the signs of life of those on threads, and an end within a deadline."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import isolation_entries
import pytest
from killing import poll, serving
from manager_helpers import Service, make_settings, submission
from output_helpers import taken
from resume_helpers import disturb
from run_helpers import assert_same_end
from worker_helpers import is_alive

from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs.job_run import JobRun
from asyncpipe.service.jobs.manager import Manager
from asyncpipe.service.jobs.run_log import read_said
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import check_submission, job_of
from asyncpipe.train.training_run import TrainingRun

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(120)]

STUCK = ("stuck_entry", "stuck_loader", "never_returns", "holds_the_gil")
FIXED = {"plain": {}, "ties": {}, "segfaults": {"seconds": 0.05}}
NAMES = (*FIXED, "dies", "crashes", "raises", *STUCK)
STEPS = 9


@asynccontextmanager
async def processes(folder, isolation="process", **changed):
    """A manager whose jobs have processes, or are on threads, and a function that submits the entry of a name."""
    factories = {name: getattr(isolation_entries, name) for name in NAMES}
    fixed = {name: FIXED.get(name, {"folder": str(folder)}) for name in NAMES}
    entries = Entries({f"tests:{n}": f for n, f in factories.items()}, {f"tests:{n}": v for n, v in fixed.items()})
    settings = make_settings(
        folder / "service",
        entries=[f"tests:{name}" for name in NAMES],
        isolation=isolation,
        max_running=len(NAMES),
        cancel_seconds=0.2,
        **changed,
    )

    async with JobStore(folder / "jobs.sqlite3") as store, Manager(settings, entries, store) as manager:

        async def submit(name, **tables):
            training = {"steps": STEPS, "batch_size": 8, "learning_rate": 0.05}
            tables = {"entry": f"tests:{name}", "training": training, "snapshots": {"every": 4}, **tables}
            pipeline = {"devices": ["cpu:0", "cpu:1"], "microbatches": 4, "checkpoint": "never"}
            spec = check_submission(submission(name, pipeline=pipeline, **tables), settings, entries)
            return (await manager.jobs.submit(spec, None))[0].id

        yield Service(manager, store, None, entries), submit


async def comes(service, job, *states):
    """The job when it is in one of ``states``."""
    while (record := await service.store.get(job)).state not in states:  # noqa: ASYNC110 - the store tells nobody
        await asyncio.sleep(0.02)  # It leaves the processor to the processes.
    return record


def read(path):
    """The text of a file that a job writes, if it is there."""
    return path.read_text() if path.exists() else ""


async def there(path):
    """The text of a file that a job writes."""
    while not read(path):  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.02)
    return read(path)


@pytest.mark.promise("Bit-identical results", "A job in its own process is bit-identical to one on threads.")
@pytest.mark.promise("The service", "The log of a run that failed has the whole traceback, with all causes.")
async def test_a_job_in_a_process_has_the_bits_and_the_signs_of_life_of_one_on_threads(tmp_path):
    async with processes(tmp_path) as (service, submit):
        manager = service.manager
        job = await submit("plain")
        failed = await submit("raises")
        killed = await submit("dies", snapshots={"every": 1000})
        crashed = await submit("crashes")
        record = await comes(service, job, JobState.FINISHED, JobState.FAILED)
        assert record.cause == f"all {STEPS} steps are done"
        parsed = job_of(record, manager.settings)
        rows = await service.store.losses(job)
        collector = manager.metrics.collector_of(record)
        totals = collector.snapshot()
        assert totals.counters["samples"][()] == STEPS * 8
        assert totals.counters["steps"][("ok",)] == STEPS
        assert totals.counters["snapshots"][("ok",)] >= 2  # One is left out where the one before is being written.

        # An error of a class that the service does not know, and a process that is gone.
        record = await comes(service, failed, JobState.FINISHED, JobState.FAILED)
        assert record.state is JobState.FAILED
        assert "OwnError: no cable" in record.cause
        line = isolation_entries.raises.__code__.co_firstlineno + 8
        assert record.root == f"isolation_entries.OwnError: no cable (isolation_entries.py:{line} in fail)"
        said = read_said(manager.logs.folder / failed, 0).lines
        once = [
            ("stdout", "printed before it failed"),
            ("stdout", "and then"),
            ("stderr", " 2 of 2"),
            ("warning", "their.own: logged with password=***"),
        ]
        first = [(line.stream, line.text) for line in said if line.stream != "traceback"][:10]
        cause = record.cause.removesuffix(" (3 times since the last snapshot)")
        ends = [("service", f"run 1 {text}") for text in ("begins: it is its turn", f"failed: {cause}")]
        assert first == [ends[0], *once * 2, ends[1]], "its step is tried twice"
        traceback = [line.text for line in said if line.stream == "traceback"]
        assert traceback[0] == "Traceback (most recent call last):"
        assert '    raise OwnError("no cable")' in traceback
        assert traceback[-1].startswith("asyncpipe.errors.TaskError: ")
        record = await comes(service, killed, JobState.QUARANTINED, JobState.FAILED, JobState.FINISHED)
        assert record.state is JobState.QUARANTINED
        assert "was killed by SIGKILL, as by the OOM killer; attempt 3 of 3" in record.cause
        assert await service.path(killed) == ["queued", *["running", "queued"] * 2, "running", "quarantined"]

        # What a process has started does not outlive it, also where it crashes by itself.
        record = await comes(service, crashed, JobState.QUARANTINED, JobState.FAILED, JobState.FINISHED)
        assert record.cause.startswith("its process exited with status 3; attempt 3 of 3")
        assert not is_alive(int(await there(tmp_path / "child of crashes")))
        said = [(line.stream, line.text) for line in read_said(manager.logs.folder / crashed, 0).lines]
        assert ("stderr", "to the descriptor") in said
        line = isolation_entries.crashes.__code__.co_firstlineno + 6
        assert ("stderr", f'  File "{isolation_entries.__file__}", line {line} in crash') in said
        assert record.root == f"its process exited with status N (isolation_entries.py:{line} in crash)"
    alone = parsed.override("snapshots", folder=tmp_path / "alone")
    disturb()
    summary = await TrainingRun(alone, isolation_entries.plain).run()
    assert_same_end(summary.snapshot, parsed.snapshots.folder / summary.snapshot.name)
    assert [row.step for row in rows] == list(range(1, STEPS + 1))


@pytest.mark.promise(
    "The service",
    "A job that crashes its process costs other jobs on the same devices no step and changes none of their numbers.",
)
async def test_jobs_that_share_devices_have_the_bits_of_lone_ones_whatever_ends_beside_them(tmp_path):
    async with processes(tmp_path) as (service, submit):
        training = {"steps": 60, "batch_size": 8, "learning_rate": 0.05}
        healthy = {name: await submit(name, training=training) for name in ("plain", "ties")}
        crashing = await submit("segfaults")
        while (arbiter := service.manager.processes._arbiter) is None:  # noqa: ASYNC110 - it is started by itself
            await asyncio.sleep(0.01)
        arbiter.kill("a test does so")
        while service.manager.processes._arbiter in (None, arbiter):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        await service.manager.jobs.amend(healthy["ties"], weight=3.0)
        parsed = {}
        for name, job in healthy.items():
            record = await comes(service, job, JobState.FINISHED, JobState.FAILED)
            assert (record.state, record.attempts) == (JobState.FINISHED, 1), record.cause
            parsed[name] = job_of(record, service.manager.settings)
        record = await comes(service, crashing, JobState.QUARANTINED, JobState.FAILED, JobState.FINISHED)
        assert record.cause.startswith("its process was killed by SIGSEGV; attempt 3 of 3")
    for name, job in parsed.items():
        summary = await TrainingRun(
            job.override("snapshots", folder=tmp_path / name), getattr(isolation_entries, name)
        ).run()
        assert_same_end(summary.snapshot, job.snapshots.folder / summary.snapshot.name)


def test_the_processes_of_jobs_and_their_children_end_with_a_service_that_is_killed(tmp_path):
    (tmp_path / "service.toml").write_text(
        f'folder = "state"\nentry_path = {str(Path(isolation_entries.__file__).parent)!r}\nport = 0\n'
        'metrics_port = "none"\nisolation = "process"\ndevices = ["cpu:0", "cpu:1"]\n'
        f'[entries."isolation_entries:has_child"]\nfixed = {{ folder = {str(tmp_path)!r} }}\n'
    )
    with serving(tmp_path) as served:
        job = submission("has_child", entry="isolation_entries:has_child")
        served.client().submit(job, "key")
        pids = [int(poll(name, partial(read, tmp_path / name))) for name in ("has_child", "child of has_child")]
        assert all(map(is_alive, pids))
        served.kill()
    poll("the end of the job's process and its child", lambda: not any(map(is_alive, pids)))


async def test_a_snapshot_appears_after_the_store_has_the_losses_that_lead_to_it(tmp_path, monkeypatch):
    asked, allowed = asyncio.Event(), asyncio.Event()
    keep = JobRun.keep

    async def held(run):
        asked.set()
        await allowed.wait()
        await keep(run)

    monkeypatch.setattr(JobRun, "keep", held)
    async with processes(tmp_path) as (service, submit):
        job = await submit("plain")
        await asked.wait()
        record = await service.store.get(job)
        folder = job_of(record, service.manager.settings).snapshots.folder
        early = list(folder.glob("step-*"))
        allowed.set()
        assert not early
        record = await comes(service, job, JobState.FINISHED, JobState.FAILED)
        assert record.snapshot == f"step-{STEPS}"
        assert (folder / record.snapshot).exists()


async def test_a_job_on_threads_says_the_same(tmp_path):
    with taken(None):
        async with processes(tmp_path, isolation="thread") as (service, submit):
            job = await submit("raises", faults={"snapshot_retries": 0})
            record = await comes(service, job, JobState.FINISHED, JobState.FAILED)
            said = read_said(service.manager.logs.folder / job, 0).lines
    once = ["printed before it failed", "and then", " 2 of 2", "their.own: logged with password=***"]
    lines = [line.text for line in said if line.stream != "traceback"]
    assert lines == ["run 1 begins: it is its turn", *once * 2, f"run 1 failed: {record.cause}"]


@pytest.mark.promise(
    "Everything ends",
    "Cancelling a job in its own process ends it within a stated deadline, even if its code never returns.",
)
async def test_what_does_not_end_is_gone_within_its_deadline_and_frees_its_place_and_a_live_job_hears_orders(tmp_path):
    async with processes(tmp_path) as (service, submit):
        jobs = service.manager.jobs
        stuck = {name: await submit(name) for name in STUCK}
        long = await submit("plain", training={"steps": 10**6, "batch_size": 8, "learning_rate": 0.05})
        pids = {name: int(await there(tmp_path / name)) for name in STUCK}
        assert len({*pids.values(), os.getpid()}) == len(STUCK) + 1
        await asyncio.gather(*(jobs.cancel(job, "enough") for job in stuck.values()))
        for name, job in stuck.items():
            assert (await comes(service, job, JobState.CANCELLED, JobState.FINISHED)).state is JobState.CANCELLED
            assert not is_alive(pids[name])

        run = jobs.running[long]
        while not run.view.snapshot()["timeline"]:  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
        assert (await jobs.change_schedule(long, "1f1b")).schedule == "1f1b"
        with pytest.raises(Exception, match="no-such"):
            await run.change_schedule("no-such")
        step = run.view.snapshot()["training"]["steps"]
        while run.view.snapshot()["training"]["steps"] <= step:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
        await jobs.pause(long, "a break")
        record = await comes(service, long, JobState.PAUSED, JobState.FAILED)
        assert (record.state, record.snapshot) == (JobState.PAUSED, f"step-{record.step}")
