"""Controllers that are killed at random instants: no worker of theirs lives on, and the next one ends the job.

Each controller is a process that goes on with the job from the last snapshot on disk. Its workers have a mark in
their names, so that they are found whenever it is killed, also before it knows of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from resume_helpers import assert_same

from asyncpipe import DevicePool
from tests.campaigns.crashes.job import Job, Snapshot, restore, take
from tests.campaigns.crashes.left import pids_named
from tests.campaigns.harness import Run

__all__ = ["kill_controllers"]

LATEST = 5.0
"""Seconds that a worker may live on without its controller."""
SECONDS = 120.0
"""For a controller to end by itself."""


DEVICES, STEPS = 4, 400
LONGEST = 5.0
"""Seconds of a controller's start, or of its first step, within which it is killed."""


def kill_controllers(run: Run, folder: Path, kills: int) -> None:
    """Raises ``AssertionError`` if a worker lives on for too long after its controller was killed.

    So it does if the last controller, which is not killed, ends with other bits.
    """
    chance, snapshot = random.Random(run.options.seed), folder / "snapshot"
    alone = asyncio.run(_alone())
    for number in range(kills + 1):
        mark = f"crash-{os.getpid()}-{number}"
        command = [sys.executable, "-m", __name__, str(snapshot), mark]
        controller = subprocess.Popen(command)
        server = f"fork server of {controller.pid}"
        if number == kills or not run.has_time:
            assert controller.wait(SECONDS) == 0
            break
        try:
            if chance.random() < 0.5:
                _await_step(controller, snapshot)
            time.sleep(chance.uniform(0.0, LONGEST))
        finally:
            workers = len(pids_named(mark)) - 1
            controller.kill()
            killed = time.perf_counter()
            status = controller.wait(SECONDS)
        assert status in (0, -signal.SIGKILL), f"a controller has failed by itself: {status}"
        while (pids_named(mark) or pids_named(server)) and time.perf_counter() < killed + 2 * LATEST:
            time.sleep(0.01)
        seconds = time.perf_counter() - killed
        run.report.seconds["to the end of the last worker of a killed controller"].append(seconds)
        done = 0 if (found := _read(snapshot)) is None else found[0]
        run.tell(
            f"controller {number} ended by {status} with {workers} workers, {done} steps; none after {seconds:.3f} s"
        )
        assert seconds < LATEST, f"a worker has lived on for {seconds:.1f} s"
        if status == 0:
            snapshot.unlink()
    assert not pids_named(mark)
    assert not pids_named(server)
    found = _read(snapshot)
    assert found is not None
    assert_same(found, alone)


def _await_step(controller: subprocess.Popen[bytes], snapshot: Path) -> None:
    """Until it has written a snapshot."""
    before = snapshot.stat().st_mtime_ns if snapshot.exists() else 0
    deadline = time.monotonic() + SECONDS
    while controller.poll() is None and (not snapshot.exists() or snapshot.stat().st_mtime_ns == before):
        assert time.monotonic() < deadline, "a controller has not got to its first step"
        time.sleep(0.01)


def _read(path: Path) -> Snapshot | None:
    if not path.exists():
        return None
    found: Snapshot = torch.load(path, weights_only=False)
    return found


async def _alone() -> Snapshot:
    job = Job("1f1b", DEVICES, STEPS)
    await job.prepare()
    return job.end


async def _control(path: Path, mark: str) -> None:
    """Go on with the job to its end; a snapshot behind each step."""
    job = Job("1f1b", DEVICES, STEPS)
    workers = {device: f"{mark}-{device}" for device in job.devices}
    async with DevicePool(workers=workers) as pool, job.pipeline(pool, None) as pipe:
        done = 0
        if (found := _read(path)) is not None:
            restore(pipe, found)
            done = found[0]
        while done < STEPS:
            await job.step(pipe, done)
            done += 1
            torch.save(take(pipe, done), path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(_control(Path(sys.argv[1]), sys.argv[2]))
