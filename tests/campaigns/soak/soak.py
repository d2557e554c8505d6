"""A soak: a training service under load and faults for half an hour, sampled all the while.

::

    crowd (jobs.py)        ── submit, follow ──▶ ┌─────────────────┐ ◀── deal ── chaos (faults.py)
                                                 │ TrainingService │                │ arms
    scrapes ── GET /metrics ───────────────────▶ │ with its API    │ ◀── take ── FAULTS (workload.py)
                                                 └─────────────────┘
    samples (samples.py): memory, objects, threads, files … ─▶ slopes ─▶ report (report.py)

Everything runs in one process, so that the samples see whatever any part leaves behind. Ctrl-C ends a soak early, with
a report of the time until then.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from urllib.request import urlopen

from prometheus_client import CollectorRegistry

from asyncpipe.bench import Figures, Progress
from asyncpipe.observe.metrics import serve_metrics
from asyncpipe.runtime.portal import new_event_loop
from asyncpipe.service.client import JobClient
from asyncpipe.service.http import serve_api
from asyncpipe.service.job_states import FINAL_STATES
from asyncpipe.service.malloc import limit_arenas
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.training_service import TrainingService
from tests.campaigns.soak.faults import Chaos
from tests.campaigns.soak.jobs import DEVICES, LIMITED, Crowd, Tally, account, submission, unfinished
from tests.campaigns.soak.samples import MEASURES, measure, trend
from tests.campaigns.soak.workload import ENTRY, FAULTS

__all__ = ["SoakSize", "run_soak"]

MEMORY_LIMIT = 2**30
LAST_SECONDS = 120.0
"""At the end, for all jobs to end and one more to be trained."""


@dataclass(frozen=True, slots=True)
class SoakSize:
    """How long the soak takes, and how often each thing happens."""

    seconds: float = 1800.0
    sample_every: float = 10.0
    fault_every: float = 2.0
    """Mean seconds between two faults."""
    scrape_every: float = 5.0
    fill_every: float = 1.0
    watchdog_floor: float = 3.0
    seed: int = 0


def run_soak(size: SoakSize, progress: Progress) -> Figures:
    """Samples and their trends, faults, how the jobs ended, and every problem found, as plain data for the report."""
    limit_arenas(len(DEVICES) + 1)  # As `asyncpipe serve` does.
    FAULTS.restart()
    with TemporaryDirectory(prefix="asyncpipe-soak-") as folder, _counted_log() as log:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            figures = runner.run(_Soak(Path(folder), size, progress).run())
        return figures | {"log": dict(log.most_common()), "threads_left": _threads_left()}


class _Soak:
    """One soak, on the event loop of an application that embeds the service."""

    def __init__(self, folder: Path, size: SoakSize, progress: Progress) -> None:
        self._size = size
        self._progress = progress
        self._random = Random(size.seed)
        self._tally = Tally()
        self._times: list[float] = []
        self._samples: dict[str, list[float]] = {}
        self._stop = asyncio.Event()
        self._settings = ServiceSettings(
            folder=folder / "service",
            devices=(*DEVICES, LIMITED),
            entries=[ENTRY],
            max_running=5,
            memory_limit={LIMITED: MEMORY_LIMIT},
            port=0,
            metrics_port=None,
            requests_per_second=1e6,
            burst=10**6,
            watchdog_floor=size.watchdog_floor,
        )

    async def run(self) -> Figures:
        """The figures, except those that are known only after the loop has ended."""
        begun = time.perf_counter()
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(TrainingService(self._settings))
            url = await stack.enter_async_context(serve_api(service, self._settings))
            scrape = stack.enter_context(_scraped(service))
            chaos = Chaos(service, self._settings, url, self._tally, self._random)
            crowd = Crowd(service, JobClient(url), self._tally, self._random)
            with _stopped_by_signal(self._stop):
                async with _repeated(self._work(chaos, crowd, scrape), self._tally):
                    await self._watch(begun)
            soaked = time.perf_counter() - begun
            await chaos.close()
            ended = await self._end(service)
            await crowd.close()
            accounted = await account(service, self._progress)
        return {
            "seconds": soaked,
            "interrupted": self._stop.is_set(),
            "times": self._times,
            "samples": self._samples,
            "trends": {name: trend(self._times, self._samples[name]) for name in MEASURES if name in self._samples},
            "faults": chaos.counts(),
            "jobs": accounted,
            "done": dict(self._tally.done.most_common()),
            "refused": dict(self._tally.refused.most_common()),
            "surprises": dict(self._tally.surprises.most_common()),
            **ended,
        }

    def _work(
        self, chaos: Chaos, crowd: Crowd, scrape: Callable[[], Awaitable[None]]
    ) -> list[tuple[Callable[[], float], Callable[[], Awaitable[None]]]]:
        """Periodic work: pairs of a function that gives the next pause in seconds, and the work."""
        size, random = self._size, self._random

        async def deal() -> None:
            chaos.deal()

        return [
            (lambda: size.fill_every, crowd.fill),
            (lambda: random.uniform(0.5, 1.5) * size.fault_every, deal),
            (lambda: size.scrape_every, scrape),
        ]

    async def _watch(self, begun: float) -> None:
        """Take samples until the time is over or Ctrl-C is pressed."""
        while not self._stop.is_set() and (passed := time.perf_counter() - begun) < self._size.seconds:
            due = min(self._size.sample_every * (len(self._times) + 1), self._size.seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - passed)):
                    await self._stop.wait()
            held = await asyncio.to_thread(measure)
            self._times.append(time.perf_counter() - begun)
            for name, value in held.items():
                self._samples.setdefault(name, []).append(value)
            told = ", ".join(f"{held[name]:,.0f} {text}" for name, text in MEASURES.items() if name in held)
            self._progress(f"{self._times[-1] / 60:.1f} of {self._size.seconds / 60:g} minutes: {told}")

    async def _end(self, service: TrainingService) -> Figures:
        """Cancel all jobs, train one more, and look for what is left over."""
        self._progress("cancelling all jobs, then training one more")
        found: Figures = {"last_job": "did not end", "status": ""}
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                while there := await unfinished(service):
                    for record in there:
                        if record.asked is None or record.asked not in FINAL_STATES:
                            await self._tally.ask("cancel", service.cancel(record.id, "the soak ends"))
                    await asyncio.sleep(0.05)
                last, _ = await service.submit(submission("last", 10, 0))
                async for _ in service.follow(last.id):
                    pass
                found["last_job"] = str((await service.get(last.id)).state)
        found["hung_tasks"] = _hung_tasks(service)
        found["doubled_threads"] = await _none_left(_doubled)
        found["status"] = service.status().reason
        return found


# Concurrent work


@asynccontextmanager
async def _repeated(
    work: list[tuple[Callable[[], float], Callable[[], Awaitable[None]]]], tally: Tally
) -> AsyncIterator[None]:
    """Run ``work`` periodically during the block; an exception becomes a surprise in the report."""

    async def repeat(pause: Callable[[], float], do: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await do()
            except Exception as error:  # noqa: BLE001 - a part of the report
                tally.surprises[f"{type(error).__name__}: {error}"[:200]] += 1
            await asyncio.sleep(pause())

    tasks = [asyncio.create_task(repeat(*each)) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextmanager
def _scraped(service: TrainingService) -> Iterator[Callable[[], Awaitable[None]]]:
    """A function that fetches the service's metrics over HTTP, as Prometheus does."""
    registry = CollectorRegistry()
    registry.register(service.collector)
    with serve_metrics(registry, 0) as server:

        def fetch() -> None:
            with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
                answer.read()

        yield lambda: asyncio.to_thread(fetch)


@contextmanager
def _stopped_by_signal(stop: asyncio.Event) -> Iterator[None]:
    """Let Ctrl-C set ``stop`` during the block; a second Ctrl-C has its usual effect."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, end)
    except (ValueError, RuntimeError, NotImplementedError):  # Not in the main thread, or not supported here.
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _LogCounter(logging.Handler):
    """Counts log messages by their format string."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__(logging.WARNING)
        self._counts = counts

    def emit(self, record: logging.LogRecord) -> None:
        self._counts[f"{record.levelname} {record.name}: {record.msg}"[:200]] += 1


@contextmanager
def _counted_log() -> Iterator[Counter[str]]:
    """Count all warnings and errors during the block instead of showing them: faults cause thousands."""
    root, counts = logging.getLogger(), Counter[str]()
    before, counting = root.handlers[:], _LogCounter(counts)
    root.handlers[:] = [counting]
    try:
        yield counts
    finally:
        root.handlers[:] = before


# Leftovers


def _hung_tasks(service: TrainingService) -> float:
    """How many tasks the watchdog gave up, from the metrics."""
    families = {family.name: family for family in service.collector.collect()}
    return float(families["asyncpipe_hung_tasks"].samples[0].value)


def _doubled() -> list[str]:
    """Devices with more than one thread: an abandoned thread lives until its hung task returns."""
    threads = Counter(thread.name for thread in threading.enumerate())
    return sorted(name for name, count in threads.items() if name.startswith("asyncpipe cpu:") and count > 1)


def _threads_left() -> list[str]:
    """The package's threads that outlived the service and its loop."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("asyncpipe"))


async def _none_left(find: Callable[[], list[str]]) -> list[str]:
    """What ``find`` still finds after ten seconds: threads need a moment to end."""
    for _ in range(200):
        if not find():
            break
        await asyncio.sleep(0.05)
    return find()
