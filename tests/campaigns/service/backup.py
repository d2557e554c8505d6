"""Backups of a service under load, each restored and trained to the end: the same bits as without it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic, sleep
from typing import Any

from killing import Served, curve, make_folder, newest_step, poll, same, serving

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
        with _Load(served) as load:
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
        f"{problems} warnings; {load.requests} requests meanwhile: p50 {load.at(0.5):.0f} ms, "
        f"slowest {load.at(1):.0f} ms"
    )
    rows = [Row(f"{BACKUPS} backups of a service under load", figure, problems == 0 and not load.errors)]

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


class _Load:
    """A client that submits and cancels jobs one after the other, and measures how long requests take."""

    def __init__(self, served: Served) -> None:
        self._client = served.client()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._seconds: list[float] = []
        self.errors: list[str] = []

    def __enter__(self) -> _Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    @property
    def requests(self) -> int:
        """How many there were."""
        return len(self._seconds)

    def at(self, quantile: float) -> float:
        """Milliseconds of a request."""
        return 1000 * sorted(self._seconds)[int(quantile * (len(self._seconds) - 1))]

    def _go_on(self) -> None:
        while not self._over.is_set():
            try:
                job = self._timed(lambda: self._client.submit(_job("extra", 9, 8)))["id"]
                self._timed(lambda: self._client.cancel(job))  # noqa: B023
            except Exception as error:  # noqa: BLE001 - becomes the row
                self.errors.append(json.dumps(str(error)))
            sleep(0.02)

    def _timed(self, ask: Any) -> Any:
        begun = monotonic()
        found = ask()
        self._seconds.append(monotonic() - begun)
        return found
