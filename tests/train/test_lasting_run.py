"""Runs that lose workers: they wait, go on with the devices that are left, and have the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from host_helpers import Hosts
from resume_helpers import STEPS, disturb, make_chain, make_job
from run_helpers import Told, assert_same_end, clean_state, plain

from asyncpipe.errors import HostLostError, JobFileError
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.train import lasting_run, next_move
from asyncpipe.train.job_file import Job
from asyncpipe.train.lasting_run import LastingRun
from asyncpipe.train.progress import StepProgress
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Batch, Workload
from tests.campaigns.crashes.left import child_named

pytestmark = [pytest.mark.usefixtures("snapshot_each_step"), pytest.mark.timeout(120)]

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]
TRAINING = {"overlap": True, "clip": 0.5, "warmup_steps": 3}


@pytest.fixture(scope="module")
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture(scope="module")
def pool(hosts: Hosts) -> Iterator[DevicePool]:
    """Each device in a worker, which is a host."""
    with hosts.pool() as pool:
        asyncio.run(pool.__aenter__())
        yield pool
        asyncio.run(pool.aclose())


@pytest.fixture(autouse=True)
def _all_on(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lasting_run, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(next_move, "LONGEST_PAUSE", 0.02)
    yield
    hosts.room = True
    hosts.off.clear()
    hosts.silent.clear()


def job_of(folder: Path, *, every: int = 1, steps: int = STEPS, **faults: Any) -> Job:
    return make_job(
        folder,
        pipeline={"devices": DEVICES},
        training={**TRAINING, "steps": steps},
        snapshots={"every": every},
        faults={"step_retries": 0, "wait_seconds": 0, **faults},
    )


class Struck(Told):
    """Calls ``strikes`` behind steps, by their numbers, the first time that these are done."""

    def __init__(self, strikes: dict[int, Callable[[], object]]) -> None:
        super().__init__()
        self.strikes = strikes
        self.waited: list[str] = []
        self.where: list[tuple[str, ...]] = []
        self.steps: list[int] = []

    def started(self, run: Any) -> None:
        self.where.append(run.devices)

    def stepped(self, progress: StepProgress) -> None:
        super().stepped(progress)
        self.steps.append(progress.step)
        self.strikes.pop(progress.step, lambda: None)()

    def waiting(self, reason: str | None) -> None:
        if reason is not None:
            self.waited.append(reason)


def kill(pool: DevicePool, name: str) -> None:
    assert pool.workers is not None
    os.kill(pool.workers.up[name].pid, signal.SIGKILL)


async def undisturbed(folder: Path, make: Callable[[], Workload], **options: Any) -> Path:
    disturb()
    summary = await TrainingRun(job_of(folder, **options), make).run()
    assert summary.snapshot is not None
    return summary.snapshot


@pytest.mark.promise(
    "A lost worker",
    "A run that loses workers and continues, with others or with replacements, ends with bit-identical results.",
)
async def test_a_run_is_split_anew_and_takes_in_what_comes_back(tmp_path, hosts, pool):
    chain, is_back = make_chain(tied=False), threading.Event()

    def make() -> Workload:
        """Its data ends after some steps for as long as the host is not back."""
        made = chain()

        def until_it_is_back(*arguments: Any) -> Iterator[Batch]:
            for number, batch in enumerate(made.batches(*arguments)):
                if number == 7:
                    assert is_back.wait(60)
                yield batch

        return replace(made, batches=until_it_is_back)

    def strike() -> None:
        hosts.off.add("cpu:1")
        kill(pool, "cpu:1")

    class Whole(Struck):
        def noted(self, level: int, text: str) -> None:
            super().noted(level, text)
            if "is back" in text:
                is_back.set()

    told = Whole({3: strike, 5: hosts.off.clear})
    disturb()
    job = job_of(tmp_path / "struck", steps=10, lost_host="split")
    summary = await LastingRun(job, make, progress=told, pool=pool).run()
    assert told.where == [tuple(DEVICES), ("cpu:0", "cpu:2"), tuple(DEVICES)]
    assert any("goes on without cpu:1, on cpu:0, cpu:2; split anew: " in phase for phase in told.phases)
    assert_same_end(await undisturbed(tmp_path / "alone", chain, steps=10), summary.snapshot)


@pytest.mark.promise(
    "A lost worker", "The model is split again only if results stay bit-identical; otherwise whole stages move."
)
async def test_where_a_split_could_change_a_bit_stages_are_moved(tmp_path, hosts, pool):
    def strike() -> None:
        hosts.off.add("cpu:1")
        kill(pool, "cpu:1")

    told = Struck({3: strike})
    disturb()
    summary = await LastingRun(job_of(tmp_path / "struck", lost_host="split"), plain, progress=told, pool=pool).run()
    assert told.where == [tuple(DEVICES), ("cpu:0", "cpu:0", "cpu:2")]
    assert any("the stages stay as they are, since its stages draw" in phase for phase in told.phases)
    assert_same_end(await undisturbed(tmp_path / "alone", plain), summary.snapshot)


async def test_a_run_waits_for_what_it_has_lost_and_gives_up_in_the_end(tmp_path, hosts, pool):
    make = make_chain(tied=False)

    def strike() -> None:
        hosts.room = False
        hosts.off.add("cpu:2")
        kill(pool, "cpu:2")

    class Back(Struck):
        def waiting(self, reason: str | None) -> None:
            super().waiting(reason)
            hosts.room = True
            if len(self.waited) == 3:
                hosts.off.clear()

    told = Back({3: strike})
    disturb()
    job = job_of(tmp_path / "waits", lost_host="wait", wait_seconds=60)
    summary = await LastingRun(job, make, progress=told, pool=pool).run()
    assert told.waited[0] == "waits for cpu:2, up to 60 s: the cluster has had no room"
    assert told.waited[1].startswith("waits for cpu:2, up to 60 s: worker 'cpu:2' did not start")
    assert told.where == [tuple(DEVICES)] * 2
    assert_same_end(await undisturbed(tmp_path / "alone", make), summary.snapshot)

    again = job_of(tmp_path / "gives up", lost_host="wait", wait_seconds=0.05)
    with pytest.raises(HostLostError, match=r"has lost cpu:2 and has waited 0.05 s .*: the cluster has had no room"):
        await LastingRun(again, make, progress=Struck({3: strike}), pool=pool).run()


async def test_a_run_with_workers_of_its_own_keeps_those_that_are_left(tmp_path):
    def strike() -> None:
        pid = child_named("b")
        assert pid is not None
        kept.append(child_named("a"))
        os.kill(pid, signal.SIGKILL)

    kept: list[int | None] = []
    told = Struck({3: strike, STEPS: lambda: kept.append(child_named("a"))})
    job = job_of(tmp_path / "struck", lost_host="wait", wait_seconds=60)
    job = job.override("pipeline", workers={"cpu:0": "a", "cpu:1": "b", "cpu:2": "b"})
    disturb()
    summary = await LastingRun(job, plain, progress=told).run()
    assert told.where == [tuple(DEVICES)] * 2
    assert kept[0] == kept[1] is not None
    assert "starting workers" in told.phases
    assert_same_end(await undisturbed(tmp_path / "alone", plain), summary.snapshot)


async def test_a_host_that_does_not_answer_keeps_nobody_from_others(hosts, pool):
    hosts.silent.add("cpu:8")
    there, silent = (pool.resolve([name]) for name in ("cpu:0", "cpu:8"))
    waiting = asyncio.ensure_future(pool.run(pool.workers.admit(silent)))
    assert await asyncio.to_thread(hosts.asked.wait, 60)
    await pool.run(pool.workers.admit(there))
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_a_run_that_is_to_go_on_takes_snapshots(pool):
    with pytest.raises(JobFileError, match=r'faults.lost_host: "wait" goes on from snapshots: name a folder'):
        LastingRun(make_job(training=TRAINING, faults={"step_retries": 0, "lost_host": "wait"}), plain, pool=pool)


ROWS = {"devices": [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]], "microbatches": 2}


def replicated_job(folder: Path, *, every: int = 99, **pipeline: Any) -> Job:
    faults = {"step_retries": 0, "lost_host": "shrink"}
    snapshots = {"every": every}
    return make_job(folder, pipeline=ROWS | pipeline, training=TRAINING, snapshots=snapshots, faults=faults)


@pytest.mark.promise("A lost worker", 'With `lost_host = "shrink"`, the loss of the worker of a replica costs no step.')
@pytest.mark.parametrize("lost", ["cpu:1", "cpu:2"])
async def test_the_loss_of_a_replica_costs_no_step(tmp_path, hosts, pool, lost):
    """No snapshot was taken before. The lost worker is started again, so sums have their order: every bit is right."""
    make = make_chain(tied=False)
    told = Struck({3: lambda: kill(pool, lost)})
    disturb()
    summary = await LastingRun(replicated_job(tmp_path / "struck"), make, progress=told, pool=pool).run()
    assert told.steps == list(range(1, STEPS + 1))
    assert any("other replicas have what was lost; it is kept as after step" in text for _, text in told.notes)
    disturb()
    alone = await TrainingRun(replicated_job(tmp_path / "alone", workers="threads"), make).run()
    assert_same_end(alone.snapshot, summary.snapshot)


@pytest.mark.promise(
    "A lost worker", "Without a replica whose worker cannot be started, the others take its micro-batches."
)
async def test_without_a_replica_the_others_take_its_micro_batches(tmp_path, hosts, pool):
    make = make_chain(tied=False)

    def strike() -> None:
        hosts.off.add("cpu:2")
        kill(pool, "cpu:2")

    told = Struck({3: strike, 5: hosts.off.clear})
    disturb()
    summary = await LastingRun(replicated_job(tmp_path / "struck"), make, progress=told, pool=pool).run()
    assert told.steps == list(range(1, STEPS + 1))
    assert told.where[:2] == [("cpu:0", "cpu:1", "cpu:2", "cpu:3"), ("cpu:0", "cpu:1")]
    disturb()
    alone = await TrainingRun(replicated_job(tmp_path / "alone", workers="threads"), make).run()
    mine, theirs = clean_state(summary.snapshot), clean_state(alone.snapshot)
    for name in ("model", "optimizer"):
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-10)


async def test_shards_of_a_lost_replica_are_in_the_snapshot(tmp_path, hosts, pool):
    make = make_chain(tied=False)
    told = Struck({3: lambda: kill(pool, "cpu:2")})
    job = replicated_job(tmp_path / "struck", shard_optimizer=True, every=2)
    disturb()
    summary = await LastingRun(job, make, progress=told, pool=pool).run()
    disturb()
    alone = await TrainingRun(replicated_job(tmp_path / "alone", workers="threads", shard_optimizer=True), make).run()
    assert_same_end(alone.snapshot, summary.snapshot)
