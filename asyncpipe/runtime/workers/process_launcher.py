"""Workers as processes of this machine."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from asyncpipe.errors import LauncherError, OptionError
from asyncpipe.runtime.task_board import TaskBoard, new_board_file
from asyncpipe.runtime.workers.child_process import ChildProcess, Pipes, SpawnedProcess, spawn
from asyncpipe.runtime.workers.fork_server import ForkServer, ForkServerError
from asyncpipe.runtime.workers.handed_down import HandedDown
from asyncpipe.runtime.workers.launcher import Invitation, PlannedWorker
from asyncpipe.runtime.workers.local_process import LocalProcess
from asyncpipe.shared_memory import SharedPool, new_memory

__all__ = ["ProcessLauncher", "seeing"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"

_logger = logging.getLogger(__name__)


class ProcessLauncher:
    """Starts workers with the ``sys.path``, folder, and environment of this process.

    On Linux they are forked from a fresh interpreter that has imported torch, and nothing of the user's, so that only
    the first one takes seconds to start. Elsewhere, and where ``sys.path`` or the environment have changed since, each
    is a fresh interpreter.

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
        self._server: ForkServer | None = None
        self._server_has: object = None
        """What the server began with that its workers cannot change."""

    async def prepare(self, workers: Sequence[PlannedWorker]) -> None:
        """There is room."""

    async def start(self, invitation: Invitation, own: Mapping[str, str] | None = None) -> LocalProcess:
        """The worker's process. Where it is a fresh interpreter, the loop stands still for some milliseconds.

        ``own`` are variables of its own environment that no module reads when it is imported; by default, so that it
        sees its own accelerators alone. Then none of its threads makes a context on another worker's.
        """
        if own is None and (numbers := PlannedWorker(invitation.name, invitation.devices).cuda_numbers):
            own = seeing(numbers) | {QUEUES: os.environ.get(QUEUES, "32")}
        handed_down = self._handed_down or HandedDown.of_this_process(invitation.path)
        memory, batches = new_board_file(), new_memory("asyncpipe-batches")
        pipes = Pipes()
        try:
            try:
                process = await self._process(invitation, handed_down, pipes, memory, batches)
            finally:
                pipes.close_theirs()
            local = LocalProcess(process, pipes, TaskBoard(memory), SharedPool(batches))
            local.has_own_accelerators = bool(own)
        except BaseException:
            pipes.close()
            raise
        finally:
            os.close(memory)
            os.close(batches)
        is_there = self._handed_down is None
        pipes.write(
            invitation.line_for(
                handed_down, board=memory, batches=batches, is_same_host=is_there, environment=dict(own or {})
            )
        )
        return local

    async def close(self) -> None:
        """End what workers are forked from."""
        if self._server is not None:
            await self._server.close()

    async def _process(
        self, invitation: Invitation, handed_down: HandedDown, pipes: Pipes, memory: int, batches: int
    ) -> ChildProcess:
        environment = {**os.environ, **self._environment}
        if (server := self._fork_server(invitation.entry, handed_down, environment)) is not None:
            try:
                descriptors = [pipes.stdin, 1, pipes.stderr, memory, batches]
                return await server.fork(invitation.name, os.getcwd(), descriptors)
            except ForkServerError as error:
                _logger.info("worker %r is started without the fork server: %s", invitation.name, error)
        return SpawnedProcess(spawn(invitation.name, pipes, [memory, batches], environment))

    def _fork_server(self, entry: str, handed_down: HandedDown, environment: Mapping[str, str]) -> ForkServer | None:
        """That of this launcher, or ``None`` where a worker must be a fresh interpreter."""
        has = (handed_down.sys_path, environment)
        if ForkServer.AVAILABLE and (self._server is None or not self._server.is_open):

            def line(forks: int) -> bytes:
                return handed_down.line(forks=forks, entry=entry, is_same_host=self._handed_down is None)

            self._server_has = has
            self._server = ForkServer(line, environment)
        return self._server if self._server_has == has else None


def seeing(accelerators: Sequence[int]) -> dict[str, str]:
    """The environment of a worker that sees these alone of the accelerators that this process sees."""
    most, visible = max(accelerators, default=-1), os.environ.get(VISIBLE)
    numbers = [str(each) for each in range(most + 1)] if visible is None else visible.split(",") if visible else []
    if most >= len(numbers):
        raise LauncherError(f"{VISIBLE}={visible!r} on this host shows no accelerator {most}")
    return {VISIBLE: ",".join(numbers[each] for each in accelerators)}
