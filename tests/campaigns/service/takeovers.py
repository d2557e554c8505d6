"""A service is killed at random instants, and its standby takes over: ``ASYNCPIPE_KILLS`` times (20)."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median

from kill_campaign import ISOLATION, MOST_STEPS, job, uninterrupted
from killing import Served, curve, make_folder, poll, same, serving

from asyncpipe.service.client import JobClient
from tests.campaigns.service import Row

__all__ = ["run"]

KINDS = ("charlm", "second")
MOST_SECONDS = 10.0


def run(folder: Path) -> list[Row]:
    """Two rows: the bits, and the times."""
    kills, chance = (
        int(os.environ.get("ASYNCPIPE_KILLS", "20")),
        Random(int(os.environ.get("ASYNCPIPE_KILL_SEED", "6"))),
    )
    steps = 24 + 9 * kills
    reference, killed = make_folder(folder / "reference"), make_folder(folder / "killed")
    ready: list[float] = []
    stepped: list[float] = []
    with ThreadPoolExecutor(1) as beside, ExitStack() as stack:
        wanted = beside.submit(uninterrupted, reference, steps)

        def started(number: int, *options: str) -> Served:
            return stack.enter_context(serving(killed, "--isolation", ISOLATION[number % 2], *options))

        active = started(0)
        jobs = {kind: active.client().submit(job(kind, steps))["id"] for kind in KINDS}

        def progress() -> int:
            return sum(rows[-1][0] for each in jobs.values() if (rows := curve(active.state, each)))

        def is_idle() -> bool:
            return progress() == steps + steps * 3 // 4

        for number in range(1, kills + 1):
            standby = started(number, "--standby")
            standby.line("standby: ")
            until = progress() + chance.randint(1, MOST_STEPS)
            poll("steps", lambda until=until: is_idle() or progress() >= until)
            time.sleep(chance.uniform(0, 0.5))
            active.kill()
            began = time.monotonic()
            standby.line("ready: ")
            ready.append(time.monotonic() - began)
            active = standby
            if not is_idle():
                client = active.client()
                poll("a step", lambda client=client: any(_goes_on(client, each) for each in jobs.values()))
                stepped.append(time.monotonic() - began)
        client = active.client()
        for each in jobs.values():
            assert client.wait(each, 900)["state"] == "finished", active.story()
        active.process.send_signal(signal.SIGTERM)
        assert active.ends() == 0, active.story()
        ids, tensors = wanted.result(), 0
        for kind, each in jobs.items():
            right = curve(reference / "state", ids[kind])
            assert curve(active.state, each) == right, f"the losses of {kind} differ"
            tensors += same((active.state, each), (reference / "state", ids[kind]))
    assert "Traceback" not in (killed / "stderr").read_text(encoding="utf-8")
    what = f"{kills} x kill -9, a standby takes over"
    both = {"ready": ready, "the first step": stepped}
    times = "; ".join(f"{name} {median(found):.1f} s, at most {max(found):.1f} s" for name, found in both.items())
    return [
        Row(what, f"{steps * 7 // 4} losses and {tensors} tensors of {len(jobs)} jobs are bit-equal", held=True),
        Row("and so soon", f"after the kill, median: {times}", held=max(ready) < MOST_SECONDS),
    ]


def _goes_on(client: JobClient, job: str) -> bool:
    """Whether the job has done a step since the service began."""
    found = client.show(job)
    return found["state"] == "finished" or found["steps_per_second"] is not None
