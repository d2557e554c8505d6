"""What runs in the process of a job: one run, as the service says."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.lifeline import lead_group
from asyncpipe.service.jobs.isolation.arbitration import take_seat
from asyncpipe.service.jobs.isolation.confines import confine
from asyncpipe.service.jobs.isolation.job_output import JobOutput
from asyncpipe.service.jobs.isolation.messages import RunJob
from asyncpipe.service.jobs.isolation.relay import REPORT_SECONDS, Relay, RelayedProgress
from asyncpipe.service.jobs.run_outcome import EndedElsewhereError, RunEnding, RunOutcome, failure
from asyncpipe.train.blocking_calls import in_thread
from asyncpipe.train.drained_hosts import DrainedHosts
from asyncpipe.train.lasting_run import LastingRun
from asyncpipe.train.progress import TrainingSummary
from asyncpipe.train.run_orders import RunOrders
from asyncpipe.train.workload import Workload

__all__ = ["serve"]

IMPORTED_LATER = ("torch._dynamo",)
"""What torch imports when it makes an optimizer; see ``serve_forks``."""


async def serve(control: ControlClient) -> None:
    """Serve the service until it says to stop."""
    # A group of its own, which ends as a whole: a loader may have started processes.
    assert control.lifeline is not None
    lead_group(control.lifeline)
    run = _OneRun(control)
    async with run.stack:
        await control.serve(run.handle)


class _OneRun:
    """The one run of this process."""

    def __init__(self, control: ControlClient) -> None:
        self.stack = AsyncExitStack()
        """Closed when the service has the answer: devices that hang must not hold it up."""
        self._relay = Relay(control.name, control.send)
        self._progress = RelayedProgress(control.send)
        self._orders = RunOrders()
        self._pool: DevicePool | None = None
        """Once it is open, if its devices are threads of this process."""
        self._arbiter: Invitation | None = None
        """Who says whose turn it is on devices that others use as well."""
        self._task: asyncio.Task[TrainingSummary] | None = None
        self._drained = DrainedHosts()
        self._cancelling = False

    def handle(self, message: Any) -> Any:
        """Do what the service says, or return what will have been done when it is awaited."""
        match message:
            case RunJob():
                return self._train(message)
            case ("schedule", name):
                return self._orders.change_schedule(name)
            case ("stop",):
                self._orders.stop()
            case ("cancel",):
                self._cancelling = True
                if self._task is not None:
                    self._task.cancel()
            case ("share", share):
                self._orders.change_share(share)
            case Invitation():
                self._arbiter = message
                self._sit_down()
            case ("hosts", hosts):
                self._drained.set(hosts)
            case ("kept", number):
                self._progress.kept(number)
        return None

    def _sit_down(self) -> None:
        if self._pool is not None and self._arbiter is not None:
            self._pool.submit(take_seat(self._pool.threads, self._arbiter))
            self._arbiter = None

    async def _train(self, message: RunJob) -> TrainingSummary:
        self._orders.change_share(message.share)
        self._drained.others = message.others
        self._drained.set(message.drained)
        self._progress.log = message.said
        os.dup2(2, 1)  # What knows no sys.stdout, as C libraries and forked children, is passed on with standard error.
        output = JobOutput(message.said)
        try:
            confine(message.confines)
            pool = DevicePool(workers=message.job.pool_workers(), worker_path=message.worker_path, **message.hangs)
            await self.stack.enter_async_context(pool)
            if pool.workers is None:
                self._pool = pool
                pool.threads.sit_down()
            self._sit_down()
            self._relay.hung = lambda: 0 if pool.watchdog is None else pool.watchdog.hung
            run = LastingRun(
                message.job,
                partial(_made, message.make_workload),
                progress=self._progress,
                collector=self._relay,
                pool=pool,
                orders=self._orders,
                drained=self._drained,
            )
            self._task = task = asyncio.create_task(run.run(), name=f"asyncpipe job {message.job.name}")
            if self._cancelling:
                task.cancel()
            pause = REPORT_SECONDS
            while not task.done():
                await asyncio.wait([task], timeout=pause)
                pause = await in_thread(self._relay.report)
            return task.result()
        except asyncio.CancelledError:
            why = "cancelled" if self._cancelling else "its code raised CancelledError without being cancelled"
            ending = RunEnding.CANCELLED if self._cancelling else RunEnding.FAILED
            raise EndedElsewhereError(RunOutcome(ending, why)) from None
        except Exception as error:  # noqa: BLE001 - becomes the outcome
            raise EndedElsewhereError(failure(error, self._progress.said)) from None
        finally:
            output.end()
            self._orders.close()


def _made(make_workload: bytes) -> Workload:
    make: Callable[[], Workload] = pickle.loads(make_workload)  # noqa: S301 - the service's own
    return make()
