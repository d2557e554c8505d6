"""A soak: a training service under load and faults for half an hour, sampled all the while.

The service runs in this process, on a loop in a thread of its own, so that the samples see whatever any part leaves
behind. The soak itself is one thread that does what is due next: submit jobs, deal a fault, scrape the metrics, take a
sample. It speaks to the service as clients do, over HTTP. Ctrl-C ends it early, with a report.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.registry import Collector

from asyncpipe.service.client import JobClient
from asyncpipe.service.client.errors import ApiError
from asyncpipe.service.http import serve_api
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.training_service import TrainingService
from tests.campaigns.harness import Campaign, Run
from tests.campaigns.soak.samples import measure, trend
from tests.campaigns.soak.workload import ENTRY, FAULTS, KINDS

__all__ = ["CAMPAIGN", "Soak"]

DEVICES = ("cpu:0", "cpu:1")
LONG = {"foreground": {}, "heavy": {"weight": 3.0}, "background": {"priority_class": "background"}}
"""Jobs of which one each always runs, with what they add to the submission."""
SMALL, MOST_SMALL = "small", 2
LONG_STEPS, EVERY = 2000, 100
SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1")
UNFINISHED = ("queued", "running", "paused")
LEAST_SAMPLES = 3
"""So many are taken, however long that takes on a machine that is busy."""
LAST_SECONDS = 120.0
"""At the end, for all jobs to end and one more to be trained."""


class Soak:
    """``run`` it; then the report says what was found."""

    def __init__(
        self,
        run: Run,
        *,
        sample_every: float = 10.0,
        fault_every: float = 2.0,
    ) -> None:
        self.samples: list[tuple[float, dict[str, float]]] = []
        counts, self._problem = run.report.counts, run.report.find
        self.dealt, self.states, self.refused, self.log = (counts[k] for k in ("fault", "jobs", "refused", "log"))
        self._seconds, self._run = 60 * run.options.minutes, run
        self._sample_every, self._fault_every = sample_every, fault_every
        self._random = Random(run.options.seed)
        self._submitted = 0
        self._deck: list[str] = []
        self._paused: dict[str, float] = {}
        self._folder = Path()
        self._client = JobClient("http://127.0.0.1")
        self._scrape: Callable[[], object] = list

    def run(self) -> None:
        """Soak a service. Takes the soak's seconds and up to two minutes more."""
        FAULTS.released.clear()
        with _counted_log(self.log), TemporaryDirectory(prefix="asyncpipe-soak-") as folder:
            self._folder = Path(folder) / "service"
            with _served(self._folder) as (url, collector):
                self._client = JobClient(url)
                self._scrape = lambda: list(collector.collect())
                with suppress(KeyboardInterrupt):
                    self._work()
                FAULTS.clear()
                self._end()
                self._check()
        left = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("asyncpipe"))
        if left:
            self._problem(f"threads outlived the service: {', '.join(left)}")
        self._show_trends()

    # What is done again and again

    def _work(self) -> None:
        begun = time.monotonic()
        periodic: list[tuple[float, Callable[[], object]]] = [
            (1.0, self._fill),
            (5.0, self._scrape),
            (self._fault_every, self._deal),
            (self._sample_every, lambda: self._sample(begun)),
        ]
        due = [period for period, _ in periodic]
        while (now := time.monotonic() - begun) < self._seconds or len(self.samples) < LEAST_SAMPLES:
            following = min(range(len(due)), key=due.__getitem__)
            if due[following] > now:
                time.sleep(due[following] - now)
                continue
            period, work = periodic[following]
            due[following] = now + period
            self._ask("periodic work", work)

    def _ask(self, what: str, request: Callable[[], Any]) -> Any:
        """The result of ``request``; a refusal in the job's state is counted, any other error is a problem."""
        try:
            return request()
        except ApiError as error:
            if error.status != 409:
                self._problem(f"{what}: {error}")
            self.refused[what] += 1
        except Exception as error:  # noqa: BLE001 - a part of the report
            self._problem(f"{what}: {type(error).__name__}: {error}")
        return None

    def _sample(self, begun: float) -> None:
        held = measure()
        self.samples.append((time.monotonic() - begun, held))
        self._run.tell(
            f"{self.samples[-1][0] / 60:.1f} minutes: " + ", ".join(f"{v:,.0f} {k}" for k, v in held.items())
        )

    def _fill(self) -> None:
        """Submit the long jobs that have ended, and a small one if there are few; resume what has paused enough."""
        there = Counter(job["name"] for job in self._client.list(UNFINISHED))
        for name, special in LONG.items():
            if not there[name]:
                self._submit(name, LONG_STEPS, **special)
        if there[SMALL] < MOST_SMALL:
            self._submit(SMALL, self._random.randint(5, 40))
        for job, until in list(self._paused.items()):
            if time.monotonic() > until:
                del self._paused[job]
                self._ask("resume", lambda job=job: self._client.resume(job))

    def _submit(self, name: str, steps: int, **special: Any) -> dict[str, Any]:
        """Submit a job, twice under one key: there must be one job."""
        self._submitted += 1
        key, job = (
            f"soak-{self._submitted}",
            {
                "name": name,
                "entry": ENTRY,
                "pipeline": {"devices": list(DEVICES), "microbatches": 4},
                "training": {"steps": steps, "batch_size": 8, "learning_rate": 3e-3, "seed": self._submitted},
                "snapshots": {"every": EVERY, "keep": 2},
                "faults": {"non_finite": "skip", "snapshot_retries": 1000 if name in LONG else 1},
                **special,
            },
        )
        first, second = self._client.submit(job, key), self._client.submit(job, key)
        if first["id"] != second["id"]:
            self._problem(f"the key {key} made two jobs")
        return first

    # Faults

    def _deal(self) -> None:
        """Deal the next fault of a deck that is shuffled, dealt one by one, and shuffled again."""
        actions: dict[str, Callable[[str], object]] = {
            "pause": self._pause,
            "cancel": self._client.cancel,
            "schedule changed": lambda job: self._client.change_schedule(job, self._random.choice(SCHEDULES)),
            "snapshots refused by the folder": self._refuse_snapshots,
            "client leaves a stream": self._leave_stream,
            "client leaves in its request": self._leave_request,
        }
        if not self._deck:
            self._deck = [*KINDS, *actions]
            self._random.shuffle(self._deck)
        kind = self._deck.pop()
        self.dealt[kind] += 1
        if kind in KINDS:
            FAULTS.arm(kind)
        elif jobs := [job["id"] for job in self._client.list(("queued", "running"))]:
            self._ask(kind, lambda: actions[kind](self._random.choice(jobs)))

    def _pause(self, job: str) -> None:
        self._client.pause(job)
        self._paused[job] = time.monotonic() + self._random.uniform(0, 4)

    def _refuse_snapshots(self, job: str) -> None:
        """Make a folder under the names of the job's next snapshots, so that writing one of them fails."""
        folder, step = self._folder / "jobs" / job / "snapshots", self._client.show(job)["step"]
        for number in range(step + 1, step + EVERY + 1):
            with suppress(OSError):
                (folder / f"step-{number}.incomplete").mkdir()

    def _leave_stream(self, job: str) -> None:
        """Read the first of a job's events, and close the connection."""
        events = self._client.events(job)
        next(events, None)
        events.close()

    def _leave_request(self, _job: str) -> None:
        """Break the connection in the middle of a request that submits a job."""
        address = urlsplit(self._client.url)
        with socket.create_connection((address.hostname, address.port), 10) as connection:
            head = f"POST /v1/jobs HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            connection.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"name": "half'.encode())

    # At the end

    def _end(self) -> None:
        """Cancel all jobs and train one more, which must finish."""
        for job in list(self._client.list(UNFINISHED)):
            self._ask("cancel", lambda job=job: self._client.cancel(job["id"]))
        last = self._client.wait(self._submit("last", 10)["id"], LAST_SECONDS)
        if last["state"] != "finished":
            self._problem(f"the last job, which met no faults, {last['state']}: {last['cause']}")

    def _check(self) -> None:
        """Each finished job has every step once; at most the watchdog's share of hung tasks was given up."""
        for job in self._client.list():
            self.states[f"{job['name']}: {job['state']}"] += 1
            if job["state"] == "finished":
                steps = [row["step"] for row in self._client.losses(job["id"])]
                if steps != list(range(1, self._client.show(job["id"])["document"]["training"]["steps"] + 1)):
                    self._problem(f"the loss curve of {job['id']} lacks steps, or has some twice")

    def _show_trends(self) -> None:
        """How each sampled quantity developed."""
        times = [second for second, _ in self.samples]
        lines = ["", "| | first | last | per hour | verdict |", "|---|---|---|---|---|"]
        for name in self.samples[0][1] if self.samples else ():
            values = [held[name] for _, held in self.samples]
            found = trend(times, values)
            slope = f"{found.slope:+,.1f} ± {2 * found.error:,.1f}"
            lines.append(f"| {name} | {values[0]:,.0f} | {values[-1]:,.0f} | {slope} | {found.verdict} |")
        self._run.report.tables += [*lines, "", f"Faults taken by jobs: {dict(FAULTS.taken)}"]


@contextmanager
def _served(folder: Path) -> Iterator[tuple[str, Collector]]:
    """A service with its API, on a loop in a thread of its own: its URL and the collector of its metrics."""
    settings = ServiceSettings(
        folder=folder, devices=DEVICES, entries=[ENTRY], isolation="thread", max_running=5, port=0, watchdog_floor=3.0
    )
    up: list[tuple[str, Collector]] = []
    is_up, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with TrainingService(settings) as service, serve_api(service, settings) as url:
            up.append((url, service.collector))
            is_up.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="soaked service")
    thread.start()
    try:
        while not is_up.wait(0.1):
            assert thread.is_alive(), "the service did not start"
        yield up[0]
    finally:
        stop.set()
        thread.join()


@contextmanager
def _counted_log(counts: Counter[str]) -> Iterator[None]:
    """Count all warnings and errors during the block instead of showing them: faults cause thousands."""

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            counts[f"{record.levelname} {record.name}: {record.msg}"[:200].replace("|", "¦")] += 1

    root = logging.getLogger()
    before = root.handlers[:]
    root.handlers[:] = [Counting(logging.WARNING)]
    try:
        yield
    finally:
        root.handlers[:] = before


CAMPAIGN = Campaign("soak", lambda run: Soak(run).run(), is_quiet=False)
