"""A job whose stage crashes again and again, beside three healthy jobs on the same devices, each in its own process.

::

    crashing   trains ── segfault ── goes on from its snapshot ── segfault ···
    healthy    three kinds, each submitted again when it has finished: every loss has the bits of an undisturbed run
    arbiter    is killed every ``kill`` seconds
    readyz     is asked every 200 ms
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any
from urllib.request import urlopen

from kill_campaign import children
from killing import curve, serving

from asyncpipe.service.client import JobClient
from tests.campaigns.harness import Campaign, Run
from tests.campaigns.service._processes import ODD, job, make_odd_folder, tree

__all__ = ["CAMPAIGN"]

HEALTHY = (f"{ODD}:plain", f"{ODD}:ties", "charlm:build")
"""Batch norms and dropout; tied weights and a skip; a transformer with dropout."""
OPTIONS = ("--isolation", "process", "--max-running", "4", "--log-level", "warning")
PAUSE = 0.2
ENDED = ("finished", "failed", "cancelled", "quarantined")


class Probes:
    """Asks whether the service is ready, from a thread."""

    def __init__(self, url: str) -> None:
        self.seconds: list[float] = []
        self.missed = 0
        self._url, self._over = url, Event()
        self._thread = Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Probes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._over.wait(PAUSE):
            begun = time.monotonic()
            try:
                with urlopen(f"{self._url.rstrip('/')}/readyz", timeout=2) as answer:
                    self.missed += answer.status != 200
            except OSError:
                self.missed += 1
            self.seconds.append(time.monotonic() - begun)


def submit(client: JobClient, entry: str, steps: int, **parameters: Any) -> str:
    made = job(entry, steps, every=10)
    made["parameters"] |= parameters
    return str(client.submit(made)["id"])


@contextmanager
def served(folder: Path) -> Iterator[tuple[Any, Path]]:
    with serving(make_odd_folder(folder), *OPTIONS) as service:
        settings = folder / "service.toml"
        assert settings.exists()
        yield service, folder / "state"


def arbiter_of(pid: int) -> int | None:
    """The process of the service that says whose turn it is."""
    for each in tree(pid):
        with suppress(OSError):
            if b"arbiter of jobs" in Path(f"/proc/{each}/cmdline").read_bytes():
                return each
    return None


def _work(run: Run) -> None:
    options = run.options
    with TemporaryDirectory(prefix="asyncpipe-segfaults-") as name:
        folder = Path(name)
        references = {}
        with served(folder / "undisturbed") as (service, state):
            client = service.client()
            for entry in HEALTHY:
                references[entry] = submit(client, entry, options.steps)
                assert client.wait(references[entry], 300)["state"] == "finished"
            right = {entry: curve(state, found) for entry, found in references.items()}
        run.tell("the undisturbed runs are done")
        with served(folder / "disturbed") as (service, state):
            _disturb(run, service, state, right)


def _disturb(run: Run, service: Any, state: Path, right: dict[str, Any]) -> None:
    client, options = service.client(), run.options
    crashing = [submit(client, f"{ODD}:segfaults", 10**6, seconds=options.every)]
    healthy = {entry: submit(client, entry, options.steps) for entry in HEALTHY}
    finished, kills, next_kill = 0, 0, time.monotonic() + options.kill
    report = run.report

    def check(entry: str, found: dict[str, Any]) -> None:
        steps = curve(state, found["id"])
        is_right = found["state"] == "finished" and steps == right[entry]
        report.counts["healthy job"][f"{entry}: {'bit-equal' if is_right else 'wrong'}"] += 1
        if not is_right or found["attempts"] != 1:
            wrong = next((ours[0] for ours, theirs in zip(steps, right[entry], strict=False) if ours != theirs), None)
            notes = [each.data.get("text") for each in client.events(found["id"]) if each.kind == "note"]
            report.find(f"{entry}: {found['state']}, {found['attempts']} starts, first wrong at step {wrong}; {notes}")

    with Probes(str(service.url)) as probes:
        while run.has_time:
            time.sleep(0.1)
            for entry, each in healthy.items():
                if (found := client.show(each))["state"] in ENDED:
                    check(entry, found)
                    finished += 1
                    healthy[entry] = submit(client, entry, options.steps)
            if client.show(crashing[-1])["state"] in ENDED:  # Three crashes without a new snapshot: quarantined.
                crashing.append(submit(client, f"{ODD}:segfaults", 10**6, seconds=options.every))
            if time.monotonic() > next_kill and (pid := arbiter_of(service.process.pid)) is not None:
                os.kill(pid, signal.SIGKILL)
                kills, next_kill = kills + 1, time.monotonic() + options.kill
        for entry, each in healthy.items():
            check(entry, client.wait(each, 300))
        found = client.show(crashing[-1])
        histories = [list(client.history(each)) for each in crashing]
    crashes = sum(each["from"] == "running" and "SIGSEGV" in each["cause"] for of in histories for each in of)
    back = [
        after["at"] - before["at"]
        for history in histories
        for before, after in pairwise(history)
        if before["to"] == "queued" and after["to"] == "running" and before["from"] == "running"
    ]
    report.seconds["answer of /readyz"] += probes.seconds
    report.seconds["from a crash to the next start"] += back
    if probes.missed:
        report.find(f"/readyz missed {probes.missed} of {len(probes.seconds)}")
    figures = {
        "segfaults": crashes,
        "jobs that crash, one after the other": len(crashing),
        "step of the crashing job": found["step"],
        "healthy jobs finished": finished + len(healthy),
        "kills of the arbiter": kills,
        "probes missed": f"{probes.missed} of {len(probes.seconds)}",
    }
    report.tables += ["", "| what | figure |", "|---|---|", *(f"| {key} | {value} |" for key, value in figures.items())]
    if not back:
        report.find("nothing crashed")
    left = list(children(service.process.pid))
    report.counts["processes"][f"{len(left)} children of the service at the end"] += 1


CAMPAIGN = Campaign(
    "segfaults",
    _work,
    {
        "minutes": (20.0, "for which the jobs train"),
        "every": (30.0, "seconds from the start of a run to its segfault"),
        "kill": (45.0, "seconds between two kills of the arbiter"),
        "steps": (400, "of a healthy job"),
    },
    is_quiet=False,
)
