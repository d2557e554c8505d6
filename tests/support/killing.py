"""A service in a process of its own that is killed, and all that its clients had been told before.

::

    Served ──── a process: ``asyncpipe serve`` in a folder, started, killed, started again
    Told ────── what clients were answered, and what streams said; ``check`` finds what of it is missing now
    Watch ───── a client that follows one job until the connection breaks, and tells ``Told``

What is compared at the end comes from the files: the loss curve, the last snapshot's tensors.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from preloaded import Program
from store_helpers import check_history

from asyncpipe.service.client import ApiError, JobClient, ServerEvent, UnreachableError
from asyncpipe.service.job_states import JobState, Transition
from asyncpipe.service.store.database import STORE, open_beside
from asyncpipe.service.store.job_records import read_losses
from asyncpipe.train.snapshots.format import read_snapshot
from asyncpipe.train.snapshots.resume import snapshots_in

__all__ = [
    "FINAL",
    "SCRIPT",
    "SECONDS",
    "Served",
    "Told",
    "Watch",
    "curve",
    "make_folder",
    "newest_step",
    "poll",
    "same",
    "serving",
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "charlm" / "charlm.py"
SECONDS = 90.0
"""For another process to get somewhere."""
FINAL = ("finished", "failed", "cancelled")
SCRIPT = "import sys; from asyncpipe import cli; from asyncpipe.cli import serve; {code}; sys.exit(cli.main())"


def make_folder(folder: Path) -> Path:
    """``folder``, with the settings of a service that trains the example, on threads, and the example.

    However often it is killed, that is not held against its jobs.
    """
    (folder / "code").mkdir(parents=True)
    shutil.copy(EXAMPLE, folder / "code")
    (folder / "service.toml").write_text(
        'folder = "state"\nentry_path = "code"\nport = 0\nmetrics_port = "none"\n'
        'devices = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]\n'
        'isolation = "thread"\nmax_attempts = 1000000\n'
        '[entries."charlm:build"]\nfixed = { max_bytes = 50_000 }\n',
        encoding="utf-8",
    )
    return folder


def poll(what: str, is_true: Callable[[], Any], pause: float = 0.01, seconds: float = SECONDS) -> Any:
    """The first true value of ``is_true``: another process gets there in its own time."""
    deadline = time.monotonic() + seconds
    while not (found := is_true()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(pause)
    return found


class Served:
    """A service that runs in ``folder``, until it is killed or has ended."""

    def __init__(self, folder: Path, *options: str, code: str = "pass", is_fresh: bool = False) -> None:
        """``code`` runs in it before it starts. One that is fresh imports all by itself, where memory is measured."""
        self.log = folder / "stderr"
        self.state = folder / "state"
        self.lines: list[str] = []
        self.url: str | None = None
        self.is_up = Event()
        """Set when it has said where it is, or has ended."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCPIPE_")}
        arguments = (SCRIPT.format(code=code), "serve", "--config", "service.toml", *options)
        with self.log.open("a", encoding="utf-8") as errors:
            self.process: Any = (
                subprocess.Popen(
                    [sys.executable, "-c", *arguments],
                    cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
                )
                if is_fresh
                else Program(*arguments, cwd=folder, env=environment, stderr=errors)
            )  # fmt: skip
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            for line in out:
                self.lines.append(line.rstrip("\n"))
                if found := re.match(r"service: (\S+)", line):
                    self.url = found[1]
                    self.is_up.set()
        self.is_up.set()

    def client(self, retries: int = 0) -> JobClient:
        """A client of it, once it serves."""
        assert self.is_up.wait(SECONDS), self.story()
        assert self.url is not None, self.story()
        return JobClient(self.url, retries=retries)

    def line(self, start: str) -> str:
        """The line that begins so, once it is printed."""

        def look() -> str | None:
            found = next((line for line in list(self.lines) if line.startswith(start)), None)
            assert found or self.process.poll() is None or self._reader.is_alive(), self.story()
            return found

        line: str = poll(f"a line that begins with {start!r}", look)
        return line

    def story(self) -> str:
        """What it said, for whoever looks at a test that failed."""
        return f"{self.lines}\n{self.log.read_text(encoding='utf-8')[-5000:]}"

    def kill(self) -> None:
        """End it where it stands."""
        self.process.kill()
        assert self.process.wait(SECONDS) == -signal.SIGKILL, self.story()
        self._reader.join(SECONDS)

    def ends(self) -> int:
        """Its status, once it has ended."""
        status = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return status


@contextmanager
def serving(folder: Path, *options: str, **how: Any) -> Iterator[Served]:
    """A service that has ended, in whatever way, behind the block."""
    served = Served(folder, *options, **how)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
        served.ends()


class Told:
    """What clients were told in the life of a folder, by job; a service that runs in it must know it all."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}
        """What kind of job each is that was acknowledged."""
        self.histories: dict[str, list[dict[str, Any]]] = {}
        self.events: dict[str, dict[int, ServerEvent]] = defaultdict(dict)
        """What streams said, without steps."""
        self.snapshots: dict[str, set[str]] = defaultdict(set)
        self.states: dict[str, tuple[str, ...]] = {}
        """In which of these each is after a restart, for which something was acknowledged."""

    def look(self, client: JobClient, *, restarted: bool = False) -> list[dict[str, Any]]:
        """All jobs, each checked against what was told of it before; raises what a client raises."""
        found = {job["id"]: job for job in client.list()}
        assert not self.jobs.keys() - found.keys(), "jobs are missing that were acknowledged"
        for job, kind in self.jobs.items():
            history = list(client.history(job))
            before = self.histories.get(job, [])
            assert history[: len(before)] == before, f"{kind}: {before} was told, and now it is {history}"
            _check_legal(job, history)
            if restarted and (states := self.states.pop(job, None)) is not None:
                after = history[len(before) :]
                assert found[job]["state"] in states or any(each["to"] in states for each in after), (
                    kind,
                    states,
                    after,
                )
            self.histories[job] = history
            self.told(job, found[job]["snapshot"])
        return list(found.values())

    def told(self, job: str, snapshot: str | None) -> None:
        """A client was told of ``snapshot``."""
        if snapshot is not None:
            self.snapshots[job].add(snapshot)

    def check_events(self, client: JobClient) -> int:
        """That each event that a stream told is still the event of its number; returns how many there are."""
        for job, told in self.events.items():
            there = {event.id: event for event in client.events(job) if event.kind != "step"}
            for number, event in told.items():
                assert there.get(number) == event, f"event {number} was {event}, and is {there.get(number)}"
            states = [
                (event.id, event.data["from"], event.data["to"]) for event in there.values() if event.kind == "state"
            ]
            wanted = [(each["sequence"], each["from"], each["to"]) for each in self.histories[job]]
            assert states == wanted, "transitions are not in the log once each"
        return sum(map(len, self.events.values()))

    def check_snapshots(self, jobs: Path, all_stay: set[str]) -> int:
        """That each snapshot that was told is there and whole, or, where only the last ones stay, a newer one is."""
        for job, names in self.snapshots.items():
            there = {path.name: path for path in snapshots_in(jobs / job / "snapshots")}
            if self.jobs[job] in all_stay:
                assert not names - there.keys(), "snapshots are missing that were acknowledged"
            assert _step(max(there, key=_step)) >= max(map(_step, names))
            for name in names & there.keys():
                assert read_snapshot(there[name]).step == _step(name)
        return sum(map(len, self.snapshots.values()))


def _check_legal(job: str, history: list[dict[str, Any]]) -> None:
    states = [(None if row["from"] is None else JobState(row["from"]), JobState(row["to"])) for row in history]
    rows = zip(history, states, strict=True)
    check_history(Transition(row["sequence"], job, *pair, row["at"], row["cause"]) for row, pair in rows)
    sequences = [row["sequence"] for row in history]
    assert sequences == sorted(set(sequences))


class Watch(Thread):
    """A client that follows ``job`` as long as it is served."""

    def __init__(self, url: str, job: str, told: Told) -> None:
        super().__init__(daemon=True)
        self._client = JobClient(url, retries=0)
        self._job = job
        self._told = told
        self.start()

    def run(self) -> None:
        """Until the job or the connection ends."""
        events = self._told.events[self._job]
        try:
            for event in self._client.events(self._job, after=max(events, default=0)):
                if event.kind != "step":
                    events[event.id] = event
                if event.kind == "snapshot":
                    self._told.told(self._job, str(event.data["name"]))
        except (UnreachableError, ApiError):
            pass


# What is on disk


def curve(state: Path, job: str) -> list[tuple[int, float, float, int]]:
    """Every step of the job, as the store has it: number, loss, learning rate, tokens."""
    with open_beside(state / STORE) as connection:
        rows = read_losses(connection, job, 0, 10**6)
    return [(row.step, row.loss, row.learning_rate, row.tokens) for row in rows]


def newest_step(state: Path, job: str) -> int:
    """Of the job's snapshots; 0 without any."""
    folder = state / "jobs" / job / "snapshots"
    there = snapshots_in(folder) if folder.exists() else []
    return _step(there[-1].name) if there else 0


def same(one: tuple[Path, str], other: tuple[Path, str]) -> int:
    """Assert that the last snapshots of two jobs have the same bits; returns of how many tensors."""
    states = [read_snapshot(snapshots_in(state / "jobs" / job / "snapshots")[-1]) for state, job in (one, other)]
    assert states[0].step == states[1].step
    count = 0
    for part in ("model", "optimizer"):
        tensors = [dict(_tensors(each.states[part])) for each in states]
        assert tensors[0].keys() == tensors[1].keys()
        for name, tensor in tensors[0].items():
            assert torch.equal(tensor, tensors[1][name]), f"{part}: {name} differs"
            count += 1
    return count


def _tensors(value: Any, where: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, dict | list | tuple):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(each, f"{where}.{key}")


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))
