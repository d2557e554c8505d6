"""The controller, as a worker sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from inspect import isawaitable
from typing import Any

from asyncpipe.runtime.portal import Portal
from asyncpipe.runtime.process import Process
from asyncpipe.runtime.task_board import TaskBoard
from asyncpipe.runtime.workers.channel import Channel, Role
from asyncpipe.runtime.workers.handshake import introduce, secret_for
from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.lifeline import end_without_controller
from asyncpipe.runtime.workers.main_module import MainModule
from asyncpipe.runtime.workers.packed import Packed, pack, unpack
from asyncpipe.runtime.workers.place import WorkerPlace
from asyncpipe.runtime.workers.remote_errors import pack_error
from asyncpipe.runtime.workers.tcp import connect
from asyncpipe.shared_memory import SharedViews

__all__ = ["ControlClient"]

CONNECT_SECONDS = 20.0
"""For the controller to answer. It waits for nothing that a worker does."""


class ControlClient:
    """The worker's side of its control connection. A thread of its own reads it and answers pings.

    So the controller gets its answers while the main thread computes or imports; it gets none when a thread holds the
    GIL for very long. Where the controller is gone, the process ends at once.
    """

    def __init__(
        self,
        invitation: Invitation,
        main: MainModule,
        board: TaskBoard | None = None,
        batches: SharedViews | None = None,
        lifeline: int | None = None,
    ) -> None:
        """Connects to the controller that sent ``invitation``. Raises ``OSError``, ``RefusedError`` among them."""
        self.lifeline = lifeline
        """The pipe that hangs up when the controller ends, if there is one."""
        self.name = invitation.name
        self.entry = invitation.entry
        self.board = board
        """Where the controller reads what runs here, if it can."""
        self.batches = batches
        """Where the controller puts mini-batches, if it can."""
        self.edge_secret = secret_for(invitation.secret, "edges")
        """What all workers of the controller know, and nobody else: they show it to each other."""
        self.invitation_key = secret_for(invitation.secret, "invitations")
        """As that of ``WorkerGroup``."""
        self._answers_query: Callable[[Any], object] = lambda question: None
        self._main = main
        self._process = Process()
        self._inbox: deque[tuple[Role, int, Packed]] = deque()
        self._arrived: Callable[[], object] = lambda: None
        """Wakes who serves; does nothing before that."""
        self._portal = Portal()
        self._channel, self.place = self._portal.call(self._connect(invitation))
        """``place``: where this worker is."""

    async def _connect(self, invitation: Invitation) -> tuple[Channel, WorkerPlace]:
        async with asyncio.timeout(CONNECT_SECONDS):
            connected = await connect(invitation.address)
            secured = await introduce(connected, invitation.secret, invitation.token)
        return Channel(secured, asyncio.get_running_loop(), self), WorkerPlace.of_this_process(connected)

    def send(self, message: object, *, urgent: bool = False) -> None:
        """Send ``message``, or what ``pack`` made of it, to the controller. From any thread; never blocks.

        Messages arrive in the order in which they are sent, but urgent ones overtake the others. Raises
        ``MessageError`` if it cannot be pickled.
        """
        self._process.check()
        self._channel.send(Role.MESSAGE, packed=pack(message), urgent=urgent)

    def send_log(self, record: logging.LogRecord) -> None:
        """Have the controller handle a log record. From any thread."""
        if self._process.is_this:
            self._channel.send(Role.LOG, packed=pack(record))
        elif logging.lastResort is not None:  # A forked child of the worker, whose connection this is not.
            logging.lastResort.handle(record)

    def answer_queries(self, answer: Callable[[Any], object]) -> None:
        """From now on, ``answer`` says what the controller wants to know whatever the other threads of this process do.

        It is called on the thread that answers pings, and must not wait for any other.
        """
        self._answers_query = answer

    async def serve(self, handle: Callable[[Any], Any]) -> None:
        """Call ``handle`` on this loop with each message from the controller, in order, until it says to stop.

        The first call tells the controller that the worker is up. What ``handle`` returns is the answer, if the
        controller waits for one; it may return an awaitable, and then the next message does not wait for it. What it
        raises is raised in the controller. If the controller waits for no answer, it is raised here.
        """
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        self._arrived = lambda: loop.call_soon_threadsafe(arrived.set)
        answers = _Answers(arrived)
        self._channel.send(Role.READY, packed=pack((os.getpid(), self.place)))
        try:
            while True:
                arrived.clear()
                while self._inbox:
                    role, number, packed = self._inbox.popleft()
                    if role is Role.STOP:
                        return
                    self._handle(handle, role, number, packed, answers)
                    del packed
                answers.check()
                await arrived.wait()
        finally:
            self._arrived = lambda: None
            await answers.cancel()

    def flush(self, seconds: float) -> None:
        """Wait until what was sent is on its way, at most so many seconds."""
        self._channel.flush(seconds)

    def end(self) -> None:
        """End the thread, before the interpreter ends: it must not run in one that is taken apart.

        The connection stays open until the process is gone, whose end shall be what the controller sees.
        """
        self._portal.close()
        self._portal.join()

    def _handle(self, handle: Callable[[Any], Any], role: Role, number: int, packed: Packed, answers: _Answers) -> None:
        try:
            answer = handle(unpack(packed, self._main.get))
            if isawaitable(answer):
                answers.begin(self._answer_later(answer, role, number, answers))
            else:
                self._answer(answer, role, number)
        except Exception as error:  # noqa: BLE001 - raised in the controller, or here
            self._fail(error, role, number)

    async def _answer_later(self, answer: Awaitable[object], role: Role, number: int, answers: _Answers) -> None:
        try:
            self._answer(await answer, role, number)
        except asyncio.CancelledError:
            if role is Role.ASK and not answers.is_over:  # Who asks must not wait for ever.
                self._fail(RuntimeError("the answer was cancelled in the worker"), role, number)
            raise
        except Exception as error:  # noqa: BLE001 - raised in the controller, or here
            self._fail(error, role, number)

    def _answer(self, answer: Any, role: Role, number: int) -> None:
        if role is Role.ASK:
            self._channel.send(Role.ANSWER, number, pack(answer))

    def _fail(self, error: Exception, role: Role, number: int) -> None:
        if role is not Role.ASK:
            raise error
        self._channel.send(Role.FAILURE, number, pack_error(self.name, error))

    # The channel calls these on its own thread.

    def received(self, role: Role, number: int, packed: Packed) -> None:
        """Answer a ping and a query; leave the rest to who serves."""
        if role is Role.PING:
            now = struct.pack("!d", time.perf_counter())
            self._channel.send(Role.PONG, number, Packed((memoryview(now),)), urgent=True)
        elif role is Role.QUERY:
            self._answer_query(number, packed)
        else:
            self._inbox.append((role, number, packed))
            self._arrived()

    def _answer_query(self, number: int, packed: Packed) -> None:
        try:
            answer = pack(self._answers_query(unpack(packed, self._main.get)))
        except Exception as error:  # noqa: BLE001 - raised in the controller
            self._channel.send(Role.FAILURE, number, pack_error(self.name, error), urgent=True)
        else:
            self._channel.send(Role.ANSWER, number, answer, urgent=True)

    def closed(self, error: Exception) -> None:
        """The controller is gone: nothing that this process does is of use any more."""
        end_without_controller()


class _Answers:
    """The coroutines of messages that are being handled. One that fails wakes who serves, by ``arrived``."""

    def __init__(self, arrived: asyncio.Event) -> None:
        self._arrived = arrived
        self.is_over = False
        """Whether the worker ends. This is what the controller is told of then, and not that answers are cancelled."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []

    def begin(self, answer: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(answer)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def check(self) -> None:
        """Raise what a coroutine has raised."""
        if self._failures:
            raise self._failures[0]

    async def cancel(self) -> None:
        """Cancel those that run, and wait for them."""
        self.is_over = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)
            self._arrived.set()
