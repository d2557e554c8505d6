"""Rounds: a job goes on from its snapshot in workers, one of them is struck, the job gets its error in time.

::

    snapshot ──▶ workers that are missing start ──▶ steps, each bit-equal to the undisturbed one ──▶ strike ──▶ error
       ▲                                               │ the last good one                                  │ in time?
       └───────────────────────────────────────────────┴────────────────────────────────────────────────────┘

One pool has all rounds, so the workers that are not struck live through many. They must not grow.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from asyncpipe import DevicePool
from asyncpipe.errors import WorkerLostError, WorkerStartError
from asyncpipe.runtime.portal import new_event_loop
from tests.campaigns.crashes.controllers import kill_controllers
from tests.campaigns.crashes.job import DEVICES, Job, Snapshot, restore, take
from tests.campaigns.crashes.left import Held, child_named, threads_and_files
from tests.campaigns.crashes.strikes import HANGS, Strike, Struck
from tests.campaigns.harness import Campaign, Run

__all__ = ["CAMPAIGN", "Rounds"]

KINDS = "FRBWCU"
SCHEDULES = {kind: "zb-h1" if kind == "W" else "1f1b" for kind in KINDS}
FLOOR = 2.0
"""Seconds after which the watchdog may take a task for hung."""
SILENT = 20.0
"""Seconds after which a worker that is silent is killed while no step is under way."""
LATEST = 5.0
"""Seconds from a loss, or from the deadline of one that hangs, to the error."""
STEPS = 400
"""Of the undisturbed run; then a job begins again."""
LONGEST = 120.0
"""Seconds for a round."""
ALWAYS = ("exit", "segv", "kill", "stop")
"""Deeds that are done in every kind of task at each worker, and those in every kind of task at one of them."""
SOMETIMES = [*product(("gil", "hang"), KINDS)]
SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
SAYS = {
    "exit": "exited with status 7",
    "segv": "was killed by SIGSEGV",
    "kill": "was killed by SIGKILL",
    "stop": "(has not answered for|did not end within)",
    "gil": "(has not answered for|did not end within)",
    "hang": "did not end within",
}


@dataclass(frozen=True)
class FromOutside:
    """``deed`` to the worker of ``device``, so many seconds after all workers were up.

    With ``starting``, after the worker of that device was launched, which was lost before: it or another one is struck
    while it comes up.
    """

    deed: str
    device: str
    seconds: float
    starting: str = ""

    @property
    def moment(self) -> str:
        """For the figures."""
        if not self.starting:
            return "any instant"
        return "its start" if self.starting == self.device else "another one's start"


def all_strikes(chance: random.Random, note: Path, devices: int = len(DEVICES)) -> Iterator[Strike]:
    """Deeds in every kind of task at each of the workers, in a random order."""
    names = DEVICES[:devices]
    # To the watchdog it is all the same whether a worker is stopped, or a thread holds the GIL, or waits.
    every = [*product(ALWAYS, KINDS, names), *((deed, kind, chance.choice(names)) for deed, kind in SOMETIMES)]
    chance.shuffle(every)
    for deed, kind, device in every:
        # A task that has never run may take ten floors.
        step = 1 if deed in HANGS else chance.randrange(2)
        yield Strike(deed, kind, device, step, 0 if kind == "U" else chance.randrange(3), note)


def outside(chance: random.Random, rounds: int, seconds: float, devices: int = len(DEVICES)) -> Iterator[FromOutside]:
    """Deeds at random instants of the first ``seconds`` in which a pipeline opens and trains."""
    for _ in range(rounds):
        deed = chance.choice(sorted(SIGNALS))
        yield FromOutside(deed, chance.choice(DEVICES[:devices]), chance.uniform(0, seconds))


def at_start(chance: random.Random, seconds: float, devices: int = len(DEVICES)) -> Iterator[FromOutside]:
    """Deaths of each worker while it comes up, and while another one does, at random instants of ``seconds``."""
    names = DEVICES[:devices]
    # One that is stopped while it starts is killed at the end of the time for that, which is two minutes.
    for deed, device in product(("kill", "segv"), names):
        others = [name for name in names if name != device]
        for starting in (device, chance.choice(others)):
            yield FromOutside(deed, device, chance.uniform(0, seconds), starting)


class Rounds:
    """Used as ``async with``; then rounds, then ``end``."""

    def __init__(
        self,
        run: Run,
        devices: int = len(DEVICES),
        *,
        steps: int = STEPS,
        kinds: str = KINDS,
        latest: float = LATEST,
        folders: Sequence[Path] = (),
    ) -> None:
        """``kinds`` are those of the tasks in which strikes come. An error may come ``latest`` seconds late.

        ``folders`` are looked at for what is left there, besides that of temporary files, which must be its own.
        """
        self._tell, self._report = run.tell, run.report
        self._latest = latest
        self._folders = folders
        self._devices = DEVICES[:devices]
        schedules = sorted({SCHEDULES[kind] for kind in kinds})
        self._jobs = {schedule: Job(schedule, devices, steps) for schedule in schedules}
        self._snapshots: dict[str, Snapshot] = {}
        self._opened: set[int] = set()
        """The workers with which this round's pipeline has opened."""
        self._grown: dict[int, tuple[int, int]] = {}
        """Threads and files of each worker after its first round."""

    async def __aenter__(self) -> Rounds:
        for schedule, job in self._jobs.items():
            await job.prepare()
            self._snapshots[schedule] = job.beginning
        new_event_loop().close()  # libuv opens a pipe for the whole process with its first loop.
        self._held = Held(*self._folders)
        self._pool = DevicePool(workers="processes", hang_seconds=FLOOR)
        await self._pool.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.aclose()

    def check_nothing_is_left(self) -> None:
        """Behind the block."""
        self._held.check()

    async def round(self, what: Strike | FromOutside | None) -> None:
        """Go on with a job until ``what`` happens, or for some steps.

        Raises ``AssertionError`` unless all is as it should be.
        """
        schedule = SCHEDULES[what.kind] if isinstance(what, Strike) else "1f1b"
        job = self._jobs[schedule]
        if self._snapshots[schedule][0] > job.steps - 50:
            self._snapshots[schedule] = job.beginning
        if isinstance(what, Strike):
            what.note.unlink(missing_ok=True)
        elif what is not None and what.starting:
            if what.device not in {what.starting, *self._up()}:
                await self.round(None)
            if what.starting in self._up():
                await self._lose(what.starting)
        self._opened.clear()
        struck: list[Struck] = []
        striking = asyncio.ensure_future(self._strike(what, struck)) if isinstance(what, FromOutside) else None
        error, caught_at = None, 0.0
        try:
            async with asyncio.timeout(LONGEST), AsyncExitStack() as stack:
                try:
                    await self._train(job, what, struck, stack)
                except (WorkerLostError, WorkerStartError) as caught:
                    error, caught_at = caught, time.perf_counter()
        finally:
            if striking is not None:
                striking.cancel()
                await asyncio.wait([striking])
        if error is None and self._is_replaced(struck):
            assert isinstance(what, FromOutside)
            self._report.counts["round"][f"{what.deed} in {what.moment}, and replaced at once"] += 1
        elif what is not None:
            assert error is not None, f"nothing happened: {what}"
            self._judge(what, struck[0] if struck else Struck.read(what.note), error, caught_at)
            self._report.seconds["from an error until the pipeline is closed"].append(time.perf_counter() - caught_at)
        elif error is not None:
            raise error

    def _is_replaced(self, struck: Sequence[Struck]) -> bool:
        """Whether the worker was struck before the pipeline opened, which it did with a successor."""
        return bool(struck) and bool(self._opened) and struck[0].pid not in self._opened

    async def _train(
        self, job: Job, what: Strike | FromOutside | None, struck: Sequence[Struck], stack: AsyncExitStack
    ) -> None:
        missing, began = set(self._devices) - self._up().keys(), time.perf_counter()
        pipe = job.pipeline(self._pool, what if isinstance(what, Strike) else None)
        await stack.enter_async_context(pipe)
        self._opened.update(self._up().values())
        if missing:
            self._report.seconds["until workers are there again, with their stages"].append(time.perf_counter() - began)
        self._check_growth()
        snapshot = self._snapshots[job.schedule]
        restore(pipe, snapshot)
        last = snapshot[0] + 3
        while (isinstance(what, FromOutside) and not self._is_replaced(struck)) or snapshot[0] < last:
            if snapshot[0] == job.steps:
                snapshot = job.beginning
                restore(pipe, snapshot)
            await job.step(pipe, snapshot[0])
            self._snapshots[job.schedule] = snapshot = take(pipe, snapshot[0] + 1)
            job.check(snapshot)
            await asyncio.sleep(0)

    def _judge(
        self, what: Strike | FromOutside, struck: Struck, error: WorkerLostError | WorkerStartError, caught_at: float
    ) -> None:
        assert error.worker == what.device, f"{what}: {error}"
        says = SAYS[what.deed]
        first = str(error).partition("; its stderr")[0]
        if struck.task:
            says += f".*, while it ran {re.escape(f'{struck.task} on {what.device}')}$"
        assert re.search(says, first), f"{what}, struck in {struck.task}: {first}"
        late = caught_at - struck.at
        if what.deed in HANGS:
            late -= SILENT if "for 20 s" in first else FLOOR
        self._report.counts["round"][f"{what.deed} in {what.kind if isinstance(what, Strike) else what.moment}"] += 1
        self._report.seconds[f"from {what.deed}, or its deadline, to the error"].append(late)
        self._tell(f"{what.deed} {struck.task or 'from outside'} on {what.device}: {late:.3f} s, {first}")
        assert late < self._latest, f"{what}: the error came {late:.1f} s late"
        assert what.device not in self._up(), "its process is there"

    async def _strike(self, what: FromOutside, struck: list[Struck]) -> None:
        if what.starting:
            while child_named(what.starting) is None:  # noqa: ASYNC110 - nothing tells when it is launched
                await asyncio.sleep(0.001)
        else:
            while not self._up().keys() >= set(self._devices):  # noqa: ASYNC110 - nor when it is up
                await asyncio.sleep(0.001)
        await asyncio.sleep(what.seconds)
        pid = child_named(what.device)
        assert pid is not None, f"{what.device} has no worker"
        struck.append(Struck(time.perf_counter(), pid=pid))
        os.kill(pid, SIGNALS[what.deed])

    async def _lose(self, device: str) -> None:
        os.kill(self._up()[device], signal.SIGKILL)
        while device in self._up():  # noqa: ASYNC110 - nothing tells the end of one that no pipeline uses
            await asyncio.sleep(0.01)

    def _up(self) -> dict[str, int]:
        workers = self._pool.workers
        assert workers is not None
        return {name: connection.pid for name, connection in workers.up.items()}

    def _check_growth(self) -> None:
        """The workers that were not struck have no more threads and files than after their first round."""
        for pid in self._up().values():
            now = threads_and_files(pid)
            begin = self._grown.setdefault(pid, now)
            assert max(now[0] - begin[0], now[1] - begin[1]) <= 0, f"a worker has grown from {begin} to {now}"


async def _run(run: Run) -> None:
    folder, options = Path(tempfile.mkdtemp()), run.options
    if options.controllers:
        await asyncio.to_thread(kill_controllers, run, folder, options.controllers)
    chance = random.Random(options.seed)
    struck = [*outside(chance, options.outside, 2.0), *at_start(chance, 1.5), *all_strikes(chance, folder / "struck")]
    async with Rounds(run, folders=[Path("/dev/shm")], latest=options.latest) as rounds:
        for what in run.while_time(struck):
            await rounds.round(what)
        await rounds.round(None)  # The job goes on after the last one, too.
    rounds.check_nothing_is_left()


CAMPAIGN = Campaign(
    "crashes",
    _run,
    {
        "minutes": 60.0,
        "outside": (100, "strikes at random instants"),
        "controllers": (25, "kills of the controller"),
        "latest": (LATEST, "seconds that an error may be late"),
    },
)
