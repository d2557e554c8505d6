"""Child processes of this one, whose ends are told on a loop, and what keeps them alive."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from asyncpipe.runtime.workers.lifeline import end_group

__all__ = ["PROGRAM", "ChildProcess", "Pipes", "SpawnedProcess", "spawn"]

PROGRAM = Path(__file__).parents[2] / "worker" / "__main__.py"
"""Run by its path, and not by ``-m``, with which Python's own modules could come from the working directory."""


class ChildProcess(Protocol):
    """A process that was started, on the loop on which it was."""

    pid: int
    status: asyncio.Future[int | None]
    """Done when it has ended: as ``Popen.returncode``, ``None`` where nobody knows."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""


class Pipes:
    """Standard input and error of a child, and what is kept here of them: its input is its lifeline.

    Forked children of this process let go of these, or they would keep its workers alive without it.
    """

    def __init__(self) -> None:
        with _forks.held_up():
            self.stdin, self._lifeline = os.pipe()
            self.stderr_here, self.stderr = os.pipe()
            _forks.let_go_of(self)

    def write(self, data: bytes) -> None:
        """Write what fits into a pipe to the child's standard input."""
        with suppress(BrokenPipeError):  # It has ended, which is noticed elsewhere.
            os.write(self._lifeline, data)

    def close_theirs(self) -> None:
        """The child has its ends."""
        for descriptor in (self.stdin, self.stderr):
            os.close(descriptor)

    def close(self) -> None:
        """Close the ends of this process."""
        self.forget()
        os.close(self.stderr_here)

    def forget(self) -> None:
        """Close the lifeline; once."""
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)


class SpawnedProcess:
    """A ``ChildProcess`` that is a program of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """``process`` has no pipes."""
        self.pid = process.pid
        self._process = process
        self._loop = loop = asyncio.get_running_loop()
        self.status: asyncio.Future[int | None] = loop.create_future()
        try:
            ended = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # Not Linux, or not allowed.
            threading.Thread(target=self._wait, name="asyncpipe worker's end", daemon=True).start()
            return

        def reap() -> None:
            loop.remove_reader(ended)
            os.close(ended)
            self._reap()

        loop.add_reader(ended, reap)

    def send_signal(self, number: int) -> None:
        if not self.status.done():
            # ``Popen.send_signal`` might wait for the process, so that its status would be gone.
            os.kill(self.pid, number)

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
            end_group(self.pid)
            status = self._process.wait()
        except ChildProcessError:
            self._process.wait()
        self.status.set_result(status)


def spawn(
    title: str, pipes: Pipes, descriptors: Sequence[int], environment: Mapping[str, str], *, own_stderr: bool = True
) -> subprocess.Popen[bytes]:
    """A fresh interpreter that runs ``asyncpipe/worker``, with this one's flags. Takes some milliseconds.

    Nobody reads ``title`` but who lists processes.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # Until it says, in its first lines, that these are the controller's.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        return subprocess.Popen(  # noqa: S603 - our own program
            [os.fsdecode(get_executable()), *flags, str(PROGRAM), title],
            stdin=pipes.stdin,
            stderr=pipes.stderr if own_stderr else None,
            pass_fds=descriptors,
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Forks:
    """Forked children of this process let go of its lifelines, which would keep its workers alive without it."""

    def __init__(self) -> None:
        self._held: WeakSet[Pipes] = WeakSet()
        self._lock = threading.Lock()
        self._is_hooked = False

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Within the block, other threads do not fork."""
        with self._lock:
            if not self._is_hooked:
                # When the first worker starts, and not at the import; once, or a fork would wait for itself.
                self._is_hooked = True
                os.register_at_fork(
                    before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._forked
                )
            yield

    def let_go_of(self, pipes: Pipes) -> None:
        """Have each child that is forked from now on close its lifeline."""
        self._held.add(pipes)

    def _forked(self) -> None:
        self._lock.release()
        for pipes in list(self._held):
            pipes.forget()
        self._held.clear()


_forks = _Forks()
