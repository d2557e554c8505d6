"""Backups of a service under load, each restored and trained to the end: the same bits as without it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic
from typing import Any

from killing import curve, make_folder, newest_step, poll, same, serving

from asyncpipe.service.client import JobClient
from tests.campaigns.service import Row

BACKUPS = 5
SEED = 3
STEPS = 240
SECONDS = 240.0


def run(folder: Path) -> list[Row]:
    """Two jobs train while clients submit and cancel others; backups are made meanwhile, and all of them restored."""
    chance = Random(SEED)
    first = make_folder(folder / "first")
    with serving(first) as served:
        client = served.client()
        jobs = [client.submit(_job(name, seed), name)["id"] for seed, name in enumerate(("one", "two"))]
        with _load(client) as load:
            backups = []
            for number in range(BACKUPS):
                wanted = chance.randint(5, STEPS // BACKUPS)
                steps = max(newest_step(served.state, job) for job in jobs) + wanted
                poll("steps", lambda: max(newest_step(served.state, job) for job in jobs) >= min(steps, STEPS - 20))  # noqa: B023
                backups.append(_backed_up(first, folder / f"{number}.tar"))
        for job in jobs:
            assert client.wait(job, SECONDS)["state"] == "finished", served.story()
        submitted = len(list(client.list()))
    seconds = [found.seconds for found in backups]
    size = max(found.path.stat().st_size for found in backups)
    problems = sum(found.problems for found in backups)
    figure = (
        f"{median(seconds):.1f} s (at most {max(seconds):.1f} s) for {size / 2**20:.1f} MiB, {submitted} jobs, "
        f"{problems} warnings; {len(load)} requests meanwhile: p50 {1000 * median(load):.0f} ms, "
        f"slowest {1000 * max(load):.0f} ms"
    )
    rows = [Row(f"{BACKUPS} backups of a service under load", figure, problems == 0 and load[-1] == 0)]

    begun, tensors, equal = [], 0, 0
    for number, backup in enumerate(backups):
        again = make_folder(folder / f"restored-{number}")
        _command("restore", str(backup.path), "--folder", str(again / "state"))
        begun.append([newest_step(again / "state", job) for job in jobs])
        with serving(again) as served:
            client = served.client()
            for job in jobs:
                assert client.wait(job, SECONDS)["state"] == "finished", served.story()
        for job in jobs:
            tensors += same((first / "state", job), (again / "state", job))
            equal += curve(first / "state", job) == curve(again / "state", job)
        shutil.rmtree(again)
    steps_text = ", ".join("/".join(map(str, steps)) for steps in begun)
    curves = f"{equal} of {2 * BACKUPS} loss curves and {tensors} tensors bit-equal"
    figure = f"went on from steps {steps_text} of {STEPS}; {curves}"
    return [*rows, Row("each backup restored, and its jobs trained to the end", figure, equal == 2 * BACKUPS)]


def _job(name: str, seed: int, steps: int = STEPS) -> dict[str, Any]:
    shape = {"width": 16, "blocks": 2, "heads": 2, "context": 16, "dropout": 0.1, "sample_length": 2}
    pipeline = {"devices": ["cpu:0", "cpu:1"], "microbatches": 4, "schedule": "1f1b"}
    training = {"steps": steps, "batch_size": 8, "learning_rate": 3e-3, "clip": 1.0, "seed": seed}
    snapshots = {"every": 4, "keep": 2}
    return {"name": name, "entry": "charlm:build", "parameters": shape, "pipeline": pipeline, "training": training,
            "snapshots": snapshots}  # fmt: skip


class _Backup:
    def __init__(self, path: Path, seconds: float, problems: int) -> None:
        self.path, self.seconds, self.problems = path, seconds, problems


def _command(*arguments: str) -> str:
    command = [sys.executable, "-m", "asyncpipe", "service", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stderr


def _backed_up(service: Path, to: Path) -> _Backup:
    begun = monotonic()
    errors = _command("backup", str(to), "--folder", str(service / "state"))
    return _Backup(to, monotonic() - begun, errors.count("warning"))


@contextmanager
def _load(client: JobClient) -> Iterator[list[float]]:
    """Jobs are submitted and cancelled during the block; yields the seconds of each request."""
    over, seconds = threading.Event(), list[float]()

    def timed(ask: Callable[[], Any]) -> Any:
        begun = monotonic()
        found = ask()
        seconds.append(monotonic() - begun)
        return found

    def go_on() -> None:
        while not over.wait(0.02):
            job = timed(lambda: client.submit(_job("extra", 9, 8)))["id"]
            timed(partial(client.cancel, job))
        seconds.append(0.0)  # No request has failed.

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    yield seconds
    over.set()
    thread.join(60)
