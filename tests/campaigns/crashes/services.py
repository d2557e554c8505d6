"""A service with workers that is killed at random instants: no worker of it lives on, and the next one ends the job.

``asyncpipe serve`` runs in a folder, which is the working directory of its workers, too: so they are found whenever it
is killed. The job is submitted once. In the end its losses and its last snapshot have the bits of an undisturbed run
on threads.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from killing import Served, curve, make_folder, poll, same, serving

from tests.campaigns.crashes.left import pids_in

__all__ = ["kill_services"]

LATEST = 5.0
"""Seconds that a worker may live on without its service."""
LONGEST = 6.0
"""Seconds from a service's start, or from a step, to its kill."""
ENDS_WITHIN = 600.0
WITH_WORKERS = ("--workers", "processes")


def kill_services(
    chance: random.Random, kills: int, deadline: float, folder: Path, tell: Callable[[str], object] = print
) -> float:
    """The longest that a worker has lived on after its service was killed, in seconds.

    Raises ``AssertionError`` if one lives on for too long, or if the job does not end as it would have.
    """
    killed, undisturbed = (make_folder(folder / name) for name in ("killed", "undisturbed"))
    job, steps, most = _job(60 * (kills + 1)), 0, 0.0
    for number in range(kills):
        if time.monotonic() > deadline:
            break
        with serving(killed, *WITH_WORKERS) as served:
            if chance.random() < 0.7:
                steps = _until_steps(served, job, chance.randrange(1, 40))
                time.sleep(chance.uniform(0.0, 0.2))
            else:
                time.sleep(chance.uniform(0.0, LONGEST))
            processes = len(pids_in(killed))
            began = time.perf_counter()
            served.kill()
        poll("no worker is left", lambda: not pids_in(killed), 0.001)
        most = max(most, seconds := time.perf_counter() - began)
        tell(f"service {number} was killed with {processes - 1} workers, {steps} steps; none after {seconds:.3f} s")
        assert seconds < LATEST, f"a worker has lived on for {seconds:.1f} s"
    ends = [_to_its_end(killed, job, *WITH_WORKERS), _to_its_end(undisturbed, job)]
    there, right = (curve(state, each) for state, each in ends)
    assert [row[0] for row in there] == list(range(1, len(right) + 1)), "each step is there once"
    assert there == right, "the losses differ"
    tensors = same(*ends)
    tell(f"{most:8.3f} s at most to the end of the last worker of a killed service; {tensors} tensors are bit-equal")
    return most


def _job(steps: int) -> dict[str, Any]:
    shape = {"width": 16, "blocks": 4, "heads": 2, "context": 16, "dropout": 0.1, "sample_length": 2}
    return {
        "name": "charlm",
        "entry": "charlm:build",
        "parameters": shape,
        "pipeline": {"devices": [f"cpu:{number}" for number in range(4)], "microbatches": 4, "schedule": "1f1b"},
        "training": {"steps": steps, "batch_size": 8, "learning_rate": 3e-3, "overlap": True},
        "snapshots": {"every": 5, "keep": 2},
        "faults": {"step_retries": 0},
    }


def _until_steps(served: Served, job: dict[str, Any], count: int) -> int:
    """Until it has done so many more steps, or all; how many there are then."""
    each = _submitted(served, job)
    before, last = _steps(served, each), job["training"]["steps"]
    poll("steps", lambda: _steps(served, each) >= min(before + count, last), 0.005, ENDS_WITHIN)
    return _steps(served, each)


def _submitted(served: Served, job: dict[str, Any]) -> str:
    """The job's number. It is submitted once: the key is that of the first time."""
    number: str = served.client().submit(job, "the job")["id"]
    return number


def _steps(served: Served, job: str) -> int:
    rows = curve(served.state, job)
    return rows[-1][0] if rows else 0


def _to_its_end(folder: Path, job: dict[str, Any], *options: str) -> tuple[Path, str]:
    """Where the job is, which has ended, and its service, too."""
    with serving(folder, *options) as served:
        number = _submitted(served, job)
        assert served.client().wait(number, ENDS_WITHIN)["state"] == "finished", served.story()
        served.process.send_signal(signal.SIGTERM)
        assert served.ends() == 0, served.story()
    poll("no worker is left", lambda: not pids_in(folder), 0.001)
    return served.state, number
