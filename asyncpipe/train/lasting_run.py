"""A run that goes on when it loses workers: the same component as ``TrainingRun``, of which it makes one after another.

::

    TrainingRun ──▶ workers are lost ──▶ started again? ──yes────────────────────▶ TrainingRun, from the newest snapshot
                                          ▲        │ no, and there is time
                                          └────────┘
                                          the time is over ──▶ "wait": HostLostError
                                                           └─▶ "split": TrainingRun, on the devices that are left
                                                                         │ those that were gone are back, or
                                                                         ▼ a host is to be left, or may be used again
                                                               it stops after its step ──▶ TrainingRun, on other devices

``[faults] lost_host`` of the job says what is done. All of them use one pool, so workers that are not lost stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from asyncpipe.core.hosts import host_of, unit_of
from asyncpipe.core.policies.share import Share
from asyncpipe.core.records.step_record import Observer
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import (
    DeviceError,
    EdgeError,
    HangError,
    HostLostError,
    OptionError,
    TaskError,
    WorkerLostError,
    WorkerStartError,
)
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.ops.device.devices import Device
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.runtime.watchdog import Watchdog
from asyncpipe.train.import_path import import_path
from asyncpipe.train.job_file import AUTO, Job, blaming_key, job_file_error
from asyncpipe.train.other_devices import NotSplit, StepCosts, moved, split_anew
from asyncpipe.train.progress import PassedProgress, ProgressSink, TrainingSummary
from asyncpipe.train.schedule_changes import NoMoreStepsError
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Workload

__all__ = ["HostsToLeave", "LastingRun"]

_logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between two attempts to start what is missing."""
FAIL, SPLIT = "fail", "split"


class HostsToLeave(Protocol):
    """The hosts that jobs are to leave, as somebody else decides; of the loop on which runs are."""

    def __contains__(self, unit: str) -> bool:
        """Whether the host, or worker that names none, is to be left."""

    @property
    def others(self) -> Sequence[str]:
        """Devices that a job may have in the place of its own."""

    def watch(self, changed: Callable[[], object]) -> Callable[[], object]:
        """Have ``changed`` called whenever they change, until what this returns is called."""


class _Heard(PassedProgress):
    """Passes everything on, and counts snapshots."""

    def __init__(self, to: ProgressSink) -> None:
        super().__init__(to)
        self.snapshots = 0

    def snapshot(self, step: int, path: Path) -> None:
        self.snapshots += 1
        super().snapshot(step, path)


class LastingRun:
    """One run of a job as its user sees it: ``await run()`` once. Arguments, methods and errors are ``TrainingRun``'s.

    ``leave`` are the hosts that the run is to leave after a step. Raises ``HostLostError`` if the run cannot go on, and
    ``JobFileError`` if it is to go on and takes no snapshots.
    """

    def __init__(
        self,
        job: Job,
        make_workload: Callable[[], Workload],
        *,
        progress: ProgressSink | None = None,
        collector: PipelineCollector | None = None,
        observers: Sequence[Observer] = (),
        pool: DevicePool | None = None,
        share: Share | None = None,
        leave: HostsToLeave | None = None,
    ) -> None:
        self._job = job
        self._make_workload = make_workload
        self._progress = _Heard(progress if progress is not None else ProgressSink())
        self._observers = observers
        self._pool, self._is_own = pool, False
        self._options: dict[str, Any] = {"collector": collector, "share": share}
        self._leave = leave
        self._policy = job.faults.lost_host
        self._gone: set[str] = set()
        """Units that could not be started again, and without which the job goes on."""
        self._without: set[str] = set()
        """The units that the run under way does without."""
        self._costs = StepCosts()
        self._losses = 0
        """In a row, since the last snapshot."""
        self._broken: Counter[str] = Counter()
        """How often connections of each unit broke, while its workers were there, in runs that took no snapshot."""
        self._broken_since, self._tries = 0.0, 0
        self._return_pause = 0.0
        """Seconds after which what is gone is tried again; more each time that the run with it took no snapshot."""
        self._begun_with = 0
        """How many snapshots there were when the run under way began."""
        self._saved = 0
        """How many snapshots there were at the last loss."""
        self._stopping = self._moving = self._is_between = False
        self._changed = asyncio.Event()
        """Set when it is to stop, or other hosts are to be left."""
        if self._policy != FAIL and job.snapshots is None:
            raise job_file_error(
                job.path, f'faults.lost_host: "{self._policy}" goes on from snapshots: name a folder in [snapshots]'
            )
        # Made now, since it checks the job.
        self._run = self._make_run([])

    @property
    def job(self) -> Job:
        """The job, with the pipeline that it has now."""
        return self._run.job

    def stop(self) -> None:
        """As ``TrainingRun.stop``; also while workers are waited for."""
        self._stopping = True
        self._run.stop()
        self._changed.set()

    async def change_schedule(self, name: str) -> None:
        """As ``TrainingRun.change_schedule``; between two runs, the next one begins with it."""
        try:
            await self._run.change_schedule(name)
        except NoMoreStepsError:
            if not self._is_between:
                raise
        self._job = self._job.override("pipeline", schedule=name)

    def change_share(self, share: Share) -> None:
        """As ``TrainingRun.change_share``; later runs begin with it."""
        self._options["share"] = share
        self._run.change_share(share)

    async def run(self) -> TrainingSummary:
        """As ``TrainingRun.run``."""
        self._loop = asyncio.get_running_loop()
        in_workers = self._job.pipeline.workers != "threads" if self._pool is None else self._pool.workers is not None
        if not in_workers or (self._policy == FAIL and self._leave is None):
            return await self._run.run()
        unwatch = self._leave.watch(self._others_to_leave) if self._leave is not None else None
        try:
            async with self._own_pool():
                return await self._go_on()
        finally:
            if unwatch is not None:
                unwatch()

    @asynccontextmanager
    async def _own_pool(self) -> AsyncIterator[None]:
        if self._pool is not None:
            yield
            return
        table = self._job.pipeline
        workers = self._job.pool_workers()
        if isinstance(workers, Mapping):
            # A device that takes the place of a lost one has the name of a second one.
            again = {f"{device}#{n}": name for device, name in workers.items() for n in range(1, len(table.devices))}
            workers = {**again, **workers}
        self._progress.entered("starting workers")
        folder = str(self._job.path.resolve().parent)
        with blaming_key(self._job, "pipeline"):
            pool = DevicePool(workers=workers, transport=table.transport, worker_path=[folder])
        async with pool, pool.watched(Watchdog(pool.driver)):
            self._pool, self._is_own = pool, True
            yield

    # One run after the other

    async def _go_on(self) -> TrainingSummary:
        while True:
            await self._until_one_is_left()
            self._without = self._to_do_without()
            costs = StepCosts()
            run = self._run = self._make_run([costs])
            self._is_between = self._moving = False
            self._begun_with = self._progress.snapshots
            if self._stopping:
                run.stop()
            loss = None
            try:
                async with self._those_that_return():
                    summary = await run.run()
            except (WorkerLostError, WorkerStartError, EdgeError, HangError, TaskError) as error:
                if self._policy == FAIL or (loss := _loss(error)) is None:
                    raise
            finally:
                self._is_between = True
                self._learn(run, costs)
            if loss is not None:
                await self._recover(loss)
            elif self._stopping or not (summary.stopped and self._moving):
                return summary

    def _make_run(self, observers: Sequence[Observer]) -> TrainingRun:
        job = self._job
        if observers and job.snapshots is not None and self._is_between:
            job = job.override("snapshots", resume=True)
        return TrainingRun(
            job,
            self._make_workload,
            progress=self._progress,
            observers=[*self._observers, *observers],
            pool=self._pool,
            shared=not self._is_own,
            place=self._place if self._without else None,
            **self._options,
        )

    def _learn(self, run: TrainingRun, costs: StepCosts) -> None:
        """Keep what the steps of a run have cost, and the schedule that it has chosen."""
        table = run.job.pipeline
        if costs.steps:
            costs.balance = table.balance
            costs.draws |= self._costs.draws
            self._costs = costs
        if self._job.pipeline.schedule == AUTO and table.schedule != AUTO:
            same = table.devices == self._job.pipeline.devices
            balance = table.balance if same else None
            self._job = self._job.override("pipeline", schedule=table.schedule, balance=balance)

    def _place(self, job: Job, workload: Workload) -> Job:
        """The job on the devices that are left. In the run's thread."""
        gone = {device for device, unit in self._unit_of().items() if unit in self._without}
        why = None
        if self._policy == SPLIT and job.pipeline.schedule != AUTO:
            try:
                with import_path(job.path.resolve().parent):
                    schedule = find_schedule(job.pipeline.schedule, order=job.pipeline.order)
                placed = split_anew(job, workload.model, gone, self._costs, schedule)
            except NotSplit as error:
                why = str(error)
            else:
                assert not isinstance(placed.pipeline.balance, str)
                self._tell(f"split anew: {'-'.join(map(str, placed.pipeline.balance))} layers", placed)
                return placed
        others = (
            () if self._leave is None else [each for each in self._leave.others if unit_of(each) not in self._leave]
        )
        placed = moved(job, gone, others)
        self._tell("the stages stay as they are" + (f", since {why}" if why else ""), placed)
        return placed

    def _tell(self, how: str, placed: Job) -> None:
        where = ", ".join(placed.pipeline.devices)
        text = f"goes on without {', '.join(sorted(self._without))}, on {where}; {how}"
        self._loop.call_soon_threadsafe(self._progress.entered, text)

    # What is lost, and what comes back

    async def _recover(self, loss: _Loss) -> None:
        """Return when the job can go on. Raises ``HostLostError``."""
        self._note(f"{loss.how}; the job goes on from its last snapshot")
        if self._progress.snapshots > self._saved:
            self._losses, self._saved = 0, self._progress.snapshots
        if self._progress.snapshots > self._begun_with:
            self._broken.clear()
            self._return_pause = 0.0
        if loss.broken:
            await self._recover_from_cut(loss)
            return
        self._losses += 1
        if self._losses > self._job.faults.snapshot_retries:
            how = f"gives up after {self._losses} losses without a new snapshot between: {loss.how}"
            raise HostLostError(loss.units, how)
        seconds, pause = self._job.faults.wait_seconds, FIRST_PAUSE
        deadline = self._loop.time() + seconds
        try:
            while not self._stopping:
                self._changed.clear()
                missing = await self._start(self._units() - self._left_by_order())
                self._gone.intersection_update(missing)
                if not (new := missing.keys() - self._gone):
                    return
                names, reason = ", ".join(sorted(new)), missing[min(new)]
                if (rest := deadline - self._loop.time()) <= 0:
                    if self._policy != SPLIT or not self._units() - self._left_by_order() - missing.keys():
                        raise HostLostError(sorted(new), f"has waited {seconds:g} s for a replacement: {reason}")
                    self._gone |= new
                    self._note(f"{names} did not come back within {seconds:g} s: {reason}")
                    return
                self._progress.waiting(f"waits for {names}, up to {seconds:g} s: {reason}")
                await self._change_within(min(pause, rest))
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self._progress.waiting(None)

    async def _recover_from_cut(self, loss: _Loss) -> None:
        """A connection broke between workers that are there: try again; in the end, leave out who has most of them."""
        seconds = self._job.faults.wait_seconds
        if not self._broken:
            self._broken_since, self._tries = self._loop.time(), 0
        self._broken.update(loss.broken)
        self._tries += 1
        rest = self._broken_since + seconds - self._loop.time()
        # A message on every edge has shown who is cut off, so trying again would show nothing new.
        is_sure = loss.cut_off is not None and rest <= 0
        if self._tries == 1 and not is_sure:
            return
        if rest > 0:
            try:
                self._changed.clear()
                self._progress.waiting(f"waits for the connection, up to {seconds:g} s: {loss.how}")
                await self._change_within(min(FIRST_PAUSE * self._tries, LONGEST_PAUSE, rest))
            finally:
                self._progress.waiting(None)
            return
        # Of two that have as many, the one that is not left out already.
        worst = loss.cut_off or max(sorted(self._broken), key=lambda unit: (self._broken[unit], unit not in self._gone))
        if self._policy != SPLIT or not self._units() - self._left_by_order() - {worst}:
            raise HostLostError(loss.units, f"has waited {seconds:g} s for their connection: {loss.how}")
        self._gone = {worst}
        self._note(f"{worst} cannot be reached by others")

    async def _start(self, units: Iterable[str]) -> dict[str, str]:
        """Start what is missing of the workers of ``units``; those that cannot be started, and why."""
        assert self._pool is not None
        workers = self._pool.workers
        assert workers is not None
        devices: dict[str, list[Device]] = {unit: [] for unit in units}
        for device in self._pool.resolve(self._job.pipeline.devices):
            if (unit := self._unit_of()[device.name.partition("#")[0]]) in devices:
                devices[unit].append(device)
        missing: dict[str, str] = {}
        while devices:
            wanted = [device for each in devices.values() for device in each]
            try:
                await self._pool.run(workers.admit(wanted))
            except WorkerStartError as error:
                unit = next(u for u, each in devices.items() if error.worker in workers.worker_of(each).values())
                missing[unit] = _short(error)
                del devices[unit]
            else:
                break
        return missing

    @asynccontextmanager
    async def _those_that_return(self) -> AsyncIterator[None]:
        """Meanwhile, units that were gone are tried again; when one is back, the run stops after its step."""
        if not self._gone:
            yield
            return
        self._return_pause = max(self._return_pause, LONGEST_PAUSE)
        watching = asyncio.create_task(self._watch_for_returns(), name=f"asyncpipe {self._job.name}: lost hosts")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _watch_for_returns(self) -> None:
        while True:
            await asyncio.sleep(self._return_pause)
            if self._progress.snapshots == self._begun_with:
                continue  # It has not got anywhere without them.
            tried = self._gone - self._left_by_order()
            missing = await self._start(tried)
            if back := tried - missing.keys():
                self._gone -= back
                self._return_pause *= 2
                self._note(f"{', '.join(sorted(back))} is back, and is used from the next step on")
                self._move()
                return

    # Hosts that are to be left

    async def _until_one_is_left(self) -> None:
        """Wait while the job is to leave all its hosts, and may have no others."""
        try:
            while not self._stopping and self._units() and not self._may_be_used():
                self._changed.clear()
                self._progress.waiting(f"waits: {', '.join(sorted(self._to_do_without()))} are not to be used")
                await self._changed.wait()
        finally:
            self._progress.waiting(None)

    def _may_be_used(self) -> bool:
        others = () if self._leave is None else self._leave.others
        return bool({*self._units(), *map(unit_of, others)} - self._gone - self._left_by_order(others))

    def _others_to_leave(self) -> None:
        self._changed.set()
        if self._to_do_without() != self._without:
            self._move()

    def _move(self) -> None:
        """Have the run end after its step, with a snapshot, for the next one."""
        self._moving = True
        self._run.stop()

    def _to_do_without(self) -> set[str]:
        return self._gone | self._left_by_order()

    def _left_by_order(self, others: Sequence[str] = ()) -> set[str]:
        if self._leave is None:
            return set()
        return {unit for unit in {*self._units(), *map(unit_of, others)} if unit in self._leave}

    def _units(self) -> set[str]:
        return set(self._unit_of().values())

    def _unit_of(self) -> dict[str, str]:
        """By device of the job, what is lost together with it; empty if there are not all of them here."""
        assert self._pool is not None
        assert self._pool.workers is not None
        try:
            devices = self._pool.resolve(self._job.pipeline.devices)
            workers = self._pool.workers.worker_of(devices)
        except (DeviceError, OptionError):  # The run says which key of the job is wrong.
            return {}
        return {each.name.partition("#")[0]: host_of(each.name) or unit_of(workers[each.name]) for each in devices}

    def _note(self, text: str) -> None:
        _logger.warning("job %s: %s", self._job.name, text)
        self._progress.noted(logging.WARNING, text)

    async def _change_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


class _Loss(NamedTuple):
    units: tuple[str, ...]
    """What was lost; several if it is the connection between them."""
    how: str
    broken: Mapping[str, int] = MappingProxyType({})
    """How many connections of each unit broke, if that is what was lost."""
    cut_off: str | None = None
    """The unit that nothing gets through to or from, if it is known that it is this one."""


def _loss(error: Exception) -> _Loss | None:
    """What was lost, if that is why a run has failed."""
    found = error.__cause__ if isinstance(error, TaskError) else error
    if isinstance(found, WorkerLostError | WorkerStartError):
        return _Loss((unit_of(found.worker),), _short(found))
    if isinstance(found, EdgeError):
        ends = Counter(unit_of(name) for edge in found.edges for name in edge if isinstance(name, str))
        return _Loss(tuple(sorted(ends)) or ("a connection",), _short(found), ends)
    if isinstance(found, HangError) and found.peer:  # Nothing gets through from one to the other.
        ends = Counter((unit_of(found.worker), unit_of(found.peer)))
        return _Loss(
            tuple(sorted(ends)), _short(found), ends, None if found.cut_off is None else unit_of(found.cut_off)
        )
    return None


def _short(error: Exception) -> str:
    """Without what the worker wrote last: that is in the process's log."""
    return str(error).partition("; its stderr ends with:")[0]
