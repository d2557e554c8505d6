"""A service whose devices are in worker processes: what becomes of jobs when one of these is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from manager_helpers import make_settings, submission
from resume_helpers import disturb, make_workload
from run_helpers import assert_same_end
from torch import nn

from asyncpipe.service.job_states import JobState
from asyncpipe.service.jobs.manager import Manager
from asyncpipe.service.store.job_store import JobStore
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import check_submission, job_of
from asyncpipe.train.training_run import TrainingRun

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(240)]

MICROBATCHES = 4
ENDED = (JobState.FINISHED, JobState.FAILED)
STEPS = 9
DEVICES = {"struck": ["cpu:0", "cpu:1"], "beside": ["cpu:2", "cpu:0"]}


class Strikes(nn.Module):
    """In the fourth step of a run, ends its worker, and hangs in the second such run. Without a folder, it does not."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.calls = folder, 0

    def forward(self, x):
        self.calls += 1
        if self.folder is not None and self.calls == 3 * MICROBATCHES + 1:
            for name, deed in (
                ("kill", partial(os.kill, os.getpid(), signal.SIGKILL)),
                ("hang", threading.Event().wait),
            ):
                note = Path(self.folder, name)
                if not note.exists():
                    note.touch()
                    deed()
        return x


def workload(folder=None):
    made = make_workload()
    return replace(made, model=nn.Sequential(*made.model, Strikes(folder)))


async def test_a_lost_worker_is_started_again_and_its_job_goes_on_bit_equal_and_others_hear_nothing(tmp_path):
    entries = Entries({"tests:struck": partial(workload, tmp_path), "tests:beside": workload})
    settings = make_settings(
        tmp_path / "service",
        workers="processes",
        devices=["cpu:0", "cpu:1", "cpu:2"],
        entries=["tests:struck", "tests:beside"],
        watchdog_floor=2.0,
    )
    jobs = {}
    async with JobStore(tmp_path / "jobs.sqlite3") as store, Manager(settings, entries, store) as manager:
        for name, devices in DEVICES.items():
            tables = {
                "pipeline": {"devices": devices, "microbatches": MICROBATCHES, "checkpoint": "never"},
                "entry": f"tests:{name}",
                "training": {"steps": STEPS, "batch_size": 8, "learning_rate": 0.05, "overlap": True},
                "snapshots": {"every": 2},
                "faults": {"step_retries": 0},
            }
            if name == "beside":
                tables["training"]["steps"] = 10**6
            spec = check_submission(submission(name, **tables), settings, entries)
            jobs[name] = (await manager.jobs.submit(spec, None))[0].id
        while (record := await store.get(jobs["struck"])).state not in ENDED:  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.02)  # It leaves the processor to the workers.
        history = await store.history(jobs["struck"])
        assert [str(each.to_state) for each in history] == ["queued", *["running", "queued"] * 2, "running", "finished"]
        assert "worker 'cpu:1' was killed by SIGKILL, while it ran F(0,1) on cpu:1" in history[2].cause
        assert "worker 'cpu:1' was killed by its controller: F(0,1) on cpu:1 did not end within" in history[4].cause
        assert manager.pool.watchdog.hung == 1
        assert [str(each.to_state) for each in await store.history(jobs["beside"])] == ["queued", "running"]
    job = job_of(record, settings)
    alone = job.override("pipeline", workers="threads").override("snapshots", folder=tmp_path / "alone")
    disturb()
    summary = await TrainingRun(alone, partial(workload, tmp_path)).run()
    assert_same_end(summary.snapshot, job.snapshots.folder / summary.snapshot.name)
