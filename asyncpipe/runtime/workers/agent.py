"""The agent of a host: a process that starts workers there, in the place of a controller that is elsewhere.

::

    controller                                            host
      Agents ──────────── control connection ───────────▶ agent ── lifeline ──▶ worker
      WorkerGroup ◀═══════════════════ control connection ════════════════════ worker

It is started as a worker is, with ``serve`` as its entry. It says how its workers end, and ends them at once where it
is told to. If it ends itself, or hears nothing of its controller any more, the kernel ends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.handed_down import HandedDown
from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.local_process import LocalProcess
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher, seeing

__all__ = ["ENTRY", "ChildEnded", "StartChild", "Strike", "serve"]

ENTRY = "asyncpipe.runtime.workers.agent:serve"


@dataclass(frozen=True, slots=True)
class StartChild:
    """Controller: start a worker. The answer is the number of its process."""

    invitation: Invitation
    """Hidden."""
    handed_down: HandedDown
    environment: Mapping[str, str] = field(repr=False)
    """Added to the agent's own."""
    accelerators: tuple[int, ...]
    """Numbers of those that it may see, among those that the agent sees."""


@dataclass(frozen=True, slots=True)
class Strike:
    """Controller: kill the worker that was started with a token, or have it write down what its threads do."""

    token: bytes = field(repr=False)
    stacks: bool = False


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """Agent: a worker has ended."""

    token: bytes = field(repr=False)
    status: int | None
    stderr: str
    """The end of what it wrote there."""


async def serve(control: ControlClient) -> None:
    """Start workers until the controller says to stop; those that are left are killed then."""
    agent = _Agent(control)
    try:
        await control.serve(agent.handle)
    finally:
        await agent.end()


class _Agent:
    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._children: dict[bytes, LocalProcess] = {}
        self._launchers: list[tuple[StartChild, ProcessLauncher]] = []
        """With what each was made for."""
        self._watching: set[asyncio.Task[None]] = set()

    def handle(self, message: Any) -> Any:
        match message:
            case StartChild():
                return self._start(message)
            case Strike(token=token, stacks=stacks) if (child := self._children.get(token)) is not None:
                (child.show_stacks if stacks else child.kill)()
        return None

    async def end(self) -> None:
        for child in self._children.values():
            child.kill()
        if self._watching:
            await asyncio.wait(self._watching)
        for _, launcher in self._launchers:
            await launcher.close()

    def _launcher(self, start: StartChild) -> ProcessLauncher:
        for made_for, launcher in self._launchers:
            if (made_for.environment, made_for.handed_down) == (start.environment, start.handed_down):
                return launcher
        self._launchers.append((start, ProcessLauncher(start.environment, start.handed_down)))
        return self._launchers[-1][1]

    async def _start(self, start: StartChild) -> int:
        child = await self._launcher(start).start(
            start.invitation.hidden(self._control.invitation_key), seeing(start.accelerators)
        )
        self._children[start.invitation.token] = child
        watching = asyncio.create_task(self._watch(start.invitation.token, child))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return child.pid

    async def _watch(self, token: bytes, child: LocalProcess) -> None:
        status = await child.wait()
        del self._children[token]
        self._control.send(ChildEnded(token, status, child.stderr()))
