"""Devices that several pipelines share: one thread per device, and one scheduler that decides for all of them.

A pipeline without ``pool=`` has a pool of its own. Pipelines on one pool train at the same time; their steps meet in
one scheduler, which gives each its share (``core/policies/share.py``)::

    Pipeline ── Tenancy ──┐
    Pipeline ── Tenancy ──┼──▶ DevicePool ──▶ Driver, on a loop in a thread ──▶ a thread per device
    Pipeline ── Tenancy ──┘

The scheduler's loop is the pool's own, so a caller that blocks its own loop delays no task, and callers may use any
loop, or none. What both kinds of callers do is written once, as a generator (``runtime/waits.py``).
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.errors import NestedWaitError, OptionError, PipelineClosedError
from asyncpipe.ops.autograd.own_draws import replace_torch_random, restore_torch_random
from asyncpipe.ops.device.compile_gate import on_hold_up
from asyncpipe.ops.device.devices import Device, make_current, resolve_devices
from asyncpipe.ops.device.intra_op_threads import IntraOpThreads
from asyncpipe.ops.execute.binder import Binder
from asyncpipe.pipeline.pool_options import PoolOptions, takes
from asyncpipe.pipeline.workers import Workers
from asyncpipe.runtime.device_thread import hold_up
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.execution import Bind, Execution, Gates
from asyncpipe.runtime.executor import Executor, TaskFunction
from asyncpipe.runtime.line import Line
from asyncpipe.runtime.parts_driver import PartsDriver
from asyncpipe.runtime.portal import EXIT_SECONDS, Portal, PortalCall, whole
from asyncpipe.runtime.process import Process
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.task_board import TaskBoard
from asyncpipe.runtime.task_threads import call_as_task, inside_task
from asyncpipe.runtime.thread_executor import ThreadExecutor
from asyncpipe.runtime.turn import Turn
from asyncpipe.runtime.waits import Waiting, drive, drive_blocking
from asyncpipe.runtime.watchdog import Watchdog

__all__ = ["DevicePool", "Tenancy"]

_T = TypeVar("_T")

on_hold_up(hold_up)


class DevicePool:
    """Devices for any number of pipelines: ``async with DevicePool() as pool``, then ``Pipeline(..., pool=pool)``.

    ``with`` opens it for callers that block. It takes the fields of ``PoolOptions`` as keyword arguments. A device gets
    its executor when the first pipeline that names it opens, and keeps it until the pool is closed. A pool opens once.
    No thread is left, whichever way it ends: closed, garbage collected without being closed, or at the interpreter's
    exit.

    On accelerators, callers that share a stream, as all do that never set one, wait for one another's steps, and for a
    kernel of another that hangs. Give each caller streams of its own: ``asyncpipe.CallerStreams``. The service and
    ``asyncpipe train`` do.
    """

    @takes(PoolOptions)
    def __init__(self, options: PoolOptions) -> None:
        if options.workers == "auto":
            raise OptionError("workers='auto' is by the steps of one pipeline; give it to Pipeline, not to DevicePool")
        self.on_hosts = options.on_hosts
        """Whether its devices may be on other machines."""
        self.workers = Workers(options) if options.has_workers else None
        """The processes that the devices are in, if they are not in this one."""
        self.driver: Driver | PartsDriver = (
            Driver({}, in_flight=options.in_flight, policy=options.policy)
            if self.workers is None
            else self.workers.driver
        )
        seconds = options.hang_seconds
        self.watchdog = None if seconds is None else Watchdog(self.driver, factor=options.hang_factor, floor=seconds)
        """What gives up tasks that hang; not of a worker's own pool."""
        self._portal: Portal | None = None
        """The thread of the driver's loop; in a worker process the driver has the loop of the process instead."""
        self._options = options
        self._board: TaskBoard | None = None
        self._intra_op = IntraOpThreads(options.intra_op_threads)
        self.process = Process()
        """The process that opened it."""
        self._finalizer: weakref.finalize[..., DevicePool] | None = None

    async def __aenter__(self) -> DevicePool:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __enter__(self) -> DevicePool:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        drive_blocking(self.closed())

    async def aclose(self) -> None:
        """Refuse new steps, wait for running ones, then end every thread. May be called again."""
        await drive(self.closed())

    def closed(self) -> Waiting[None]:
        """As ``aclose``, for both kinds of callers."""
        if self.is_open:
            self.check_closing()
            yield from self.on_loop(self.drain())
            self.end_threads()

    async def drain(self) -> None:
        """Refuse new steps, wait for running ones, and stop the workers; on the driver's loop."""
        await self.driver.drain()
        if self.workers is not None:
            await self.workers.aclose()
        if self.watchdog is not None:
            await self.watchdog.__aexit__()

    @property
    def is_open(self) -> bool:
        """Whether it has been opened and not closed since. Never in a forked child of the process that opened it."""
        return self._finalizer is not None and self._finalizer.alive and self.process.is_this

    @property
    def is_broken(self) -> bool:
        """Whether the pool is open, but takes no steps, because its scheduler raised an error."""
        return self.is_open and self.driver.is_closed

    def check(self) -> None:
        """Raise ``PipelineClosedError`` unless it is open."""
        if not self.is_open:
            if self._finalizer is not None:
                self.process.check()
            state = "not open; use 'async with'" if self._finalizer is None else "closed"
            raise PipelineClosedError(f"the device pool is {state}")

    def resolve(self, devices: Sequence[str | torch.device]) -> list[Device]:
        """Logical devices of these names, as ``resolve_devices``; they may be on hosts if the pool's workers may."""
        return resolve_devices(devices, on_hosts=self.on_hosts)

    @property
    def has_built_in_policies(self) -> bool:
        """Whether nobody else decides about its lanes."""
        return self._options.policy is None

    @property
    def has_executors(self) -> bool:
        """Whether its executors are somebody's own."""
        return self._options.executors is not None

    def check_closing(self) -> None:
        """Raise ``NestedWaitError`` inside a task while a step is under way, for which closing would wait."""
        if inside_task() and self.driver.is_busy:
            raise NestedWaitError(
                "closing inside a stage, a loss or a hook would wait for the step that this is part of; close it when "
                "the step is over"
            )

    def bind(self, bind: Bind) -> Bind:
        """``bind`` for this pool's executors: what its tasks call sees that it is inside a task."""
        # The threads of a ThreadExecutor are marked once. Any other executor may run tasks anywhere.
        return bind if self._options.executors is None else partial(_bind_marked, bind)

    def open(self) -> None:
        """Start a loop in a thread, and drive steps there. Blocks for a moment."""
        self._check_new()
        self._portal = Portal()
        try:
            self._portal.call(self._start())
        except BaseException:
            self._portal.close()
            raise

    def open_here(self, board: TaskBoard | None) -> None:
        """Drive steps on the running loop, in a worker process, of which nobody else uses the loop.

        ``board`` shows to the controller what the devices run.
        """
        self._check_new()
        self._board = board
        self._open_driver()

    def _check_new(self) -> None:
        if self._finalizer is not None:
            raise PipelineClosedError("a device pool opens once; make a new one")
        self.process = Process()

    @property
    def portal(self) -> Portal:
        """The thread of the driver's loop."""
        assert self._portal is not None
        return self._portal

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> PortalCall[_T]:
        """Run ``coroutine`` on the driver's loop; to be waited for later."""
        return self.portal.submit(coroutine)

    def on_loop(self, coroutine: Coroutine[Any, Any, _T]) -> Waiting[_T]:
        """Run ``coroutine`` on the driver's loop, and wait for its end, for both kinds of callers."""
        if self._portal is None:
            return (yield _OnThisLoop(coroutine))  # type: ignore[no-any-return]
        return (yield from whole(self._portal.submit(coroutine)))

    async def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the driver's loop, from a coroutine of any loop."""
        return await drive(self.on_loop(coroutine))

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the driver's loop, and block until it has ended."""
        return self.portal.call(coroutine)

    @property
    def threads(self) -> Driver:
        """The driver of a pool whose devices are in this process."""
        assert isinstance(self.driver, Driver)
        return self.driver

    async def admit(self, devices: Sequence[Device]) -> None:
        """Make executors for those of ``devices`` that have none, or start their workers; on the driver's loop."""
        if self.workers is not None:
            await self.workers.admit(devices)
            return
        missing = [device for device in devices if device.name not in self.threads]
        for device in missing:
            self.threads.add(device.name, self._make_executor(device))
        if missing:
            self._intra_op.wait()

    def end_threads(self) -> None:
        """End the threads, when no step is under way. Blocks for a moment. May be called again."""
        if self._finalizer is not None and self._finalizer.alive:
            self._finalizer()
            self.driver.join()
            if self._portal is not None:
                self._portal.join()

    async def _start(self) -> None:
        self._open_driver()
        if self.watchdog is not None:
            await self.watchdog.__aenter__()

    def _open_driver(self) -> None:
        self.driver.open()
        replace_torch_random()
        # Runs when the pool is closed, or garbage collected without being closed, or when the interpreter exits.
        ending = weakref.finalize(self, _end_threads, self.process, self.driver, self.workers, self._portal)
        self._finalizer = ending
        # Only there may threads be waited for: the garbage collector runs anywhere, also on one of them.
        if isinstance(self.driver, Driver):
            at_exit = atexit.register(partial(_end_at_exit, ending, self.process, self.driver))
            weakref.finalize(self, atexit.unregister, at_exit).atexit = False

    def _make_executor(self, device: Device) -> Executor:
        if self._options.executors is not None:
            return self._options.executors(device.name)
        accelerator = partial(_keep_backwards_here, device.physical)
        on_start = accelerator if device.is_accelerator else self._intra_op.initializer()
        return ThreadExecutor(device.name, on_start=on_start, board=self._board)


def _keep_backwards_here(device: torch.device) -> None:
    """Let this thread, of ``device``, run its backwards itself, not the autograd engine's thread of the device.

    All backwards of a device share that thread, the caller's included: one that waits there for another never ends.
    """
    make_current(device)
    torch.autograd.set_multithreading_enabled(False)


def _bind_marked(bind: Bind, task: Task) -> TaskFunction:
    return partial(call_as_task, bind(task))


def _end_threads(
    process: Process, driver: Driver | PartsDriver, workers: Workers | None, portal: Portal | None
) -> None:
    if process.is_this:
        restore_torch_random()
        driver.close()
        if workers is not None:
            workers.kill()  # Those that are still there: nobody has closed the pool.
        if portal is not None:
            portal.close()


def _end_at_exit(ending: Callable[[], object], process: Process, driver: Driver) -> None:
    """Before the interpreter ends: it kills threads that want to run Python again, and torch's C++ aborts then."""
    if process.is_this:
        ending()
        driver.join_within(EXIT_SECONDS)


def _leave(driver: Driver | PartsDriver, tenant: Tenant) -> None:
    driver.leave(tenant)
    tenant.observers.close()


class _OnThisLoop:
    """A coroutine that is awaited where it is waited for."""

    def __init__(self, coroutine: Coroutine[Any, Any, _T]) -> None:
        self._coroutine = coroutine

    async def awaited(self) -> Any:
        return await self._coroutine

    def wait(self) -> Any:
        raise AssertionError("a thread cannot block for its own loop")


class StagesElsewhere(Protocol):
    """The stages of a pipeline that live in workers. Used on the driver's loop."""

    async def load(self) -> None:
        """Send them there, once the workers are up."""

    async def unload(self) -> None:
        """Have the workers forget them. Raises nothing if workers are gone."""


class Tenancy:
    """A pipeline's use of a pool: opened once and closed once, together with the pool if the pipeline owns it."""

    def __init__(
        self,
        pool: DevicePool,
        devices: Sequence[Device],
        tenant: Tenant,
        *,
        own: bool,
        stages: StagesElsewhere | None = None,
    ) -> None:
        """``own``: whether the pool serves this pipeline alone. ``stages`` are those that live in workers."""
        self.pool = pool
        """What runs the steps."""
        self.tenant = tenant
        self.turn = Turn()
        """Held by who makes a step: steps of one pipeline run one after the other."""
        self._stages = stages
        self._devices = devices
        self._own = own
        self._opened = False
        self._finalizer: weakref.finalize[..., Tenancy] | None = None

    @property
    def is_open(self) -> bool:
        """Whether steps may begin: it has been opened, and closing has not begun."""
        return self.is_up and self.pool.driver.accepts(self.tenant)

    @property
    def is_up(self) -> bool:
        """Whether it has been opened and not been closed since, though closing may have begun."""
        return self._finalizer is not None and self._finalizer.alive and self.pool.is_open

    def check(self) -> None:
        """Raise ``PipelineClosedError`` unless it is open."""
        if self.is_open:
            if (hung := self.tenant.hung) is not None:
                raise PipelineClosedError(
                    f"a task of this pipeline was given up, and its thread may still write to the model: {hung}; make "
                    "a new pipeline, of a model from a snapshot"
                ) from hung
            return
        self.check_process()
        if not self._opened:
            raise PipelineClosedError("the pipeline is not open; use 'async with' (or 'with pipeline.sync()')")
        raise PipelineClosedError("the pipeline is closed")

    def check_process(self) -> None:
        """Raise ``PipelineClosedError`` in a forked child of the process that opened it.

        To be called before any lock is taken, since a thread that the child does not have may hold it.
        """
        if self._opened:
            self.pool.process.check()

    def check_caller(self, *, blocking: bool) -> None:
        """Raise where a wait for a step would never end; before any lock is taken. ``blocking``: the thread waits.

        Raises ``PipelineClosedError`` as ``check_process``, ``NestedWaitError`` inside a task or on the loop's thread.
        """
        self.check_process()
        if inside_task():
            raise NestedWaitError(
                "a step inside a stage, a loss or a hook would wait for devices that may wait for it; call the "
                "pipeline there, pipe(x), which runs on the task's own thread, or make the step outside of this one"
            )
        if blocking and self.is_up:
            self.pool.portal.check_thread()

    def opened(self) -> Waiting[None]:
        """Start the threads that are missing, or send stages to workers; for both kinds of callers."""
        if self._opened:
            raise PipelineClosedError("a pipeline opens once; make a new one")
        self._opened = True
        if self._own:
            self.pool.open()
        else:
            self.pool.check()
        try:
            yield from self.pool.on_loop(self._admit())
        except BaseException:
            if self._own:
                yield from self.pool.closed()
            raise

    def start(
        self, graph: TaskGraph, binder: Binder, line: Line[Execution], gates: Gates | None = None
    ) -> PortalCall[Execution]:
        """Begin one step of the pipeline, behind the last one of ``line``. Called on the caller's thread."""
        driver = self.pool.threads
        # Without the pool, which the traceback of a step that fails would keep alive.
        bind, around, notes = self.pool.bind(binder.bind), binder.around, binder.notes
        begin = partial(driver.start, graph, bind, notes, around=around, gates=gates, tenant=self.tenant)
        return line.submit(self.pool.portal, driver, begin)

    def closed(self) -> Waiting[None]:
        """Refuse new steps, wait for running ones, then end the threads that are its own. May be called again."""
        if self.is_up:
            self.pool.check_closing()
            yield from self.pool.on_loop(self._drain())
            self._shut()

    async def _drain(self) -> None:
        await self.pool.driver.drain(self.tenant)
        if self._stages is not None:
            await self._stages.unload()
        if self._own:
            await self.pool.drain()

    async def _admit(self) -> None:
        await self.pool.admit(self._devices)
        if self._stages is not None:
            await self._stages.load()
        # Runs when the pipeline is closed, or garbage collected without being closed, or when the interpreter exits.
        self._finalizer = weakref.finalize(self, _leave, self.pool.driver, self.tenant)

    def _shut(self) -> None:
        assert self._finalizer is not None
        self._finalizer()
        if self._own:
            self.pool.end_threads()
        self.tenant.observers.join()
