"""A service under faults for half an hour: does it hold more and more, and is everything in order at its end?

::

    crowd (soak_jobs.py)   ── submit, follow ──▶ ┌─────────────────┐ ◀── deal ── chaos (soak_faults.py)
                                                 │ TrainingService │                │ arms
    scrapes ── GET /metrics ───────────────────▶ │ with its API    │ ◀── take ── FAULTS (soak_entry.py)
                                                 └─────────────────┘
    samples (soak_samples.py): memory, objects, threads, files … ─▶ slopes ─▶ report (soak_report.py)

Everything is in one process, so that whatever any part leaves behind is seen. Ctrl-C ends it early, with the report of
what was so far.
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
from math import isfinite
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from urllib.request import urlopen

from prometheus_client import CollectorRegistry

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.example import example_folder
from asyncpipe.bench.soak_entry import ENTRY, FAULTS
from asyncpipe.bench.soak_faults import Chaos
from asyncpipe.bench.soak_jobs import DEVICES, LIMITED, Crowd, Tally, account, submission, unfinished
from asyncpipe.bench.soak_report import markdown, summary
from asyncpipe.bench.soak_samples import MEASURES, measure, trend
from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics.collector import serve_metrics
from asyncpipe.runtime.portal import new_event_loop
from asyncpipe.service.client import JobClient
from asyncpipe.service.http import serve_api
from asyncpipe.service.job_states import FINAL_STATES
from asyncpipe.service.malloc import limit_arenas
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.training_service import TrainingService

__all__ = ["Size", "run", "show"]

MEMORY_LIMIT = 2**30
LAST_SECONDS = 120.0
"""In which everything must have come to rest at the end, and one more job be trained."""


@dataclass(frozen=True, slots=True)
class Size:
    """How long the soak is, and how dense."""

    seconds: float = 1800.0
    sample_every: float = 10.0
    fault_every: float = 2.0
    """Seconds from one fault to the next, in the mean."""
    scrape_every: float = 5.0
    fill_every: float = 1.0
    watchdog_floor: float = 3.0
    seed: int = 0


def run(
    progress: Progress, *, minutes: str | None = None, report: str | None = None, size: Size | None = None
) -> Figures:
    """Samples and their trends, faults, how the jobs ended, and what was not in order.

    ``minutes`` is how long the soak is, 30 by default; ``report`` is a file to write the report to. Raises
    ``OptionError`` where one of them is wrong, or the example is not there.
    """
    size = size or Size(seconds=_seconds(minutes))
    example_folder("charlm")
    file = None if report is None else _checked(Path(report))
    limit_arenas(len(DEVICES) + 1)  # As `asyncpipe serve` does.
    FAULTS.restart()
    with TemporaryDirectory(prefix="asyncpipe-soak-") as folder, _counted_log() as log:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            figures = runner.run(_Soak(Path(folder), size, progress).run())
        figures |= {"log": dict(log.most_common()), "threads_left": _threads_left()}
    if file is not None:
        file.write_text(markdown(figures), encoding="utf-8")
        figures["report"] = str(file)
    return figures


def show(figures: Figures) -> str:
    """The report; where it was written to a file, only what it comes to."""
    return markdown(figures) if "report" not in figures else f"{summary(figures)}\nreport: {figures['report']}"


def _seconds(minutes: str | None) -> float:
    if minutes is None:
        return Size().seconds
    with suppress(ValueError):
        if isfinite(seconds := 60 * float(minutes)) and seconds > 0:
            return seconds
    raise OptionError(f"minutes must be a finite number above 0, got {minutes!r:.50}")


def _checked(file: Path) -> Path:
    """``file``, to which something can be written half an hour from now."""
    try:
        file.touch()
    except OSError as error:
        raise OptionError(f"report: cannot write {file}: {error.strerror}") from error
    return file


class _Soak:
    """One soak, on the loop of an application that embeds a service."""

    def __init__(self, folder: Path, size: Size, progress: Progress) -> None:
        self._size = size
        self._progress = progress
        self._random = Random(size.seed)  # noqa: S311 - no secret
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
        """The figures, but for what is known only when the loop has ended."""
        begun = time.perf_counter()
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(TrainingService(self._settings))
            url = await stack.enter_async_context(serve_api(service, self._settings))
            scrape = stack.enter_context(_scraped(service))
            chaos = Chaos(service, self._settings, url, self._tally, self._random)
            crowd = Crowd(service, JobClient(url), self._tally, self._random)
            with _told_by_signal(self._stop):
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
        """What is done again and again, each with the seconds before the next time."""
        size, random = self._size, self._random

        async def deal() -> None:
            chaos.deal()

        return [
            (lambda: size.fill_every, crowd.fill),
            (lambda: random.uniform(0.5, 1.5) * size.fault_every, deal),
            (lambda: size.scrape_every, scrape),
        ]

    async def _watch(self, begun: float) -> None:
        """Take the samples, until the time is over or somebody wants the end."""
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
        """Let everything end, train one more job, and say what is left."""
        self._progress("ending every job, then training one more")
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


# What runs beside


@asynccontextmanager
async def _repeated(
    work: list[tuple[Callable[[], float], Callable[[], Awaitable[None]]]], tally: Tally
) -> AsyncIterator[None]:
    """Does all of ``work`` again and again during the block; what it raises is a surprise in the report."""

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
    """Fetches the service's metrics, as Prometheus does."""
    registry = CollectorRegistry()
    registry.register(service.collector)
    with serve_metrics(registry, 0) as server:

        def fetch() -> None:
            with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
                answer.read()

        yield lambda: asyncio.to_thread(fetch)


@contextmanager
def _told_by_signal(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets ``stop``; a second one ends the process as it always does."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, end)
    except (ValueError, RuntimeError, NotImplementedError):  # Not the main thread, or not on this system.
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Counting(logging.Handler):
    """Counts what is logged, by its text before anything is filled in."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__(logging.WARNING)
        self._counts = counts

    def emit(self, record: logging.LogRecord) -> None:
        self._counts[f"{record.levelname} {record.name}: {record.msg}"[:200]] += 1


@contextmanager
def _counted_log() -> Iterator[Counter[str]]:
    """Warnings and errors of everybody during the block are counted, and not shown: there will be thousands."""
    root, counts = logging.getLogger(), Counter[str]()
    before, counting = root.handlers[:], _Counting(counts)
    root.handlers[:] = [counting]
    try:
        yield counts
    finally:
        root.handlers[:] = before


# What is left


def _hung_tasks(service: TrainingService) -> float:
    """How many tasks the watchdog gave up, as Prometheus would be told."""
    families = {family.name: family for family in service.collector.collect()}
    return float(families["asyncpipe_hung_tasks"].samples[0].value)


def _doubled() -> list[str]:
    """Devices that more than one thread serves: those that were given up are there until their task returns."""
    threads = Counter(thread.name for thread in threading.enumerate())
    return sorted(name for name, count in threads.items() if name.startswith("asyncpipe cpu:") and count > 1)


def _threads_left() -> list[str]:
    """Threads of the package that are there when the service and its loop are not."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("asyncpipe"))


async def _none_left(find: Callable[[], list[str]]) -> list[str]:
    """What ``find`` still finds after some seconds: threads need a moment to end."""
    for _ in range(200):
        if not find():
            break
        await asyncio.sleep(0.05)
    return find()
