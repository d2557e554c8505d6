"""A service that is killed at any instant goes on by itself, and what it trains is what it would have trained anyway.

``asyncpipe serve`` runs the example as four stages, with dropout, and a smaller job beside it. It is killed again and
again, at random or aimed at something that is under way, and started again with the same settings; no job is submitted
again. In the end the loss curve and the last snapshot have the bits of a run that was never interrupted, and all that
clients had been told is there. ``ASYNCPIPE_KILLS`` is the number of kills, ``ASYNCPIPE_KILL_SEED`` draws the instants.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
from killing import FINAL, Served, Told, Watch, curve, make_folder, newest_step, poll, same, serving

from asyncpipe.service.client import ApiError, JobClient, UnreachableError

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="this system has no SIGKILL"),
    pytest.mark.skipif(
        find_spec("fastapi") is None or find_spec("pydantic_settings") is None,
        reason="a service needs FastAPI and pydantic-settings: pip install -e '.[service]'",
    ),
]

KILLS = int(os.environ.get("ASYNCPIPE_KILLS", "3"))
SEED = int(os.environ.get("ASYNCPIPE_KILL_SEED", "6"))
STEPS = 24 + 9 * KILLS
MOST_STEPS = 15
"""Between a start and a kill that is aimed at a step."""
EVERY = 5
STARTING_SECONDS = 2.5


def job(kind: str) -> dict[str, Any]:
    """What is submitted of each kind: the example, a smaller one, and a quick one that clients come with later."""
    width, blocks, devices, schedule, steps, seed, keeps = {
        "charlm": (16, 4, 4, "1f1b", STEPS, 0, {"every": EVERY, "keep_every": 1}),
        "second": (8, 2, 2, "gpipe", STEPS * 3 // 4, 1, {"every": 4, "keep": 1}),
        "extra": (8, 1, 1, "gpipe", 6, 2, {"every": 2, "keep_every": 1}),
    }[kind]
    shape = {"width": width, "blocks": blocks, "heads": 2, "context": 16, "dropout": 0.1, "sample_length": 2}
    pipeline = {"devices": [f"cpu:{number}" for number in range(devices)], "microbatches": 4, "schedule": schedule}
    training = {"steps": steps, "batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 10, "clip": 1.0, "seed": seed}
    tables = {"parameters": shape, "pipeline": pipeline, "training": training, "snapshots": keeps}
    return {"name": kind, "entry": "charlm:build", **tables}


AIMS = ("snapshot", "request", "starting", "step", "request", "recovering", "snapshot", "step")
"""At what the kills are aimed, in turn."""


class Campaign:
    """Kills one service again and again, and keeps count."""

    def __init__(self, folder: Path, chance: Random) -> None:
        self.folder = folder
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

    def life(self, aim: str | None) -> None:
        """Start the service, let it go on, and kill it at ``aim``; ``None``: see all jobs end."""
        self.unanswered = self.is_answered = False
        store = self._store()
        with serving(self.folder) as served:
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
            self._until_step()
            if aim == "request":
                self._request(client)

    def _begin(self, client: JobClient) -> list[dict[str, Any]]:
        """All jobs; those that were paused go on again."""
        jobs = self.told.look(client, restarted=True)
        if not self.told.jobs:
            for kind in ("charlm", "second"):
                self.told.jobs[client.submit(job(kind), kind)["id"]] = kind
        for each in jobs:
            # A submission that was not answered may have been done.
            self.told.jobs.setdefault(each["id"], each["name"])
            if each["state"] == "paused":
                client.resume(each["id"])
        return self.told.look(client)

    def _finish(self, served: Served, client: JobClient) -> None:
        for each in list(self.told.jobs):
            assert client.wait(each, 240)["state"] in ("finished", "cancelled"), served.story()
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
                self.told.jobs[client.submit(job("extra"), key)["id"]] = "extra"
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
        return bool(self.told.jobs) and self._progress() == STEPS + STEPS * 3 // 4

    def _incomplete(self) -> bool:
        return any((self.state / "jobs").glob("*/snapshots/*.incomplete"))

    def _store(self) -> tuple[int, int] | None:
        try:
            found = (self.state / "jobs.sqlite3-wal").stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_size


def uninterrupted(folder: Path) -> dict[str, str]:
    """One job of each kind, done without a kill in ``folder``."""
    with serving(folder) as served:
        client = served.client()
        ids = {kind: client.submit(job(kind))["id"] for kind in ("charlm", "second", "extra")}
        for each in ids.values():
            assert client.wait(each, 60 + 5 * KILLS)["state"] == "finished", served.story()
        served.process.send_signal(signal.SIGTERM)
        assert served.ends() == 0, served.story()
    return ids


@pytest.mark.timeout(120 + 30 * KILLS)
def test_the_service_goes_on_by_itself_and_what_it_trains_is_the_same_to_the_last_bit(tmp_path, capsys):
    campaign = Campaign(make_folder(tmp_path / "killed"), Random(SEED))
    reference = make_folder(tmp_path / "reference")
    with ThreadPoolExecutor(1) as beside:
        wanted = beside.submit(uninterrupted, reference)
        for number in range(KILLS):
            campaign.life(AIMS[number % len(AIMS)])
        campaign.life(None)
        ids = wanted.result()
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
    snapshots = campaign.told.check_snapshots(campaign.state / "jobs", {"charlm", "extra"})
    log = (campaign.folder / "stderr").read_text(encoding="utf-8")
    assert "Traceback" not in log, log[-5000:]
    with capsys.disabled():
        print(f"\n{sum(campaign.moments.values())} kills (seed {SEED}) of {len(campaign.told.jobs)} jobs, when")
        for moment, count in campaign.moments.most_common():
            print(f"  {count:3} x {moment}")
        print(f"  {campaign.redone} steps were done again; {tensors} tensors and all losses have the same bits;")
        print(f"  {campaign.events} events and {snapshots} snapshots that were told are there")
