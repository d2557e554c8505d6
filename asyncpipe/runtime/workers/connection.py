"""A worker, as its controller sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from asyncpipe.errors import WorkerLostError
from asyncpipe.runtime.process import Process
from asyncpipe.runtime.task_board import ShownTask
from asyncpipe.runtime.workers.channel import Role
from asyncpipe.runtime.workers.packed import pack
from asyncpipe.runtime.workers.place import WorkerPlace
from asyncpipe.runtime.workers.supervisor import Supervisor
from asyncpipe.shared_memory import SharedPool

__all__ = ["WorkerConnection"]


class WorkerConnection:
    """A worker that is up. Used on the loop of its ``WorkerGroup``, except for what says otherwise."""

    def __init__(
        self,
        name: str,
        received: Callable[[WorkerConnection, Any], object],
        lost: Callable[[WorkerConnection, WorkerLostError], object],
    ) -> None:
        self.name = name
        self.lost: WorkerLostError | None = None
        """Set when it has ended without having been told to, or was killed; what it is good for is over then."""
        self.ended = asyncio.Event()
        """Set when its process is gone, and nothing of it is left."""
        self._received = received
        self._on_lost = lost
        self._supervisor: Supervisor | None = None
        self._loop = asyncio.get_running_loop()
        self._process = Process()
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}

    def begin(self, supervisor: Supervisor) -> None:
        """The worker is about to be started by ``supervisor``, which calls the methods below on this loop."""
        self._supervisor = supervisor

    # What a caller uses.

    @property
    def is_up(self) -> bool:
        """Whether it has come up; also when it has ended since."""
        return self._supervisor is not None and self._supervisor.is_watching

    @property
    def pid(self) -> int:
        """The number of its process on its host."""
        return self.supervisor.pid

    @property
    def place(self) -> WorkerPlace:
        """Where it is, once it is up."""
        assert self.supervisor.place is not None
        return self.supervisor.place

    @property
    def silent_seconds(self) -> float:
        """How long nothing has come from it. It is pinged all the time, so this is short while it lives."""
        return self.supervisor.silent_seconds

    def running(self) -> Sequence[ShownTask]:
        """The tasks that run in it, or ran when it ended; empty if it is on another host. From any thread."""
        watched = self.supervisor.watched
        return () if watched is None or watched.board is None else watched.board.running()

    @property
    def batches(self) -> SharedPool | None:
        """Memory for its mini-batches; ``None`` if it is on another host."""
        return None if self.supervisor.watched is None else self.supervisor.watched.batches

    @property
    def has_own_accelerators(self) -> bool:
        """Whether it sees only the accelerators among its devices, numbered from 0 in their order."""
        return self.supervisor.watched is not None and self.supervisor.watched.has_own_accelerators

    @property
    def clock_offset(self) -> float:
        """Seconds to take off its times (``time.perf_counter``) to have this process's. 0 on one machine."""
        return 0.0 if self.supervisor.shares_clock else self.supervisor.clock.offset

    @property
    def clock_error(self) -> float:
        """How far its times may be off then, in seconds; 0 on one machine, infinite before the first ping."""
        return 0.0 if self.supervisor.shares_clock else self.supervisor.clock.half_trip

    @property
    def round_trip(self) -> float:
        """Seconds of the shortest of the last pings to it and back; infinite before the first."""
        return 2 * self.supervisor.clock.half_trip

    @property
    def supervisor(self) -> Supervisor:
        """Who watches it, on a thread of its own."""
        assert self._supervisor is not None
        return self._supervisor

    def send(self, message: object, *, urgent: bool = False) -> None:
        """Send ``message``, or what ``pack`` made of it. From any thread; never blocks.

        Messages arrive in the order in which they are sent, but urgent ones overtake the others. Pickles here: pack a
        large one in a thread. Raises ``MessageError`` if it cannot be pickled, and ``WorkerLostError``.
        """
        self._send(Role.MESSAGE, 0, message, urgent)

    async def ask(self, message: object, *, urgent: bool = False) -> Any:
        """Send ``message``, and return the worker's answer.

        What the worker raises is raised here, with the traceback's text (``RemoteError``) as the last of its causes. A
        worker that ends before it has answered is a ``WorkerLostError``. Otherwise as ``send``.
        """
        return await self._ask(Role.ASK, message, urgent)

    async def query(self, question: object) -> Any:
        """Ask what the thread there answers that answers pings (``ControlClient.answer_queries``); as ``ask``."""
        return await self._ask(Role.QUERY, question, urgent=True)

    async def _ask(self, role: Role, message: object, urgent: bool) -> Any:
        number = next(self._numbers)
        answer = self._asked[number] = self._loop.create_future()
        try:
            self._send(role, number, message, urgent)
            return await answer
        finally:
            del self._asked[number]
            del answer  # Its exception's traceback has this frame.

    def kill(self, why: str, *, stacks: bool = False) -> None:
        """End its process at once, whatever it does; it is lost then, and ``why`` says how. From any thread.

        With ``stacks`` it first writes down what its threads do: at the end of its standard error.
        """
        self._process.check()
        self.supervisor.kill(why, stacks=stacks)

    async def stop(self) -> None:
        """Tell it to end when it has handled what was sent before; it is killed if it takes too long.

        Returns when nothing of it is left. It does not count as lost.
        """
        self._process.check()
        self.supervisor.stop()
        await self.ended.wait()

    def _send(self, role: Role, number: int, message: object, urgent: bool) -> None:
        self._process.check()
        packed = pack(message)
        if self.lost is not None:
            raise self.lost.while_running(self.lost.running)
        if self.ended.is_set():
            raise WorkerLostError(self.name, "was stopped")
        self.supervisor.send(role, number, packed, urgent=urgent)

    # What the supervisor calls on this loop.

    def deliver(self, message: object) -> None:
        """A message has come."""
        self._received(self, message)

    def deliver_answer(self, number: int, answer: object, error: BaseException | None) -> None:
        """An answer has come, or what was raised instead."""
        if (asked := self._asked.get(number)) is None or asked.done():
            return  # Nobody waits for it any more.
        if error is None:
            asked.set_result(answer)
        else:
            asked.set_exception(error)

    def end(self, loss: WorkerLostError, was_stopped: bool) -> None:
        """Its process is gone."""
        if not was_stopped:
            self.lost = loss
        self.ended.set()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(loss.while_running(()))
        if not was_stopped:
            self._on_lost(self, loss)
