"""Devices that several pipelines share: one thread per device, one scheduler that decides for all.

A pipeline by itself has a pool of its own. Several on one pool train at the same time; their steps meet in one
scheduler, which gives each its share (``core/engine/share.py``)::

    Pipeline ── Tenancy ──┐
    Pipeline ── Tenancy ──┼──▶ DevicePool ──▶ Driver ──▶ a thread per device
    Pipeline ── Tenancy ──┘
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from asyncpipe.core.checks import check_choice, check_positive
from asyncpipe.core.engine.events import StepNotes
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.errors import PipelineClosedError
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.intra_op_threads import IntraOpThreads
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.execution import Bind, Execution, Gates, Tenant
from asyncpipe.runtime.executor import Executor, ThreadExecutor
from asyncpipe.runtime.lifespan import Life
from asyncpipe.runtime.portal import Portal

__all__ = ["DevicePool", "Tenancy"]

_T = TypeVar("_T")


class DevicePool:
    """Devices for any number of pipelines: ``async with DevicePool() as pool``, then ``Pipeline(..., pool=pool)``.

    ``loop``: ``"running"`` drives steps on the loop that opens the pool, ``"own"`` on a loop in a thread of its own,
    which a caller that blocks its loop cannot delay.
    ``in_flight``: tasks a lane may hold that are handed to its device and not completed.
    ``intra_op_threads``: torch's intra-op threads on each CPU device's thread.
    ``executors``: makes a device's executor from its name, in place of a thread (see ``asyncpipe.testing``).

    A device gets its executor when the first pipeline that names it opens, and keeps it until the pool is closed.
    """

    def __init__(
        self,
        *,
        loop: Literal["running", "own"] = "running",
        in_flight: int = 16,
        intra_op_threads: int = 1,
        executors: Callable[[str], Executor] | None = None,
    ) -> None:
        check_choice("loop", loop, ("running", "own"))
        check_positive("intra_op_threads", intra_op_threads)
        self._own_loop = loop == "own"
        self._intra_op = IntraOpThreads(intra_op_threads)
        self._make_executor = executors
        self.driver = Driver({}, in_flight=in_flight)
        self.life = Life(self.driver, "device pool")

    async def __aenter__(self) -> DevicePool:
        self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Wait for steps under way, and let none begin any more; then end every thread. May be called again."""
        if self.life.is_open:
            await self.life.run(self.driver.drain())
            self.life.close()

    def open(self, *, in_thread: bool = False) -> None:
        """Be ready for pipelines, on the running loop or, if that was asked for, on one in a thread."""
        if self._own_loop or in_thread:
            self.life.open_in_thread()
        else:
            self.life.open()

    def admit(self, devices: Sequence[Device]) -> None:
        """Give each of ``devices`` an executor that has none yet; on the driver's loop."""
        missing = [device for device in devices if device.name not in self.driver]
        for device in missing:
            self.driver.add(device.name, self._executor(device))
        if missing:
            self._intra_op.settle()

    def _executor(self, device: Device) -> Executor:
        if self._make_executor is not None:
            return self._make_executor(device.name)
        return ThreadExecutor(device.name, on_start=None if device.is_cuda else self._intra_op.initializer())


class Tenancy:
    """A pipeline's place on a pool: opened once, closed once, with all of the pool where that is the pipeline's own."""

    def __init__(self, pool: DevicePool, devices: Sequence[Device], tenant: Tenant, *, own: bool) -> None:
        self.tenant = tenant
        self._pool = pool
        self._devices = devices
        self._own = own
        self._opened = False
        self._finalizer: weakref.finalize[..., Tenancy] | None = None

    @property
    def driver(self) -> Driver:
        """Runs the steps."""
        return self._pool.driver

    @property
    def portal(self) -> Portal | None:
        """The thread of the driver's loop, if that loop is the pool's own."""
        return self._pool.life.portal

    @property
    def is_open(self) -> bool:
        """Whether it takes steps: it has been opened, and nobody has begun to close it since."""
        return self._is_left_to_close and self.driver.takes(self.tenant)

    @property
    def _is_left_to_close(self) -> bool:
        return self._finalizer is not None and self._finalizer.alive and self._pool.life.is_open

    def check(self) -> None:
        """Raise ``PipelineClosedError`` unless it is open."""
        if self.is_open:
            return
        if not self._opened:
            raise PipelineClosedError("the pipeline is not open; use 'async with' (or 'with pipeline.sync()')")
        raise PipelineClosedError("the pipeline is closed")

    async def open(self) -> None:
        """Start what threads are missing; on the loop that will drive the steps, unless that is the pool's own."""
        self._open_pool(in_thread=False)
        await self._pool.life.run(self._admit())

    def open_in_thread(self) -> None:
        """As ``open``, with the loop in a thread; blocks."""
        self._open_pool(in_thread=True)
        if self.portal is None:
            raise PipelineClosedError("sync() blocks its thread, which drives this pool's loop; give it loop='own'")
        self._pool.life.call(self._admit())

    async def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the driver's loop; from a coroutine of any loop."""
        return await self._pool.life.run(coroutine)

    def step(
        self, graph: TaskGraph, bind: Bind, notes: StepNotes, gates: Gates | None = None
    ) -> Coroutine[Any, Any, Execution]:
        """One step of the pipeline, as ``Driver.run``; to be awaited on the driver's loop."""
        # No coroutine of this object's own: its frame would keep the pool alive in the traceback of a step that fails.
        return self.driver.run(graph, bind, notes, gates=gates, tenant=self.tenant)

    async def aclose(self) -> None:
        """Wait for steps under way, and let none begin any more; then end what is its own. May be called again."""
        if self._is_left_to_close:
            await self.run(self.driver.drain(self.tenant))
            self._shut()

    def close(self) -> None:
        """The same for one that was opened in a thread; blocks."""
        if self._is_left_to_close:
            self._pool.life.call(self.driver.drain(self.tenant))
            self._shut()

    def _open_pool(self, *, in_thread: bool) -> None:
        if self._opened:
            raise PipelineClosedError("a pipeline opens once; make a new one")
        self._opened = True
        if self._own:
            self._pool.open(in_thread=in_thread)
        else:
            self._pool.life.check()

    async def _admit(self) -> None:
        try:
            self._pool.admit(self._devices)
        except BaseException:
            if self._own:
                await self._pool.aclose()
            raise
        # Called when the pipeline is closed, or dropped without being closed, or when the interpreter exits.
        self._finalizer = weakref.finalize(self, self.tenant.observers.close)

    def _shut(self) -> None:
        assert self._finalizer is not None
        self._finalizer()
        if self._own:
            self._pool.life.close()
        self.tenant.observers.join()
