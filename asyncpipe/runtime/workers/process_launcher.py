"""Workers as processes of this machine."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.spawn import get_executable
from pathlib import Path
from weakref import WeakSet

from asyncpipe.errors import OptionError
from asyncpipe.runtime.task_board import TaskBoard, new_board_file, new_memory
from asyncpipe.runtime.workers.batch_memory import BatchMemory
from asyncpipe.runtime.workers.handed_down import HandedDown
from asyncpipe.runtime.workers.launcher import Invitation, PlannedWorker
from asyncpipe.runtime.workers.worker_main import STACKS_SIGNAL

__all__ = ["LocalProcess", "ProcessLauncher"]

PROGRAM = Path(__file__).parents[2] / "worker" / "__main__.py"
"""Run by its path, and not by ``-m``, with which Python's own modules could come from the working directory."""
STDERR_BYTES = 4096
"""How much of the end of a worker's standard error is kept."""
STDERR_READ = 1 << 16


class ProcessLauncher:
    """Starts a fresh interpreter for each worker, with the ``sys.path``, folder, and environment of this process.

    The script of this process needs no ``if __name__ == "__main__":`` for it. The invitation goes down a pipe, which
    then is the worker's lifeline: the worker ends when this process does. Standard output is this process's; standard
    error is passed on to ``sys.stderr`` here, and its end is kept for errors.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, handed_down: HandedDown | None = None) -> None:
        """``environment`` is added to that of this process. ``handed_down`` is that of a controller on another host,
        in whose place this process starts workers.
        """
        if os.name != "posix":
            raise OptionError(f"workers as processes need a POSIX system, and this is {sys.platform}; use threads")
        self._environment = dict(environment or {})
        self._handed_down = handed_down

    async def prepare(self, workers: Sequence[PlannedWorker]) -> None:
        """There is room."""

    async def start(self, invitation: Invitation) -> LocalProcess:
        """The worker's process. Takes some milliseconds, in which the loop stands still."""
        command = [
            os.fsdecode(get_executable()),
            *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            str(PROGRAM),
            invitation.name,  # Not read: it tells who looks at the list of processes.
        ]
        memory, batches = new_board_file(), new_memory("asyncpipe-batches")
        with _forks.held_up():
            # Until the worker says, in its first lines, that these are the controller's.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
            try:
                board = TaskBoard(memory)
                process = subprocess.Popen(  # noqa: ASYNC220, S603 - takes milliseconds, and is our own program
                    command,
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[memory, batches],
                    env={**os.environ, **self._environment},
                )
                local = LocalProcess(process, asyncio.get_running_loop(), board, BatchMemory(batches))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                os.close(memory)
                os.close(batches)
            _forks.let_go_of(local)
        handed_down = self._handed_down or HandedDown.of_this_process(invitation.path)
        is_there = self._handed_down is None
        local.write(invitation.line_for(handed_down, board=memory, batches=batches, is_same_host=is_there))
        return local

    async def close(self) -> None:
        """Nothing is kept between workers."""


class LocalProcess:
    """A ``WatchedProcess`` of this machine. Used on the loop on which it was started."""

    has_own_accelerators = False

    def __init__(
        self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, board: TaskBoard, batches: BatchMemory
    ) -> None:
        assert process.stdin is not None
        assert process.stderr is not None
        self.pid = process.pid
        self.board: TaskBoard | None = board
        self.batches: BatchMemory | None = batches
        self._process = process
        self._lifeline = process.stdin
        self._stderr = process.stderr
        self._loop = loop
        self._ended: asyncio.Future[int | None] = loop.create_future()
        self._tail = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        os.set_blocking(self._stderr.fileno(), False)
        loop.add_reader(self._stderr, self._pass_on)
        self._watch()

    def write(self, data: bytes) -> None:
        """Hand down the invitation. Whatever is written later ends the process."""
        with suppress(BrokenPipeError):  # It has ended, which is noticed elsewhere.
            self._lifeline.write(data)

    def kill(self) -> None:
        if not self._ended.done():
            # ``Popen.kill`` might wait for the process, so that its status would be gone.
            os.kill(self.pid, signal.SIGKILL)

    def show_stacks(self) -> None:
        if not self._ended.done():
            os.kill(self.pid, STACKS_SIGNAL)

    async def wait(self) -> int | None:
        return await asyncio.shield(self._ended)

    def stderr(self) -> str:
        return self._tail.decode(errors="replace").strip()

    def forget(self) -> None:
        """Close this process's end of the lifeline. In a forked child: it must not keep its parent's workers alive."""
        self._lifeline.close()

    def _watch(self) -> None:
        """Have ``_reap`` called on the loop when the process has ended."""
        try:
            ended = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # Not Linux, or not allowed.
            threading.Thread(target=self._wait, name="asyncpipe worker's end", daemon=True).start()
            return

        def reap() -> None:
            self._loop.remove_reader(ended)
            os.close(ended)
            self._reap()

        self._loop.add_reader(ended, reap)

    def _wait(self) -> None:
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with suppress(RuntimeError):  # The loop is closed: nobody asks any more.
            self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        status: int | None = None
        try:
            # ``Popen`` says 0 where somebody else has waited for the process.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            status = self._process.wait()
        except ChildProcessError:
            self._process.wait()
        while self._pass_on():
            pass
        # Its children may have the other end. What they write is lost from now on.
        self._loop.remove_reader(self._stderr)
        self._stderr.close()
        self._lifeline.close()
        if self.board is not None:
            self.board.close()
        if self.batches is not None:
            self.batches.close()
        self._ended.set_result(status)

    def _pass_on(self) -> bool:
        """Pass on what it wrote to its standard error; whether there was something."""
        try:
            data = os.read(self._stderr.fileno(), STDERR_READ)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._stderr)
            return False
        self._tail = (self._tail + data)[-STDERR_BYTES:]
        try:
            sys.stderr.write(self._decoder.decode(data))
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError):
            pass  # There is none, or it is closed.
        return True


class _Forks:
    """Forked children of this process let go of its lifelines, which would keep its workers alive without it."""

    def __init__(self) -> None:
        self._held: WeakSet[LocalProcess] = WeakSet()
        self._lock = threading.Lock()
        self._is_hooked = False

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Within the block, other threads do not fork."""
        if not self._is_hooked:
            # When the first worker starts, and not at the import.
            self._is_hooked = True
            os.register_at_fork(
                before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._forked
            )
        with self._lock:
            yield

    def let_go_of(self, process: LocalProcess) -> None:
        """Have each child that is forked from now on close its lifeline."""
        self._held.add(process)

    def _forked(self) -> None:
        self._lock.release()
        for process in list(self._held):
            process.forget()
        self._held.clear()


_forks = _Forks()
