"""What runs in the process of a job: one run, as the service says."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.runtime.watchdog import Watchdog
from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.lifeline import lead_group
from asyncpipe.service.jobs.isolation.confines import confine
from asyncpipe.service.jobs.isolation.messages import (
    CancelRun,
    FollowSchedule,
    Hung,
    Kept,
    LeaveHosts,
    RecordsSeen,
    RunJob,
    StopRun,
    Terminate,
)
from asyncpipe.service.jobs.isolation.relay import Relay, RelayedProgress
from asyncpipe.service.jobs.run_outcome import EndedElsewhereError, RunEnding, RunOutcome, failure
from asyncpipe.train.lasting_run import LastingRun
from asyncpipe.train.progress import TrainingSummary
from asyncpipe.train.schedule_changes import NoMoreStepsError
from asyncpipe.train.workload import Workload

__all__ = ["serve"]

IMPORTED_LATER = ("torch._dynamo",)
"""What torch imports when it makes an optimizer; see ``serve_forks``."""
HUNG_SECONDS = 1.0
"""Between two looks at what the watchdog has found."""


async def serve(control: ControlClient) -> None:
    """Serve the service until it says to stop."""
    # A group of its own, which ends as a whole: a loader may have started processes.
    assert control.lifeline is not None
    lead_group(control.lifeline)
    await _OneRun(control).run()


class _OneRun:
    """The one run of this process."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._relay = Relay(control.name, control.send)
        self._progress = RelayedProgress(control.send)
        self._begun = asyncio.Event()
        self._run: LastingRun | None = None
        self._task: asyncio.Task[TrainingSummary] | None = None
        self._leave: _LeftHosts | None = None
        self._stopping = self._cancelling = False
        self._stack = AsyncExitStack()

    async def run(self) -> None:
        self._control.answer_queries(_terminate)
        async with self._stack:
            await self._control.serve(self._handle)

    def _handle(self, message: Any) -> Any:
        """Do what the service says, or return what will have been done when it is awaited."""
        match message:
            case RunJob():
                return self._train(message)
            case FollowSchedule(name=name):
                return self._change_schedule(name)
            case StopRun():
                self._stopping = True
                if self._run is not None:
                    self._run.stop()
            case CancelRun():
                self._cancelling = True
                if self._task is not None:
                    self._task.cancel()
            case LeaveHosts(hosts=hosts) if self._leave is not None:
                self._leave.set(hosts)
            case RecordsSeen(records=records):
                self._relay.seen(records)
            case Kept(number=number):
                self._progress.kept(number)
        return None

    async def _change_schedule(self, name: str) -> None:
        await self._begun.wait()
        if self._run is None:
            raise NoMoreStepsError("the run could not begin")
        await self._run.change_schedule(name)

    async def _train(self, message: RunJob) -> TrainingSummary:
        try:
            confine(message.confines)
            # Closed when the service has the answer: devices that hang must not hold it up.
            pool = await self._stack.enter_async_context(self._pool(message))
            factor, floor = message.watchdog
            watchdog = Watchdog(pool.driver, factor=factor, floor=floor)
            await self._stack.enter_async_context(pool.watched(watchdog))
            self._leave = _LeftHosts(message.others, message.left)
            self._run = LastingRun(
                message.job,
                partial(_made, message.make_workload),
                progress=self._progress,
                collector=self._relay,
                pool=pool,
                leave=self._leave,
            )
        except Exception as error:  # noqa: BLE001 - becomes the outcome
            raise EndedElsewhereError(failure(error)) from None
        finally:
            self._begun.set()
        if self._stopping:
            self._run.stop()
        self._task = task = asyncio.create_task(self._run.run(), name=f"asyncpipe job {message.job.name}")
        if self._cancelling:
            task.cancel()
        await self._wait(task, watchdog)
        if task.cancelled():
            why = "its code raised CancelledError without being cancelled"
            ending = RunEnding.CANCELLED if self._cancelling else RunEnding.FAILED
            raise EndedElsewhereError(RunOutcome(ending, "cancelled" if self._cancelling else why))
        if (raised := task.exception()) is not None:
            raise EndedElsewhereError(failure(raised))
        return task.result()

    async def _wait(self, task: asyncio.Task[TrainingSummary], watchdog: Watchdog) -> None:
        told = 0
        while not task.done():
            await asyncio.wait([task], timeout=HUNG_SECONDS)
            if watchdog.hung > told:
                told = watchdog.hung
                self._control.send(Hung(told))

    def _pool(self, message: RunJob) -> DevicePool:
        return DevicePool(workers=message.job.pool_workers(), worker_path=message.worker_path)


class _LeftHosts:
    """The hosts that the run is to leave, as the service says: its ``HostsToLeave``."""

    def __init__(self, others: Sequence[str], hosts: frozenset[str]) -> None:
        self.others = others
        self._hosts = hosts
        self._watchers: list[Callable[[], object]] = []

    def __contains__(self, unit: str) -> bool:
        return unit in self._hosts

    def set(self, hosts: frozenset[str]) -> None:
        self._hosts = hosts
        for changed in list(self._watchers):
            changed()

    def watch(self, changed: Callable[[], object]) -> Callable[[], object]:
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)


def _made(make_workload: bytes) -> Workload:
    make: Callable[[], Workload] = pickle.loads(make_workload)  # noqa: S301 - the service's own
    return make()


def _terminate(question: Any) -> None:
    """End this process with all its children. On the thread that answers pings, so whatever the others do."""
    if isinstance(question, Terminate):
        faulthandler.dump_traceback(all_threads=True)  # Says where it is stuck.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.killpg(0, signal.SIGKILL)
