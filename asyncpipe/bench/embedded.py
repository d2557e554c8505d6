"""A training service inside a web application: latency of its requests, and the cost of requests for training.

::

    another process     ── 200 requests a second ──▶ ┌ an ASGI application ┐
      (send_requests)   ◀── latency from due time ── │  TrainingService    │── the example's model, on 2 CPU devices
                                                     └─────────────────────┘

Turns with and without requests alternate and are compared in pairs. In a third kind of turn, another process answers
the same requests (``web_app.py``): they cost training CPU time, but nothing else. Finally a handler blocks its event
loop for a second, repeatedly: how many steps end meanwhile, if training has a loop of its own or uses the handler's?
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple
from urllib.request import urlopen

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.examples import example_folder, example_job
from asyncpipe.bench.harness import alternating, rounds, run_on_loop
from asyncpipe.bench.web_app import make_app, send_requests, sender, served_by_process, served_here
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.training_service import TrainingService

__all__ = ["EmbeddedSize", "run", "show"]

Loop = Literal["own", "running"]

DEVICES = ["cpu:0", "cpu:1"]
WITH_REQUESTS = {"with": "a step with requests", "apart": "  answered by a process"}
"""The kinds of turns with requests, with the title of their step times."""
LATENCIES = {
    "idle": "without training",
    "training": "while training",
    "late": "  sent too late by",
    "apart": "  answered by a process",
}
LOOPS: tuple[Loop, ...] = ("own", "running")
ENDLESS = 10**6
"""Steps of the job, which is cancelled at the end."""
FIRST_STEPS_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class EmbeddedSize:
    """The rate of requests, and how long is measured."""

    rate: float = 200.0
    """Requests per second."""
    seconds: float = 1.5
    """Of a turn: short, so that all kinds of turns see the same load from other processes."""
    rounds: int = 40
    """Turns of each kind: with requests, without, and with requests to another process."""
    blocked: int = 12
    """How often a handler blocks its loop."""
    blocked_seconds: float = 1.0
    """Of each time."""
    warm_up: int = 20
    """Steps."""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"max_bytes": 2_000_000})
    """Parameters of the example's entry that override those of its job file."""


def run(progress: Progress, *, size: EmbeddedSize | None = None) -> Figures:
    """Latencies of requests, durations of steps, and steps while a handler blocked; all times in seconds.

    Raises ``OptionError`` if the example is not there.
    """
    size = size or EmbeddedSize()
    figures: Figures = {"rate": size.rate, "rounds": size.rounds, "seconds": size.seconds}
    figures |= {"blocked": {}, "blocked_seconds": size.blocked_seconds}
    for loop in LOOPS:
        with TemporaryDirectory(prefix="asyncpipe-embedded-") as folder:
            found = run_on_loop(_Embedded(Path(folder) / "service", loop, size, progress).run())
        figures["blocked"][loop] = found.pop("blocked")
        figures |= found
    return figures


def show(figures: Figures) -> str:
    """The figures, a line each."""
    requests, steps = figures["requests"], figures["steps"]
    lines = [
        f"examples/charlm on {len(DEVICES)} CPU devices, in an ASGI application; {figures['rounds']} turns of "
        f"{figures['seconds']:g} s of each kind, {figures['rate']:g} requests/s",
        f"{'':28}{'p50':>8} {'p99':>8} {'max':>8}  ms from when the request was due",
    ]
    for name, title in LATENCIES.items():
        row = requests[name]
        lines.append(f"{title:28}" + " ".join(f"{row[key] * 1e3:8.2f}" for key in ("p50", "p99", "max")))
    lines += [
        f"requests answered           {requests['training']['answered']:8}   failed {requests['training']['failed']}",
        f"a step without requests     {steps['without']['seconds'] * 1e3:8.2f} ms",
        *(_steps_line(title, steps[kind]) for kind, title in WITH_REQUESTS.items()),
        f"while a handler blocks its loop for {figures['blocked_seconds']:g} s, steps against the same time before:",
    ]
    for loop in LOOPS:
        for what, row in figures["blocked"][loop].items():
            title = f'  it {what}, loop="{loop}"'
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
            lines.append(f"{title:28}{ratio:>8}   ({row['during']:.1f} steps, {row['before']:.1f} before)")
    return "\n".join(lines)


def _steps_line(title: str, steps: Mapping[str, Any]) -> str:
    low, middle, high = (ratio - 1 for ratio in quantiles(steps["ratios"], n=4))
    return (
        f"{title:28}{steps['seconds'] * 1e3:8.2f} ms, {middle:+.1%}   (half of the rounds: {low:+.1%} to {high:+.1%})"
    )


class _EndedStep(NamedTuple):
    at: float
    """When it ended, in Unix time."""
    seconds: float


class _Embedded:
    """The application and its measurements, with training on one kind of loop."""

    def __init__(self, folder: Path, loop: Loop, size: EmbeddedSize, progress: Progress) -> None:
        self._size = size
        self._progress = progress
        self._loop = loop
        self._settings = ServiceSettings(
            folder=folder, devices=DEVICES, entries=["charlm:build"], entry_path=example_folder("charlm"), loop=loop
        )
        self._blocked = (0.0, 0.0)
        """The interval in which a handler last blocked the loop, in Unix time."""

    async def run(self) -> Figures:
        """The figures for this kind of loop. Requests are measured only if training has a loop of its own."""
        async with TrainingService(self._settings) as service, self._served() as port:
            if self._loop == "running":
                async with self._training(service) as steps:
                    return {"blocked": {"sleeps": await self._blocking(steps, port, "sleeps")}}
            with sender() as requests, served_by_process() as other:
                self._progress("requests without training")
                idle = await self._turn(requests, port)
                async with self._training(service) as steps:
                    figures = await self._turns(steps, requests, {"without": None, "with": port, "apart": other})
                    figures["requests"]["idle"] = _latencies([idle], "latencies")
                    return {**figures, "blocked": {how: await self._blocking(steps, port, how) for how in BLOCKS}}

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[int]:
        """Serve the application during the block; yields its port."""

        async def block(request: Request) -> Response:
            begun = time.time()
            BLOCKS[request.path_params["how"]](self._size.blocked_seconds)
            self._blocked = begun, time.time()
            return PlainTextResponse("done")

        app = make_app()
        app.add_route("/block/{how}", block)
        async with served_here(app) as port:
            yield port

    @asynccontextmanager
    async def _training(self, service: TrainingService) -> AsyncIterator[list[_EndedStep]]:
        """Run a job during the block, which starts after the warm-up steps; yields the steps that have ended.

        Steps are appended as they end; those that end while the loop is blocked are appended later.
        """
        job, _ = await service.submit(_submission(example_job("charlm"), self._size))
        steps: list[_EndedStep] = []

        async def follow() -> None:
            following: Any = service.follow(job.id)
            async with aclosing(following):
                async for event in following:
                    if event.kind == "step":
                        ended = _EndedStep(event.at, event.data["seconds"])
                        steps.append(ended)

        task = asyncio.create_task(follow())
        try:
            async with asyncio.timeout(FIRST_STEPS_SECONDS):
                while len(steps) < self._size.warm_up:  # noqa: ASYNC110 - the follower appends to `steps`
                    await asyncio.sleep(0.05)
            yield steps
            await service.cancel(job.id)
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _turns(
        self, steps: list[_EndedStep], requests: ProcessPoolExecutor, kinds: Mapping[str, int | None]
    ) -> Figures:
        """Latencies and durations of steps in turns of all ``kinds``: each sends requests to a port, or none."""
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        turns: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for number in rounds(self._size.rounds, self._progress):
            for kind in alternating(list(kinds), number):
                # The first step began before the turn.
                first = len(steps) + 1
                while len(steps) <= first:  # Repeat the turn if no whole step fits into it, on a busy machine.
                    if (port := kinds[kind]) is not None:
                        turns[kind].append(await self._turn(requests, port))
                    else:
                        await asyncio.sleep(self._size.seconds)
                seconds[kind].append(fmean(step.seconds for step in steps[first:]))
        return {
            "requests": {
                "training": _latencies(turns["with"], "latencies"),
                "late": _latencies(turns["with"], "late"),
                "apart": _latencies(turns["apart"], "latencies"),
            },
            "steps": {
                kind: {
                    "seconds": median(seconds[kind]),
                    "ratios": [on / off for on, off in zip(seconds[kind], seconds["without"], strict=True)],
                }
                for kind in kinds
            },
        }

    async def _turn(self, requests: ProcessPoolExecutor, port: int) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(requests, send_requests, port, self._size.rate, self._size.seconds)

    async def _blocking(self, steps: list[_EndedStep], port: int, how: str) -> dict[str, float | None]:
        """Steps per second that ended while the loop was blocked, and in the same time before."""
        seconds = self._size.blocked_seconds
        during, before = [], []
        for _ in rounds(self._size.blocked, self._progress, f'loop="{self._loop}", blocked'):
            await asyncio.sleep(1.5 * seconds)
            await asyncio.to_thread(_fetch, f"http://127.0.0.1:{port}/block/{how}")
            begun, ended = self._blocked
            while steps[-1].at <= ended:  # noqa: ASYNC110 - the follower appends to `steps`
                await asyncio.sleep(0.05)
            during.append(sum(begun < step.at <= ended for step in steps) / (ended - begun))
            before.append(sum(begun - seconds < step.at <= begun for step in steps) / seconds)
        ratio = sum(during) / sum(before) if any(before) else None
        return {"ratio": ratio, "during": fmean(during), "before": fmean(before)}


def _compute(seconds: float) -> None:
    """Block the loop, and compete with all other threads for the GIL."""
    over = time.perf_counter() + seconds
    while time.perf_counter() < over:
        pass


BLOCKS: Mapping[str, Callable[[float], None]] = {"sleeps": time.sleep, "computes": _compute}
"""The ways in which a handler blocks its loop."""


def _submission(job: dict[str, Any], size: EmbeddedSize) -> dict[str, Any]:
    """The example's job on the devices of this benchmark, with practically endless steps."""
    return {
        "name": job["name"],
        "entry": job["job"]["entry"],
        "parameters": {**job["job"]["parameters"], **size.parameters},
        "pipeline": {**job["pipeline"], "devices": DEVICES},
        "training": {**job["training"], "steps": ENDLESS},
        "faults": job["faults"],
        "snapshots": {"every": ENDLESS},
    }


def _latencies(turns: list[dict[str, Any]], name: str) -> dict[str, float]:
    found = sorted(value for turn in turns for value in turn[name])
    return {
        "p50": found[len(found) // 2],
        "p99": found[len(found) * 99 // 100],
        "max": found[-1],
        "answered": len(found),
        "failed": sum(turn["failed"] for turn in turns),
    }


def _fetch(url: str) -> None:
    with urlopen(url) as answer:  # noqa: S310 - always http
        answer.read()
