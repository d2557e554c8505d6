"""A run that survives the loss of workers. It has the interface of ``TrainingRun``, and makes one for each attempt.

::

    TrainingRun ──▶ workers are lost ──▶ next_move ──▶ LOOK_AGAIN: wait, and try to start them
         ▲                                         ├─▶ GIVE_UP: HostLostError
         │                                         └─▶ GO_ON, perhaps on the remaining devices
         ├────────── from the newest snapshot ───────────┘
         └── it hands over after its step ◀── what was gone is back; a host was drained, or may be used again

``[faults] lost_host`` of the job says what is done; ``next_move.py`` has the table. All attempts use one pool, so
workers that are not lost stay up. All attempts read the same ``RunOrders``.

Three words: devices *remain* when others are lost; a host is *drained* when somebody wants jobs off it; an attempt
*hands over* when it ends after its step, so that the next one goes on with other devices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from asyncpipe.core.hosts import host_of, unit_of
from asyncpipe.core.records.step_record import Observer
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import (
    DeviceError,
    EdgeError,
    HangError,
    HostLostError,
    LauncherError,
    OptionError,
    TaskError,
    WorkerLostError,
    WorkerStartError,
)
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.ops.device.devices import Device
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.runtime.thread_calls import set_within
from asyncpipe.train.drained_hosts import DrainedHosts
from asyncpipe.train.import_path import import_path
from asyncpipe.train.job_file import AUTO, Job, blaming_key, job_file_error
from asyncpipe.train.next_move import LONGEST_PAUSE, Loss, Losses, MoveKind, loss_of, next_move, short
from asyncpipe.train.other_devices import NotSplit, StepCosts, moved, shrunk, split_anew
from asyncpipe.train.progress import ProgressSink, TrainingSummary, devices_text
from asyncpipe.train.redaction import redacted
from asyncpipe.train.run_orders import RunOrders
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Workload

__all__ = ["LastingRun"]

_logger = logging.getLogger(__name__)

FAIL, SPLIT, SHRINK = "fail", "split", "shrink"
"""Values of ``lost_host``. The fourth is "wait"."""


class LastingRun:
    """All attempts at a job until it has ended, one ``TrainingRun`` after another: ``await run()`` once.

    Takes the arguments of ``TrainingRun`` except ``shared`` and ``place``. The run gets off the hosts in ``drained``
    after a step. Raises the errors of ``TrainingRun``, ``HostLostError`` if the run cannot go on, and ``JobFileError``
    if ``lost_host`` is not "fail" and the job takes no snapshots.
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
        orders: RunOrders | None = None,
        drained: DrainedHosts | None = None,
    ) -> None:
        self._job = job
        self._make_workload = make_workload
        self._progress = progress if progress is not None else ProgressSink()
        self._collector = collector
        self._observers = observers
        self._pool, self._is_own = pool, False
        self.orders = RunOrders() if orders is None else orders
        self._drained = drained
        self._losses = Losses()
        self._without: frozenset[str] = frozenset()
        """The units that the attempt under way does without."""
        self._costs = StepCosts()
        self._return_pause = 0.0
        """Seconds between two tries to start lost units: doubled when one is back, reset when workers are lost after a
        snapshot."""
        self._changed = asyncio.Event()
        """Set when there is an order, or when a host is drained or undrained."""
        if job.faults.lost_host != FAIL and job.snapshots is None:
            key = f'faults.lost_host: "{job.faults.lost_host}"'
            raise job_file_error(job.path, f"{key} goes on from snapshots: name a folder in [snapshots]")
        if job.faults.lost_host == SHRINK and job.pipeline.replicas == 1:
            instead = 'give the job pipeline.replicas, or say "split"'
            raise job_file_error(
                job.path, f'faults.lost_host: "shrink" goes on with other replicas, and it has none; {instead}'
            )
        # Made now, since it checks the job.
        self._run = self._make_run()

    @property
    def job(self) -> Job:
        """The job, with the pipeline that it has now."""
        return self._run.job

    async def run(self) -> TrainingSummary:
        """As ``TrainingRun.run``."""
        self._loop = asyncio.get_running_loop()
        in_workers = self._job.pipeline.workers != "threads" if self._pool is None else self._pool.workers is not None
        try:
            if not in_workers or (self._job.faults.lost_host == FAIL and self._drained is None):
                return await self._run.run()
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._own_pool())
                stack.callback(self.orders.watch(self._changed.set))
                if self._drained is not None:
                    stack.callback(self._drained.watch(self._drained_changed))
                return await self._go_on()
        finally:
            self.orders.close()

    @asynccontextmanager
    async def _own_pool(self) -> AsyncIterator[None]:
        if self._pool is not None:
            yield
            return
        table = self._job.pipeline
        workers = self._job.pool_workers()
        if isinstance(workers, Mapping):
            # If cpu:0 stands in for a lost device it is listed twice, and the second is called cpu:0#1.
            # These names need workers, too.
            again = {f"{device}#{n}": name for device, name in workers.items() for n in range(1, len(table.devices))}
            workers = {**again, **workers}
        self._progress.entered("starting workers")
        folder = str(self._job.path.resolve().parent)
        with blaming_key(self._job, "pipeline"):
            pool = DevicePool(workers=workers, transport=table.transport, worker_path=[folder])
        async with pool:
            self._pool, self._is_own = pool, True
            yield

    # One attempt after the other

    async def _go_on(self) -> TrainingSummary:
        while True:
            await self._until_one_may_be_used()
            self._without = self._losses.gone | self._drained_units()
            costs = StepCosts()
            run = self._run = self._make_run(costs)
            loss = None
            try:
                async with self._those_that_return(run):
                    summary = await run.run()
            except (WorkerLostError, WorkerStartError, EdgeError, HangError, TaskError) as error:
                if self._job.faults.lost_host == FAIL or (loss := loss_of(error)) is None:
                    raise
            finally:
                self._learn(run, costs)
            if loss is not None:
                await self._recover(loss, has_saved=run.saved > 0)
            elif self.orders.stopping or not (summary.stopped and run.is_handed_over):
                return summary

    def _make_run(self, *observers: Observer) -> TrainingRun:
        return TrainingRun(
            self._job,
            self._make_workload,
            progress=self._progress,
            collector=self._collector,
            observers=[*self._observers, *observers],
            pool=self._pool,
            orders=self.orders,
            shared=not self._is_own,
            place=self._place if self._without else None,
        )

    def _learn(self, run: TrainingRun, costs: StepCosts) -> None:
        """Keep the measured costs and the schedule of ``run`` for the next attempt, which resumes from a snapshot."""
        before, table = self._job.pipeline, run.job.pipeline
        if costs.steps:
            costs.balance = table.balance
            costs.draws |= self._costs.draws
            self._costs = costs
        if table.schedule not in (AUTO, before.schedule):
            is_chosen = before.schedule == AUTO and table.devices == before.devices
            balance = table.balance if is_chosen else None
            self._job = self._job.override("pipeline", schedule=table.schedule, balance=balance)
        if self._job.snapshots is not None:
            self._job = self._job.override("snapshots", resume=True)

    def _place(self, job: Job, workload: Workload) -> Job:
        """The job on the remaining devices. In the run's thread."""
        gone = {device for device, unit in self._unit_of().items() if unit in self._without}
        why = None
        if job.faults.lost_host == SHRINK:
            try:
                placed = shrunk(job, gone)
            except NotSplit as error:
                why = str(error)
            else:
                self._tell(f"{placed.pipeline.replicas} of {job.pipeline.replicas} replicas", placed)
                return placed
        if job.faults.lost_host == SPLIT and job.pipeline.schedule != AUTO:
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
        drained = self._drained
        others = () if drained is None else [each for each in drained.others if unit_of(each) not in drained]
        placed = moved(job, gone, others)
        self._tell("the stages stay as they are" + (f", since {why}" if why else ""), placed)
        return placed

    def _tell(self, how: str, placed: Job) -> None:
        where = devices_text(placed.pipeline.devices, placed.pipeline.replicas)
        text = f"goes on without {', '.join(sorted(self._without))}, on {where}; {how}"
        self._loop.call_soon_threadsafe(self._progress.entered, text)

    # What is lost, and what comes back

    async def _recover(self, loss: Loss, *, has_saved: bool) -> None:
        """Return when the job can go on. Raises ``HostLostError``."""
        self._note(f"{loss.how}; the job goes on from its last snapshot")
        self._losses = losses = self._losses.and_(loss, has_saved=has_saved, now=self._loop.time())
        if has_saved:
            self._return_pause = 0.0
        looks = 0
        try:
            while not self.orders.stopping:
                self._changed.clear()
                await self.orders.follow(self._begin_with)
                usable = frozenset(self._units() - self._drained_units())
                missing = {} if loss.broken else await self._start(usable)
                faults, now = self._job.faults, self._loop.time()
                move = next_move(loss, losses, faults, usable=usable, missing=missing, looks=looks, now=now)
                if move.kind is MoveKind.GIVE_UP:
                    raise HostLostError(move.units, move.text)
                self._losses = losses = replace(losses, gone=move.gone)
                if move.seconds:
                    self._progress.waiting(move.text)
                    await set_within(self._changed, move.seconds)
                elif move.text:
                    self._note(move.text)
                if move.kind is MoveKind.GO_ON:
                    return
                looks += 1
        finally:
            self._progress.waiting(None)

    async def _begin_with(self, schedule: str) -> None:
        """Have the next run follow ``schedule``."""
        self._job = self._job.override("pipeline", schedule=schedule)

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
                missing[unit] = short(error)
                del devices[unit]
            except LauncherError as error:  # There is no room for any of them.
                up = workers.up
                lacking = [unit for unit, each in devices.items() if set(workers.worker_of(each).values()) - up.keys()]
                return missing | dict.fromkeys(lacking, short(error))
            else:
                break
        return missing

    @asynccontextmanager
    async def _those_that_return(self, run: TrainingRun) -> AsyncIterator[None]:
        """While ``run`` trains, try to start lost units. When one is back, ``run`` hands over after its step."""
        if not self._losses.gone:
            yield
            return
        self._return_pause = max(self._return_pause, LONGEST_PAUSE)
        watching = asyncio.create_task(self._watch_for_returns(run), name=f"asyncpipe {self._job.name}: lost hosts")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _watch_for_returns(self, run: TrainingRun) -> None:
        while True:
            await asyncio.sleep(self._return_pause)
            if not run.saved and self._job.faults.lost_host != SHRINK:
                continue  # This attempt has saved nothing yet: do not interrupt it.
            tried = self._losses.gone - self._drained_units()
            missing = await self._start(tried)
            if back := tried - missing.keys():
                self._losses = replace(self._losses, gone=self._losses.gone - back)
                self._return_pause *= 2
                self._note(f"{', '.join(sorted(back))} is back, and is used from the next step on")
                run.hand_over()
                return

    # Drained hosts

    async def _until_one_may_be_used(self) -> None:
        """Wait while every host of the job is lost or drained, and so is every other host that it might use."""
        others = () if self._drained is None else self._drained.others
        try:
            while not self.orders.stopping and (units := self._units()):
                without = self._losses.gone | self._drained_units(others)
                if {*units, *map(unit_of, others)} - without:
                    return
                self._changed.clear()
                await self.orders.follow(self._begin_with)
                self._progress.waiting(f"waits: {', '.join(sorted(without & units))} are not to be used")
                await self._changed.wait()
        finally:
            self._progress.waiting(None)

    def _drained_changed(self) -> None:
        self._changed.set()
        if self._losses.gone | self._drained_units() != self._without:
            self._run.hand_over()

    def _drained_units(self, others: Sequence[str] = ()) -> frozenset[str]:
        if self._drained is None:
            return frozenset()
        return frozenset(unit for unit in {*self._units(), *map(unit_of, others)} if unit in self._drained)

    def _units(self) -> set[str]:
        return set(self._unit_of().values())

    def _unit_of(self) -> dict[str, str]:
        """Map each device of the job to its unit: its host, or its worker. Empty if a device does not exist here."""
        assert self._pool is not None
        assert self._pool.workers is not None
        try:
            devices = self._pool.resolve(self._job.pipeline.devices)
            workers = self._pool.workers.worker_of(devices)
        except (DeviceError, OptionError):  # The run says which key of the job is wrong.
            return {}
        return {each.name.partition("#")[0]: host_of(each.name) or unit_of(workers[each.name]) for each in devices}

    def _note(self, text: str) -> None:
        _logger.warning("job %s: %s", self._job.name, redacted(text))
        self._progress.noted(logging.WARNING, text)
