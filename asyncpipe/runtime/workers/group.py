"""The workers of one controller."""

from __future__ import annotations

import asyncio
import logging
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from asyncpipe.errors import OptionError, WorkerLostError
from asyncpipe.runtime.portal import Portal, wait_uncancelled
from asyncpipe.runtime.process import Process
from asyncpipe.runtime.thread_calls import wait_to_end
from asyncpipe.runtime.workers.connection import WorkerConnection
from asyncpipe.runtime.workers.handshake import secret_for
from asyncpipe.runtime.workers.launcher import Launcher, PlannedWorker
from asyncpipe.runtime.workers.listener import ControlListener
from asyncpipe.runtime.workers.supervisor import Supervisor, WorkerLimits

__all__ = ["WorkerGroup"]

SECRET_BYTES: Final = 32

_logger = logging.getLogger(__name__)


class WorkerGroup:
    """Starts, watches and stops workers, inside ``async with``, on the caller's loop. One thread serves all of them.

    ::

        async with WorkerGroup(ProcessLauncher(), "module:function", received=..., lost=...) as group:
            first, second = await group.start("worker-0", "worker-1")
            first.send(message)
            answer = await second.ask(question)

    Behind the block nothing of them is left. A group that is dropped, or not closed when the interpreter ends, kills
    its workers; but ``received`` and ``lost`` are held by a thread, so they must not hold the group. If this process is
    killed, so are they: see ``lifeline.py``.
    """

    def __init__(
        self,
        launcher: Launcher,
        entry: str,
        *,
        received: Callable[[WorkerConnection, Any], object] = lambda worker, message: None,
        lost: Callable[[WorkerConnection, WorkerLostError], object] = lambda worker, error: None,
        address: tuple[str, int] | None = None,
        limits: WorkerLimits | None = None,
        path: Sequence[str] = (),
    ) -> None:
        """``entry`` (``module:function``) is what runs in each worker; see ``Invitation``.

        ``received`` is called on the caller's loop with each message of a worker that is no answer, ``lost`` when one
        is gone unexpectedly, behind its last message. Workers connect to ``address``, a host and a port (0: any),
        unless the launcher names another one; without any, to a Unix socket in a folder that only this user can enter.
        They look for modules in the folders of ``path`` before those of this process's ``sys.path``.
        """
        self._launcher = launcher
        self._entry = entry
        self._path = tuple(path)
        self._received = received
        self._lost = lost
        self._limits = WorkerLimits() if limits is None else limits
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self.invitation_key = secret_for(self._secret, "invitations")
        """What hides an invitation on its way to a worker, which knows it too (``Invitation.hidden``)."""
        self._listener = ControlListener(self._secret, address)
        self._process = Process()
        self._portal: Portal | None = None
        self._workers: dict[str, WorkerConnection] = {}
        self._starts: set[asyncio.Task[None]] = set()
        self._starting: set[str] = set()

    @property
    def workers(self) -> dict[str, WorkerConnection]:
        """The workers that are up, by name. From any thread."""
        return {name: worker for name, worker in list(self._workers.items()) if not worker.ended.is_set()}

    async def __aenter__(self) -> WorkerGroup:
        self._portal = portal = Portal()
        weakref.finalize(self, _kill, self._process, portal).atexit = False
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(
        self, *names: str, devices: Mapping[str, tuple[str, ...]] | None = None, entry: str | None = None
    ) -> tuple[WorkerConnection, ...]:
        """Workers of these names, which are up; they start at the same time. Also in the place of one that has ended.

        ``devices`` are those of each, for launchers that must know; ``entry`` is another one than the group's.

        All or none: if one does not come up (``WorkerStartError``), or the caller is cancelled, the others are killed.
        """
        self._process.check()
        if self._portal is None:
            raise OptionError("a group of workers starts them inside `async with`")
        twice = {name for name in names if names.count(name) > 1}
        if taken := sorted(twice | (self.workers.keys() | self._starting) & set(names)):
            raise OptionError(f"workers need names of their own, and these are taken: {', '.join(taken)}")
        connections = tuple(WorkerConnection(name, self._received, self._lost) for name in names)
        planned = {name: PlannedWorker(name, (devices or {}).get(name, ())) for name in names}
        preparing = asyncio.create_task(self._portal.run(self._prepare(list(planned.values()))))
        starts = [
            asyncio.create_task(self._start(self._portal, planned[each.name], each, preparing, entry or self._entry))
            for each in connections
        ]
        self._starts.update(starts)
        self._starting.update(names)
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in (preparing, *starts):
                start.cancel()
            await wait_uncancelled(asyncio.gather(preparing, *starts, return_exceptions=True))
            up = [connection for connection in connections if connection.is_up]
            for connection in up:
                connection.supervisor.stop()
                connection.kill("another worker has not started")
            await wait_uncancelled(asyncio.gather(*(connection.ended.wait() for connection in up)))
            raise
        finally:
            self._starts.difference_update(starts)
            self._starting.difference_update(names)
        self._workers.update(zip(names, connections, strict=True))
        return connections

    async def _prepare(self, workers: Sequence[PlannedWorker]) -> None:
        if (address := await self._launcher.prepare(workers)) is not None:
            self._listener.address = address

    async def _start(
        self,
        portal: Portal,
        worker: PlannedWorker,
        connection: WorkerConnection,
        prepared: asyncio.Task[None],
        entry: str,
    ) -> None:
        await asyncio.shield(prepared)
        loops = (portal.loop, asyncio.get_running_loop())

        async def start() -> None:
            supervisor = Supervisor(worker, self._launcher, self._listener, self._limits, connection, loops)
            connection.begin(supervisor)
            await supervisor.start(entry, self._secret, self._path)

        await portal.run(start())

    async def close(self) -> None:
        """Stop all workers, and kill those that do not end in time. May be called again.

        A cancellation is raised only when it is done.
        """
        if self._portal is None or not self._process.is_this:
            return
        await wait_to_end(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        for start in self._starts:
            start.cancel()
        if self._starts:
            await asyncio.wait(set(self._starts))
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
        portal, self._portal = self._portal, None
        if portal is not None:
            try:
                await portal.run(self._launcher.close())
            except Exception:
                _logger.exception("a launcher of workers cannot be closed")
            portal.close()
            portal.join()

    def kill(self) -> None:
        """Kill all workers, without waiting. From any thread; for who cannot wait until it is closed."""
        if self._portal is not None:
            _kill(self._process, self._portal)


def _kill(process: Process, portal: Portal) -> None:
    if process.is_this:
        portal.close()
