"""A worker's process on this machine, as its controller has it."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import sys
from collections.abc import Callable

from asyncpipe.runtime.task_board import TaskBoard
from asyncpipe.runtime.workers.child_process import ChildProcess, Pipes
from asyncpipe.runtime.workers.worker_main import STACKS_SIGNAL
from asyncpipe.shared_memory import SharedPool

__all__ = ["LocalProcess"]

STDERR_BYTES = 4096
"""How much of the end of a worker's standard error is kept."""
STDERR_READ = 1 << 16


class LocalProcess:
    """A ``WatchedProcess`` of this machine. Used on the loop on which it was started."""

    def __init__(self, process: ChildProcess, pipes: Pipes, board: TaskBoard, batches: SharedPool) -> None:
        self.pid = process.pid
        self.has_own_accelerators = False
        """Set by who starts it."""
        self.board: TaskBoard | None = board
        self.batches: SharedPool | None = batches
        self.take_stderr: Callable[[str], object] = _show
        """Called with what it writes to its standard error, on the loop on which it was started."""
        self._process = process
        self._pipes = pipes
        self._loop = loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int | None] = loop.create_future()
        self._tail = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        os.set_blocking(pipes.stderr_here, False)
        loop.add_reader(pipes.stderr_here, self._pass_on)
        process.status.add_done_callback(self._end)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def show_stacks(self) -> None:
        self._process.send_signal(STACKS_SIGNAL)

    async def wait(self) -> int | None:
        return await asyncio.shield(self._ended)

    def stderr(self) -> str:
        return self._tail.decode(errors="replace").strip()

    def _end(self, status: asyncio.Future[int | None]) -> None:
        while self._pass_on():
            pass
        # Its children may have the other end. What they write is lost from now on.
        self._loop.remove_reader(self._pipes.stderr_here)
        self._pipes.close()
        if self.board is not None:
            self.board.close()
        if self.batches is not None:
            self.batches.close()
        self._ended.set_result(status.result())

    def _pass_on(self) -> bool:
        """Pass on what it wrote to its standard error; whether there was something."""
        try:
            data = os.read(self._pipes.stderr_here, STDERR_READ)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._pipes.stderr_here)
            return False
        self._tail = (self._tail + data)[-STDERR_BYTES:]
        self.take_stderr(self._decoder.decode(data))
        return True


def _show(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass  # There is none, or it is closed.
