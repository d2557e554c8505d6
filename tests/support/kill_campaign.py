"""A service that is killed again and again, or a process of one of its jobs, and what is compared at the end.

Every other life runs jobs in processes of their own, and the others on threads, so they go from one to the other.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any, NamedTuple

from killing import FINAL, Served, Told, Watch, curve, make_folder, newest_step, poll, same, serving

from asyncpipe.service.client import ApiError, JobClient, UnreachableError

__all__ = ["PROCESS_KILLED", "Kills", "kill_again_and_again"]

MOST_STEPS = 15
"""Between a start and a kill that is aimed at a step."""
EVERY = 5
STARTING_SECONDS = 2.5


def job(kind: str, steps: int) -> dict[str, Any]:
    """What is submitted of each kind: the example, a smaller one, and a quick one that clients come with later."""
    width, blocks, devices, schedule, steps, seed, keeps = {
        "charlm": (16, 4, 4, "1f1b", steps, 0, {"every": EVERY, "keep_every": 1}),
        "second": (8, 2, 2, "gpipe", steps * 3 // 4, 1, {"every": 4, "keep": 1}),
        "extra": (8, 1, 1, "gpipe", 6, 2, {"every": 2, "keep_every": 1}),
    }[kind]
    shape = {"width": width, "blocks": blocks, "heads": 2, "context": 16, "dropout": 0.1, "sample_length": 2}
    pipeline = {"devices": [f"cpu:{number}" for number in range(devices)], "microbatches": 4, "schedule": schedule}
    training = {"steps": steps, "batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 10, "clip": 1.0, "seed": seed}
    tables = {"parameters": shape, "pipeline": pipeline, "training": training, "snapshots": keeps}
    return {"name": kind, "entry": "charlm:build", **tables}


AIMS = ("snapshot", "process", "starting", "step", "request", "process", "recovering", "snapshot", "request", "process")
"""At what the kills are aimed, in turn; every other one at a service whose jobs have processes."""
ISOLATION = ("thread", "process")
PROCESS_KILLED = "the process of a job was killed, and the service was not"


class Campaign:
    """Kills one service again and again, and keeps count."""

    def __init__(self, folder: Path, chance: Random, steps: int) -> None:
        """``steps`` are those of the larger job."""
        self.folder = folder
        self.steps = steps
        self.state = folder / "state"
        self.chance = chance
        self.told = Told()
        self.moments: Counter[str] = Counter()
        """What went on when it was killed."""
        self.redone = self.extras = self.events = 0
        self.threads: list[Thread] = []
        """Clients whose connections break when the service is killed."""
        self.unanswered = self.is_answered = False
        """Of the request at which a kill was aimed."""

    @property
    def kills(self) -> int:
        """How often something was killed so far."""
        return sum(self.moments.values())

    def life(self, aim: str | None, isolation: str) -> None:
        """Start the service, let it go on, and kill it at ``aim``; ``None``: see all jobs end."""
        self.unanswered = self.is_answered = False
        store = self._store()
        with serving(self.folder, "--isolation", isolation) as served:
            if aim == "starting":
                time.sleep(self.chance.uniform(0, STARTING_SECONDS))
            elif aim == "recovering":
                poll("the store is open", lambda: self._store() != store, 0.0005)
                time.sleep(self.chance.uniform(0, 0.03))
            else:
                self._serve(served, aim)
            if aim is not None:
                was_up = served.url is not None
                served.kill()
                self._count("up" if was_up else "starting" if self._store() == store else "recovering")
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        self.threads.clear()

    def _serve(self, served: Served, aim: str | None) -> None:
        client = served.client()
        for each in self._begin(client):
            if each["state"] not in FINAL:
                self.threads.append(Watch(client.url, each["id"], self.told))
        if aim is None:
            self._finish(served, client)
        elif aim == "snapshot":
            self._until_snapshot()
        else:
            if aim == "process":
                self._until_step()
                self._kill_process(served)
            self._until_step()
            if aim == "request":
                self._request(client)

    def _begin(self, client: JobClient) -> list[dict[str, Any]]:
        """All jobs; those that were paused go on again."""
        jobs = self.told.look(client, restarted=True)
        if not self.told.jobs:
            for kind in ("charlm", "second"):
                self.told.jobs[client.submit(job(kind, self.steps), kind)["id"]] = kind
        for each in jobs:
            # A submission that was not answered may have been done.
            self.told.jobs.setdefault(each["id"], each["name"])
            if each["state"] == "paused":
                client.resume(each["id"])
        return self.told.look(client)

    def _finish(self, served: Served, client: JobClient) -> None:
        for each in list(self.told.jobs):
            assert client.wait(each, 900)["state"] in ("finished", "cancelled"), served.story()
        self.told.look(client)
        self.events = self.told.check_events(client)
        served.process.send_signal(signal.SIGTERM)
        assert served.ends() == 0, served.story()

    # What a kill is aimed at

    def _until_step(self) -> None:
        wanted = self._progress() + self.chance.randint(1, MOST_STEPS)
        poll("steps", lambda: self._is_idle() or self._progress() >= wanted)
        # Without it, every kill would come at the same place, behind the line of a step.
        time.sleep(self.chance.uniform(0, 0.08))

    def _until_snapshot(self) -> None:
        for _ in range(self.chance.randint(1, 4)):
            poll("no snapshot", lambda: not self._incomplete(), 0.0005)
            poll("a snapshot", lambda: self._incomplete() or self._is_idle(), 0.0005)
        time.sleep(self.chance.uniform(0, 0.01))

    def _kill_process(self, served: Served) -> None:
        """Kill the process of a job, and wait until the job has another one, or has ended."""
        before = job_processes(served.process.pid)
        if not before:
            return
        job = self.chance.choice(sorted(before))
        with suppress(ProcessLookupError):  # It has just ended by itself.
            os.kill(before[job], signal.SIGKILL)
            self.moments[PROCESS_KILLED] += 1
        poll("another process", lambda: self._is_idle() or job_processes(served.process.pid).get(job) != before[job])

    def _request(self, client: JobClient) -> None:
        """Ask for something; the kill comes before, while or after it is done, which ends the thread that asks."""
        jobs = [each for each in self.told.look(client) if each["state"] not in FINAL]
        extras = [each["id"] for each in jobs if each["name"] == "extra"]
        what = self.chance.choice(("submit", "submit", "pause", "pause", "cancel"))
        whom = self.chance.choice(extras or [None]) if what == "cancel" else None
        if what == "pause" and jobs:
            whom = self.chance.choice(jobs)["id"]
        self.extras += 1
        sent = Event()
        thread = Thread(target=self._ask, args=(client, what, whom, f"extra {self.extras}", sent), daemon=True)
        self.threads.append(thread)
        self.unanswered = True
        store = self._store()
        thread.start()
        sent.wait(30)
        when = self.chance.choice(("soon", "written", "answered"))
        if when == "soon":
            time.sleep(self.chance.uniform(0, 0.02))
        elif when == "written":
            poll("the store is written", lambda: self._store() != store or not thread.is_alive(), 0.0002)
        else:
            thread.join(30)

    def _ask(self, client: JobClient, what: str, whom: str | None, key: str, sent: Event) -> None:
        sent.set()
        try:
            if whom is None:
                self.told.jobs[client.submit(job("extra", self.steps), key)["id"]] = "extra"
            elif what == "pause":
                client.pause(whom)
                self.told.states[whom] = ("paused", "finished")
            else:
                client.cancel(whom)
                self.told.states[whom] = ("cancelled", "finished")
        except UnreachableError:
            return
        except ApiError as error:
            if error.status != 409:  # It had ended just before.
                raise
        self.unanswered, self.is_answered = False, True

    # What is on disk while it runs

    def _count(self, life: str) -> None:
        kinds = self._kinds()
        if life != "up":
            moment = f"the service was {life}"
        elif self.unanswered:
            moment = "a request was not answered yet"
        elif self.is_answered:
            moment = "a request had just been answered"
        elif self._incomplete():
            moment = "a snapshot was being written or removed"
        else:
            moment = "every job was done" if self._is_idle() else "a step, or between two"
        self.moments[moment] += 1
        if life == "up":
            last = {each: rows[-1][0] for each in kinds if (rows := curve(self.state, each))}
            self.redone += sum(max(0, step - newest_step(self.state, each)) for each, step in last.items())

    def _kinds(self) -> dict[str, str]:
        return {each: kind for each, kind in self.told.jobs.items() if kind != "extra"}

    def _progress(self) -> int:
        return sum(rows[-1][0] for each in self._kinds() if (rows := curve(self.state, each)))

    def _is_idle(self) -> bool:
        return bool(self.told.jobs) and self._progress() == self.steps + self.steps * 3 // 4

    def _incomplete(self) -> bool:
        return any((self.state / "jobs").glob("*/snapshots/*.incomplete"))

    def _store(self) -> tuple[int, int] | None:
        try:
            found = (self.state / "jobs.sqlite3-wal").stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_size


def uninterrupted(folder: Path, steps: int) -> dict[str, str]:
    """One job of each kind, done without a kill in ``folder``."""
    with serving(folder) as served:
        client = served.client()
        ids = {kind: client.submit(job(kind, steps))["id"] for kind in ("charlm", "second", "extra")}
        for each in ids.values():
            assert client.wait(each, 60 + steps)["state"] == "finished", served.story()
        served.process.send_signal(signal.SIGTERM)
        assert served.ends() == 0, served.story()
    return ids


def job_processes(service: int) -> dict[str, int]:
    """The processes of the jobs of ``service``, by the job's id."""
    titles = {pid: title(pid) for server in children(service) for pid in children(server)}
    return {name.removeprefix("job "): pid for pid, name in titles.items() if name.startswith("job ")}


def children(pid: int) -> Iterator[int]:
    """The children of a process, and its fork server, which a test starts from a preloaded process."""
    own = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                own |= {*map(int, (task / "children").read_text().split())}
    listed = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    yield from own | {each for each in listed if title(each) == f"fork server of {pid}"}


def title(pid: int) -> str:
    """The last argument of a process, by which it is listed."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[-1].decode(errors="replace").strip()
    return ""


class Kills(NamedTuple):
    """What was done, and compared."""

    moments: Counter[str]
    """What went on, by how often."""
    jobs: int
    redone: int
    """Steps that were done again."""
    tensors: int
    """Those that are the same to the last bit."""
    events: int
    """Those that clients were told, and that are there."""
    snapshots: int


def kill_again_and_again(folder: Path, kills: int, seed: int) -> Kills:
    """Kill a service in ``folder``, and processes of its jobs, at least ``kills`` times; then let all jobs end.

    Raises ``AssertionError`` where anything is lost, or one bit differs from a run that nobody has interrupted.
    """
    steps = 24 + 9 * kills
    campaign = Campaign(make_folder(folder / "killed"), Random(seed), steps)
    reference = make_folder(folder / "reference")
    with ThreadPoolExecutor(1) as beside:
        wanted = beside.submit(uninterrupted, reference, steps)
        life = 0
        while campaign.kills < kills:
            campaign.life(AIMS[life % len(AIMS)], ISOLATION[life % 2])
            life += 1
        campaign.life(None, ISOLATION[life % 2])
        ids = wanted.result()
    tensors = compare(campaign, reference, ids)
    snapshots = campaign.told.check_snapshots(campaign.state / "jobs", {"charlm", "extra"})
    log = (campaign.folder / "stderr").read_text(encoding="utf-8")
    assert "Traceback" not in log, log[-5000:]
    assert kills < len(AIMS) or PROCESS_KILLED in campaign.moments, "no process of a job was found"
    return Kills(campaign.moments, len(campaign.told.jobs), campaign.redone, tensors, campaign.events, snapshots)


def compare(campaign: Campaign, reference: Path, ids: dict[str, str]) -> int:
    """How many tensors are the same to the last bit; all must be."""
    tensors = 0
    for each, kind in campaign.told.jobs.items():
        there, right = curve(campaign.state, each), curve(reference / "state", ids[kind])
        if campaign.told.histories[each][-1]["to"] == "finished":
            assert [row[0] for row in there] == list(range(1, len(right) + 1)), "each step is there once"
            assert there == right, f"the losses of {kind} differ"
            tensors += same((campaign.state, each), (reference / "state", ids[kind]))
        else:
            assert kind == "extra"
            assert there == right[: len(there)]
    assert {"charlm", "second"} <= {campaign.told.jobs[each] for each in campaign.told.histories}
    return tensors
