"""A process that workers are forked from: it has imported torch, which takes seconds, once for all of them.

::

    controller                        fork server                                worker
      ForkServer ── a line on stdin ──▶ imports the entry, then waits
           fork  ── descriptors ──────▶ fork ──────────────────────────────────▶ reads its invitation, as a fresh one
                 ◀── its pidfd ────────
                 ◀── its status ─────── reaps it ◀────────────────────────────── ends

What was imported is memory that they all share until one writes to it. The server runs nothing of the user's: no model,
no kernel, no thread of Python's. A worker that is forked is as a fresh one but for what torch does when it is imported.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import socket
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from asyncpipe.runtime.workers.child_process import Pipes, SpawnedProcess, spawn
from asyncpipe.runtime.workers.lifeline import hold_on_to
from asyncpipe.runtime.workers.process_title import ROOM, set_title

__all__ = ["ForkServer", "ForkServerError", "ForkedProcess", "serve_forks"]

READY: Final = b"ready"
FORKED: Final = b"forked"
ENDED: Final = b"ended"
FAILED: Final = b"failed"
MOST_BYTES = 1 << 14
"""Of a message. They are short; a folder's name is the longest."""
DESCRIPTORS = 5
"""That a worker gets: standard input, output and error, and two of its launcher's."""
END_SECONDS = 5.0
"""For the server, once its workers have ended, or were killed."""


class ForkServerError(RuntimeError):
    """The server is gone, or cannot fork."""


class ForkServer:
    """The controller's side, on the loop that it is made on. It ends when the loop does."""

    AVAILABLE = sys.platform == "linux" and hasattr(os, "pidfd_open")
    """Whether this system has what it needs."""

    def __init__(self, line: Callable[[int], bytes], environment: Mapping[str, str]) -> None:
        """``line``, of the number of a socket, is what the server reads; see ``asyncpipe/worker``."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pipes = pipes = Pipes()
        try:
            with theirs:
                title = f"fork server of {os.getpid()}".ljust(ROOM)
                process = spawn(title, pipes, [theirs.fileno()], environment, own_stderr=False)
                pipes.write(line(theirs.fileno()))
        except BaseException:
            self._socket.close()
            pipes.close()
            raise
        finally:
            pipes.close_theirs()
        self._socket.setblocking(False)
        self._process = SpawnedProcess(process)
        self._loop = loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # Nobody may ask.
        self._asked: deque[asyncio.Future[ForkedProcess]] = deque()
        """Answers come in the order of the questions."""
        self._forked: dict[int, ForkedProcess] = {}
        """By number; those that have not ended."""
        self.is_open = True
        """Whether it can be asked."""
        loop.add_reader(self._socket, self._read)
        self._task = loop.create_task(self._serve(), name="asyncpipe fork server")

    async def fork(self, title: str, folder: str, descriptors: Sequence[int]) -> ForkedProcess:
        """A process in ``folder`` that is listed as ``title``, with duplicates of the ``DESCRIPTORS`` descriptors.

        Raises ``ForkServerError``.
        """
        assert len(descriptors) == DESCRIPTORS
        await asyncio.shield(self._ready)
        answer: asyncio.Future[ForkedProcess] = self._loop.create_future()
        self._asked.append(answer)
        try:
            socket.send_fds(self._socket, [f"{title}\0{folder}".encode()], descriptors)
        except OSError as error:
            self._asked.remove(answer)
            raise ForkServerError(f"the fork server cannot be asked: {error}") from error
        return await answer

    async def close(self) -> None:
        """End it, behind the last of its workers. May be called again."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _serve(self) -> None:
        try:
            await asyncio.shield(self._process.status)
        finally:
            self._stop_asking()
            with suppress(OSError):  # It has ended.
                self._socket.shutdown(socket.SHUT_WR)
            with suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await asyncio.shield(self._process.status)
            self._process.send_signal(signal.SIGKILL)
            await asyncio.shield(self._process.status)
            self._read()
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._pipes.close()
            for forked in self._forked.values():
                forked.is_alone()

    def _stop_asking(self) -> None:
        self.is_open = False
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._asked]
        for future in waiting:
            if not future.done():
                future.set_exception(ForkServerError("the fork server has ended"))
        self._asked.clear()

    def _read(self) -> None:
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._socket, MOST_BYTES, 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                message, descriptors = b"", []
            kind, _, rest = message.partition(b" ")
            if kind == READY and not self._ready.done():
                self._ready.set_result(None)
            elif kind == FORKED:
                self._answer(int(rest), descriptors[0])
            elif kind == FAILED and self._asked:
                answer = self._asked.popleft()
                if not answer.done():
                    answer.set_exception(ForkServerError(f"the fork server cannot fork: {rest.decode()}"))
            elif kind == ENDED:
                number, status = map(int, rest.split())
                if (ended := self._forked.pop(number, None)) is not None:
                    ended.end(status)
            elif not kind:
                self._stop_asking()
                self._loop.remove_reader(self._socket)
                return

    def _answer(self, number: int, descriptor: int) -> None:
        forked = self._forked[number] = ForkedProcess(number, descriptor, self._loop)
        answer = self._asked.popleft() if self._asked else None
        if answer is None or answer.done():  # Who asked was cancelled.
            forked.send_signal(signal.SIGKILL)
        else:
            answer.set_result(forked)


class ForkedProcess:
    """A child of the server. Signals reach it by a descriptor, so never another process that has its number."""

    def __init__(self, pid: int, descriptor: int, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = pid
        self.status: asyncio.Future[int | None] = loop.create_future()
        """As ``Popen.returncode``, when it has ended; ``None`` where the server has ended before it."""
        self._descriptor = descriptor
        self._loop = loop

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if not self.status.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def end(self, status: int | None) -> None:
        """It has ended."""
        os.close(self._descriptor)
        self.status.set_result(status)

    def is_alone(self) -> None:
        """The server is gone, so nobody will say how it ends."""

        def end() -> None:
            self._loop.remove_reader(self._descriptor)
            self.end(None)

        self._loop.add_reader(self._descriptor, end)


# In the server


def serve_forks(connected: socket.socket, lifeline: int, entry: str) -> tuple[int, int]:
    """Import the module of ``entry`` (``module:function``), and fork workers for who holds the other end.

    The modules that its ``IMPORTED_LATER`` names are imported as well: those that its workers would need in the end.

    Returns in workers only, which have their standard files and their folder then, and know nothing of each other: the
    numbers of the two other descriptors.
    """
    hold_on_to(lifeline)
    # What cannot be imported is told by the workers, which try again.
    with suppress(Exception):
        for later in getattr(import_module(entry.partition(":")[0]), "IMPORTED_LATER", ()):
            import_module(later)
    # numpy's library for matrices starts a thread, and sees to it when the process forks.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    # Or else the first collection in each worker would write to all that they share.
    gc.collect()
    gc.freeze()
    with connected, _Reaper() as children:
        connected.send(READY)
        poll = select.poll()
        poll.register(connected, select.POLLIN)
        poll.register(children.descriptor, select.POLLIN)
        is_asked = True
        while is_asked or children.alive:
            for descriptor, _ in poll.poll():
                if descriptor == children.descriptor:
                    for number, status in children.ended():
                        connected.send(b"%s %d %d" % (ENDED, number, status))
                elif not (asked := _asked(connected)):
                    is_asked = False
                    poll.unregister(connected)
                elif others := _fork(connected, children, *asked):
                    os.close(lifeline)
                    return others
    os._exit(0)


class _Reaper:
    """Knows the children of this process, and which have ended."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        """Those that were not reaped."""
        self.descriptor, self._writer = os.pipe()
        """Can be read from when one may have ended."""

    def __enter__(self) -> _Reaper:
        for descriptor in (self.descriptor, self._writer):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self.descriptor)
        os.close(self._writer)

    def ended(self) -> list[tuple[int, int]]:
        """The numbers and statuses of those that have ended since. Other processes may have their numbers now."""
        with suppress(BlockingIOError):
            while os.read(self.descriptor, 1 << 10):
                pass
        found = []
        for number in list(self.alive):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                self.alive.remove(number)
                found.append((number, os.waitstatus_to_exitcode(status)))
        return found


def _asked(connected: socket.socket) -> tuple[bytes, list[int]] | None:
    """A question with its descriptors; ``None`` where nobody asks any more."""
    try:
        message, descriptors, _, _ = socket.recv_fds(connected, MOST_BYTES, DESCRIPTORS)
    except ConnectionError:
        return None
    return (message, list(descriptors)) if message else None


def _fork(
    connected: socket.socket, children: _Reaper, message: bytes, descriptors: Sequence[int]
) -> tuple[int, int] | None:
    """Fork a worker. In the worker, its two descriptors behind the standard ones."""
    try:
        if not (number := os.fork()):
            _become(message, descriptors)
            return descriptors[3], descriptors[4]
        children.alive.add(number)
        pidfd = os.pidfd_open(number)
        try:
            socket.send_fds(connected, [b"%s %d" % (FORKED, number)], [pidfd])
        finally:
            os.close(pidfd)
    except OSError as error:
        connected.send(b"%s %s" % (FAILED, str(error).encode()))
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def _become(message: bytes, descriptors: Sequence[int]) -> None:
    """Be a process of its own."""
    title, _, folder = message.decode().partition("\0")
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    set_title(title)
    sys.orig_argv[-1] = title
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator does so by itself, and torch's is the same in each fresh process.
