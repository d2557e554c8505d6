"""One worker from its start to its end, on the loop that serves all workers: who decides that it is lost.

::

    launched ──▶ connected ──▶ ready ──▶ watched ──▶ gone
        └────────────┴──────────┴──▶ WorkerStartError   │  its process has ended
           ended, or the deadline                       │  its connection is closed
                                                        │  it has not answered pings for long
                                                        │  the caller has killed it, or stopped it in vain
                                                        ▼
                                  killed, reaped, its last messages delivered, WorkerLostError

The loop is not the caller's, so that a caller that blocks its own neither misses a loss nor sees one that is none.
Silence is counted in pings that were really awaited: if this whole process was stopped for a minute, no worker is to
blame.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from asyncpipe.errors import MessageError, OptionError, WorkerLostError, WorkerStartError
from asyncpipe.runtime.workers.channel import Channel, Role
from asyncpipe.runtime.workers.clock import ClockOffset
from asyncpipe.runtime.workers.launcher import (
    Invitation,
    Launcher,
    PlannedWorker,
    WatchedProcess,
    WorkerExit,
    WorkerProcess,
)
from asyncpipe.runtime.workers.lifeline import CONTROLLER_GONE
from asyncpipe.runtime.workers.listener import ControlListener
from asyncpipe.runtime.workers.main_module import own_main_class
from asyncpipe.runtime.workers.packed import EMPTY, Packed, unpack
from asyncpipe.runtime.workers.place import WorkerPlace, this_machine
from asyncpipe.runtime.workers.remote_errors import with_remote_text
from asyncpipe.runtime.workers.remote_logs import handle_remote_record
from asyncpipe.secured import MacError, Secured

__all__ = ["Supervised", "Supervisor", "WorkerLimits"]

_logger = logging.getLogger(__name__)

HANG_UP_SECONDS = 1.0
"""For a process to end whose connection is closed. It usually is what closed it."""
STACK_SECONDS = 0.3
"""For a worker to write down what its threads do, before it is killed. One that is stopped does not."""
KILL_SECONDS = 5.0
"""For a process to be gone that was killed. One that waits for a dead disk may take for ever."""
NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """How long a controller waits for its workers, in seconds."""

    start: float = 120.0
    """For a worker to be up. It imports torch, and what its entry needs."""
    ping: float = 0.5
    """Between two pings."""
    silent: float = 20.0
    """Without any answer, after which a worker is taken for hung and is killed. A thread may hold the GIL that long."""
    stop: float = 5.0
    """For a worker to end that was told to; it is killed then."""

    def __post_init__(self) -> None:
        if not (min(self.start, self.ping, self.silent) > 0 and self.stop >= 0):
            raise OptionError(f"limits of workers are positive numbers of seconds, got {self}")


class Supervised(Protocol):
    """Who is told what a worker says, on the caller's loop."""

    def deliver(self, message: object) -> None: ...
    def deliver_answer(self, number: int, answer: object, error: BaseException | None) -> None: ...
    def end(self, loss: WorkerLostError, was_stopped: bool) -> None: ...


class Supervisor:
    """Starts one worker, watches it, and ends it. A ``Receiver`` of its channel."""

    def __init__(
        self,
        worker: PlannedWorker,
        launcher: Launcher,
        listener: ControlListener,
        limits: WorkerLimits,
        supervised: Supervised,
        loops: tuple[asyncio.AbstractEventLoop, asyncio.AbstractEventLoop],
    ) -> None:
        """``loops`` are the one that this runs on, and the caller's."""
        self.name = worker.name
        self.pid = 0
        self.place: WorkerPlace | None = None
        """Once the worker is up."""
        self.clock = ClockOffset()
        self.shares_clock = False
        """Whether the worker is on this machine."""
        self._devices = worker.devices
        self._launcher = launcher
        self._listener = listener
        self._limits = limits
        self._supervised = supervised
        self._loop, self._callers_loop = loops
        self._process: WorkerProcess | None = None
        self._channel: Channel | None = None
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._closed: asyncio.Future[Exception] = self._loop.create_future()
        self._told: asyncio.Future[str] = self._loop.create_future()
        """Why the caller has killed it."""
        self._shows_stacks = False
        self._ended: asyncio.Future[WorkerExit] = self._loop.create_future()
        self._stops_at = math.inf
        self._watching: asyncio.Task[None] | None = None

    # Called by the caller, from any thread.

    def send(self, role: Role, number: int = 0, packed: Packed = EMPTY, *, urgent: bool = False) -> None:
        """Send to the worker, once it is up. What is sent when it is gone is lost."""
        assert self._channel is not None
        self._channel.send(role, number, packed, urgent=urgent)

    def kill(self, why: str, *, stacks: bool = False) -> None:
        """End the worker at once, or with ``stacks`` when it has written down what its threads do."""
        self._post(self._loop, self._kill, why, stacks)

    def stop(self) -> None:
        """Tell the worker to end, and kill it if it does not."""
        self._post(self._loop, self._stop)

    @property
    def is_watching(self) -> bool:
        """Whether the worker has come up; also when it has ended since."""
        return self._watching is not None

    @property
    def silent_seconds(self) -> float:
        """Since something came from the worker."""
        return math.inf if self._channel is None else time.perf_counter() - self._channel.heard_at

    @property
    def watched(self) -> WatchedProcess | None:
        """The worker's process, if more is known of it."""
        return self._process if isinstance(self._process, WatchedProcess) else None

    # On the loop of the workers.

    async def start(self, entry: str, secret: bytes, path: tuple[str, ...] = ()) -> None:
        """Return when the worker is up, and is watched. Raises ``WorkerStartError``; nothing is left of it then."""
        try:
            async with asyncio.timeout(self._limits.start) as limit:
                await self._come_up(entry, secret, path)
        except BaseException as error:
            await self._clear_away()
            if isinstance(error, _EndedEarlyError):
                raise self._start_error(str(error)) from None
            if limit.expired():
                raise self._start_error(f"was not up within {self._limits.start:g} s") from None
            if isinstance(error, Exception):
                raise self._start_error(f"could not be launched ({type(error).__name__}: {error})") from error
            raise
        self._watching = self._loop.create_task(self._watch(), name=f"asyncpipe worker {self.name}")

    def _start_error(self, how: str) -> WorkerStartError:
        return WorkerStartError(self.name, how, self._stderr())

    async def _come_up(self, entry: str, secret: bytes, path: tuple[str, ...]) -> None:
        with self._listener.expecting(self._connect) as (address, token):
            invitation = Invitation(self.name, entry, address, secret, token, self._devices, path)
            self._process = await self._launcher.start(invitation)
            self._ended = self._loop.create_task(_exit_of(self._process))
            await _first_of(self._ended, self._connected)
        if self._connected.done():
            await _first_of(self._ended, self._closed, self._ready)
        if not self._ready.done():
            raise _EndedEarlyError(await self._last_status())

    def _connect(self, connected: Secured) -> None:
        self._channel = Channel(connected, self._loop, self)
        self._connected.set_result(None)

    async def _watch(self) -> None:
        try:
            how = await self._until_it_ends()
        except asyncio.CancelledError:  # The loop is closed without waiting for workers.
            how = "was killed with its group"
        status = await self._clear_away()
        code = None if status is None else status.status
        loss = WorkerLostError(self.name, how, code, stderr=self._stderr())
        self._post(self._callers_loop, self._supervised.end, loss, self._stops_at < math.inf)

    async def _until_it_ends(self) -> str:
        """What became of it, once its end is near."""
        assert self._channel is not None
        pings_missed, heard_at = 0, self._channel.heard_at
        while True:
            self._channel.send(Role.PING, int(time.perf_counter() * NANOSECONDS), urgent=True)
            seconds = max(0.0, min(self._limits.ping, self._stops_at - self._loop.time()))
            await _first_of(self._ended, self._closed, self._told, timeout=seconds)
            if self._told.done():
                if self._shows_stacks and self.watched is not None:
                    self.watched.show_stacks()
                    await _first_of(self._ended, timeout=STACK_SECONDS)
                return f"was killed by its controller: {self._told.result()}"
            if self._ended.done() or self._closed.done():
                return await self._last_status()
            if self._loop.time() >= self._stops_at:
                return f"did not end within {self._limits.stop:g} s when it was told to"
            pings_missed = pings_missed + 1 if self._channel.heard_at == heard_at else 0
            heard_at = self._channel.heard_at
            if pings_missed * self._limits.ping >= self._limits.silent:
                return f"has not answered for {self._limits.silent:g} s"

    async def _last_status(self) -> str:
        """How the process ended, whose connection may be closed a moment before."""
        if self._closed.done() and isinstance(error := self._closed.result(), MacError):
            return f"has lost its connection to the controller: {error}"
        await asyncio.wait([self._ended], timeout=HANG_UP_SECONDS)
        if not self._ended.done():
            return "has closed its connection"
        ended = self._ended.result()
        return "has lost its connection to the controller" if ended.status == CONTROLLER_GONE else str(ended)

    async def _clear_away(self) -> WorkerExit | None:
        """Have the process killed and reaped, take in its last messages, and close the connection."""
        try:
            return await self._kill_and_reap()
        except asyncio.CancelledError:  # The loop is being closed, which cancels once. This must be done before.
            return await self._kill_and_reap()

    async def _kill_and_reap(self) -> WorkerExit | None:
        status = None
        if self._process is not None:
            try:
                self._process.kill()
            except ProcessLookupError:
                pass
            except Exception:
                _logger.exception("worker %r cannot be killed", self.name)
            self._ended.cancel()
            try:
                async with asyncio.timeout(KILL_SECONDS):
                    status = await _exit_of(self._process)
            except TimeoutError:
                _logger.error("worker %r was killed, and has not ended within %g s", self.name, KILL_SECONDS)
        if self._channel is not None:
            self._channel.drain()
            self._channel.close()
        return status

    def _stderr(self) -> str:
        return "" if self.watched is None else self.watched.stderr()

    def _kill(self, why: str, stacks: bool = False) -> None:
        if not self._told.done():
            self._shows_stacks = stacks
            self._told.set_result(why)

    def _stop(self) -> None:
        if self._stops_at == math.inf:
            self.send(Role.STOP)
            self._stops_at = self._loop.time() + self._limits.stop  # Looked at behind the next ping.

    # The channel calls these.

    def received(self, role: Role, number: int, packed: Packed) -> None:
        """Take a pong or a sign of life; pass on the rest."""
        if role is Role.PONG:
            now = time.perf_counter()
            self.clock.add(number / NANOSECONDS, struct.unpack("!d", packed.parts[0])[0], now)
            return
        try:
            content = unpack(packed, own_main_class)
        except MessageError as error:
            self._cannot_read(role, number, error)
            return
        match role:
            case Role.READY:
                self.pid, self.place = content
                self.shares_clock = self.place.machine == this_machine()
                if not self._ready.done():
                    self._ready.set_result(None)
            case Role.ANSWER:
                self._post(self._callers_loop, self._supervised.deliver_answer, number, content, None)
            case Role.FAILURE:
                raised = with_remote_text(self.name, *content)
                self._post(self._callers_loop, self._supervised.deliver_answer, number, None, raised)
            case Role.LOG:
                self._post(self._callers_loop, handle_remote_record, content)
            case _:
                self._post(self._callers_loop, self._supervised.deliver, content)

    def closed(self, error: Exception) -> None:
        """The worker has closed the connection, or the operating system has, since it ended; or it is not the worker
        that speaks."""
        if not self._closed.done():
            self._closed.set_result(error)

    def _cannot_read(self, role: Role, number: int, error: MessageError) -> None:
        if role in (Role.ANSWER, Role.FAILURE):
            self._post(self._callers_loop, self._supervised.deliver_answer, number, None, error)
        else:
            _logger.error("a message from worker %r is lost: %s", self.name, error)
            self._kill(f"a message from it was lost: {error}")

    def _post(self, loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not loop.is_closed():
                raise


async def _first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:  # noqa: ASYNC109
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


async def _exit_of(process: WorkerProcess) -> WorkerExit:
    try:
        return WorkerExit(await process.wait())
    except Exception:
        _logger.exception("a launcher cannot say how a worker has ended")
        return WorkerExit(None)


class _EndedEarlyError(Exception):
    """The process has ended, or hung up, before it was up."""
