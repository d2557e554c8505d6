"""A process that workers are forked from: it has imported torch, which takes seconds, once for all of them.

::

    controller                        fork server                                worker
      ForkServer ── a line on stdin ──▶ imports the entry, then waits
           fork  ── descriptors ──────▶ fork ──────────────────────────────────▶ reads its invitation, as a fresh one
      ForkedProcess ◀── its pidfd ────
                    ◀── its status ─── reaps it ◀────────────────────────────── ends

Among the descriptors is a socket for each worker, by which the server says what becomes of it; its end says that the
server is gone. What was imported is memory that they all share until one writes to it. The server runs nothing of the
user's: no model, no kernel, no thread of Python's. A worker that is forked is as a fresh one but for what torch does
when it is imported.

``multiprocessing``'s own server would not do: it imports the controller's script into each child, so that a script
without a main guard would run again; it is one for a process, with the environment of its first use; and what it has
forked lives on when the controller is killed.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Final

from asyncpipe.runtime.workers.child_process import Pipes, SpawnedProcess, spawn
from asyncpipe.runtime.workers.lifeline import end_group, hold_on_to
from asyncpipe.runtime.workers.process_title import ROOM, set_title

__all__ = ["ForkServer", "ForkServerError", "ForkedProcess", "serve_forks"]

FORKED: Final = b"forked"
ENDED: Final = b"ended"
FAILED: Final = b"failed"
MOST_BYTES = 1 << 14
"""Of a message. They are short; a folder's name is the longest."""
DESCRIPTORS = 5
"""That a worker gets: standard input, output and error, and two of its launcher's."""
ANSWER_SECONDS = 20.0
"""For the server to fork, once it has done so before: then it has imported all. It is killed if it takes longer."""
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
        self._forked: set[ForkedProcess] = set()
        """Those that have not ended."""
        self.is_open = True
        """Whether it can be asked."""
        self._has_forked = False
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="asyncpipe fork server")

    async def fork(self, title: str, folder: str, descriptors: Sequence[int]) -> ForkedProcess:
        """A process in ``folder`` that is listed as ``title``, with duplicates of the ``DESCRIPTORS`` descriptors.

        Raises ``ForkServerError``, also if the server is stopped or hangs.
        """
        assert len(descriptors) == DESCRIPTORS
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forked = ForkedProcess(ours)
        self._forked.add(forked)
        forked.status.add_done_callback(lambda _: self._forked.discard(forked))
        with theirs, suppress(OSError):  # If the server is gone, the socket's end says so.
            socket.send_fds(self._socket, [f"{title}\0{folder}".encode()], [*descriptors, theirs.fileno()])
        try:
            async with asyncio.timeout(ANSWER_SECONDS if self._has_forked else None):
                await asyncio.shield(forked.begun)
        except (asyncio.CancelledError, TimeoutError) as error:
            forked.give_up()
            if isinstance(error, TimeoutError):
                self.is_open = False
                self._process.send_signal(signal.SIGKILL)
                raise ForkServerError(f"the fork server has not answered for {ANSWER_SECONDS:g} s") from None
            raise
        self._has_forked = True
        return forked

    async def close(self) -> None:
        """End it, behind the last of its workers. May be called again."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _serve(self) -> None:
        try:
            await asyncio.shield(self._process.status)
        finally:
            self.is_open = False
            with suppress(OSError):  # It has ended.
                self._socket.shutdown(socket.SHUT_WR)
            with suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await asyncio.shield(self._process.status)
            self._process.send_signal(signal.SIGKILL)
            await asyncio.shield(self._process.status)
            self._socket.close()
            self._pipes.close()
            for forked in tuple(self._forked):
                forked.read()


class ForkedProcess:
    """A child of the server. Signals reach it by a descriptor, so never another process that has its number."""

    def __init__(self, told: socket.socket) -> None:
        """``told`` is where the server says what becomes of it."""
        self.pid = 0
        self._loop = loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        """Done when there is a process. Raises ``ForkServerError``."""
        self.begun.add_done_callback(lambda begun: begun.cancelled() or begun.exception())  # Nobody may ask.
        self.status: asyncio.Future[int | None] = loop.create_future()
        """As ``Popen.returncode``, when it has ended; ``None`` where the server has ended before it."""
        self._told = told
        self._pidfd = -1
        self._is_given_up = False
        told.setblocking(False)
        loop.add_reader(told, self.read)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if not self.status.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def give_up(self) -> None:
        """Nobody wants it any more, perhaps before it has begun."""
        self._is_given_up = True
        if self._pidfd >= 0:
            self.send_signal(signal.SIGKILL)

    def read(self) -> None:
        """Take in what the server has said."""
        while self._told.fileno() >= 0:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._told, MOST_BYTES, 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                message, descriptors = b"", []
            kind, _, rest = message.partition(b" ")
            if kind == FORKED:
                self.pid, self._pidfd = int(rest), descriptors[0]
                self.begun.set_result(None)
                if self._is_given_up:
                    self.give_up()
                continue
            self._loop.remove_reader(self._told)
            self._told.close()
            if kind == ENDED:
                self._end(int(rest))
            elif self._pidfd < 0:
                why = f"cannot fork: {rest.decode()}" if kind == FAILED else "has ended"
                self.begun.set_exception(ForkServerError(f"the fork server {why}"))
                self.status.set_result(None)
            else:  # The server is gone, so nobody will say how it ends.
                self._loop.add_reader(self._pidfd, self._end_alone)

    def _end_alone(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._end(None)

    def _end(self, status: int | None) -> None:
        os.close(self._pidfd)
        self.status.set_result(status)


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
    with connected, _ForkedChildren() as children:
        poll = select.poll()
        poll.register(connected, select.POLLIN)
        poll.register(children.descriptor, select.POLLIN)
        is_asked = True
        while is_asked or children.alive:
            for descriptor, _ in poll.poll():
                if descriptor == children.descriptor:
                    children.reap()
                elif not (asked := _asked(connected)):
                    is_asked = False
                    poll.unregister(connected)
                elif others := _fork(children, *asked):
                    os.close(lifeline)
                    return others
    os._exit(0)


class _ForkedChildren:
    """The children of this process, and whom to tell of each."""

    def __init__(self) -> None:
        self.alive: dict[int, socket.socket] = {}
        """Those that were not reaped, with where to say how they end."""
        self.descriptor, self._writer = os.pipe()
        """Can be read from when one may have ended."""

    def __enter__(self) -> _ForkedChildren:
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
        for told in self.alive.values():
            told.close()

    def reap(self) -> None:
        """Say of those that have ended since how they did. Other processes may have their numbers then."""
        with suppress(BlockingIOError):
            while os.read(self.descriptor, 1 << 10):
                pass
        for number in tuple(self.alive):
            if os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                end_group(number)
                _, status = os.waitpid(number, 0)
                with self.alive.pop(number) as told, suppress(OSError):  # Nobody may want to know.
                    told.send(b"%s %d" % (ENDED, os.waitstatus_to_exitcode(status)))


def _asked(connected: socket.socket) -> tuple[bytes, list[int]] | None:
    """A question with its descriptors; ``None`` where nobody asks any more."""
    try:
        message, descriptors, _, _ = socket.recv_fds(connected, MOST_BYTES, DESCRIPTORS + 1)
    except ConnectionError:
        return None
    return (message, list(descriptors)) if message else None


def _fork(children: _ForkedChildren, message: bytes, descriptors: Sequence[int]) -> tuple[int, int] | None:
    """Fork a worker. In the worker, its two descriptors behind the standard ones."""
    *own, last = descriptors
    told = socket.socket(fileno=last)
    try:
        if not (number := os.fork()):
            told.close()
            _become(message, own)
            return own[3], own[4]
        children.alive[number] = told
        pidfd = os.pidfd_open(number)
        try:
            socket.send_fds(told, [b"%s %d" % (FORKED, number)], [pidfd])
        finally:
            os.close(pidfd)
    except OSError as error:
        with suppress(OSError):
            told.send(b"%s %s" % (FAILED, str(error).encode()))
        if told not in children.alive.values():
            told.close()
    for descriptor in own:
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
