"""The process that says which job is next on devices that jobs in processes of their own share, and their way to it.

It runs no code of jobs, except for the rules of their schedules. If it ends, jobs go on without it, and another one is
started (``JobProcesses``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from asyncpipe.errors import MessageError
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.turn_taking import ServedArbiter
from asyncpipe.runtime.workers.channel import Channel, Role
from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.group import SECRET_BYTES
from asyncpipe.runtime.workers.handshake import introduce
from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.listener import ControlListener
from asyncpipe.runtime.workers.main_module import own_main_class
from asyncpipe.runtime.workers.packed import Packed, pack, unpack
from asyncpipe.runtime.workers.tcp import connect
from asyncpipe.secured import Secured

__all__ = ["ENTRY", "serve", "take_seat"]

_logger = logging.getLogger(__name__)

ENTRY = "asyncpipe.service.jobs.isolation.arbitration:serve"
IMPORTED_LATER = ("asyncpipe.service.jobs.isolation.job_process",)
"""What jobs are forked with, too."""
CONNECT_SECONDS = 60.0
"""For a job that was told of the arbiter to come."""


async def serve(control: ControlClient) -> None:
    """Serve the service until it says to stop."""
    await control.serve(_ArbiterDoor().handle)


class _ArbiterDoor:
    """Lets jobs in that the service has announced."""

    def __init__(self) -> None:
        self._arbiter = ServedArbiter()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = ControlListener(self._secret, None)
        self._expecting: set[asyncio.Task[None]] = set()

    async def handle(self, devices: tuple[str, ...]) -> Invitation:
        """Expect a job with these devices."""
        opened: asyncio.Future[Invitation] = asyncio.get_running_loop().create_future()
        expecting = asyncio.create_task(self._expect(devices, opened))
        self._expecting.add(expecting)
        expecting.add_done_callback(self._expecting.discard)
        return await opened

    async def _expect(self, devices: tuple[str, ...], opened: asyncio.Future[Invitation]) -> None:
        come = asyncio.Event()

        def connected(secured: Secured) -> None:
            arbiter = self._arbiter
            talk = _Talk(secured, hear=lambda said: arbiter.hear(talk.say, said), gone=lambda: arbiter.leave(talk.say))
            arbiter.join(talk.say, devices)
            come.set()

        with self._listener.expecting(connected) as (address, token):
            opened.set_result(Invitation("", "", address, self._secret, token, devices))
            with suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    await come.wait()


async def take_seat(driver: Driver, where: Invitation) -> None:
    """Have a driver share its devices as the arbiter ``where`` says, on its loop. One that is gone changes nothing."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            secured = await introduce(await connect(where.address), where.secret, where.token)
    except OSError:
        return  # The service will name another one.
    talk = _Talk(secured, hear=lambda answers: seat.answered(answers), gone=lambda: seat.lost())
    seat = driver.sit_down(talk.say)


class _Talk:
    """One end of the connection of a job and the arbiter: a ``Receiver``."""

    def __init__(
        self, secured: Secured, *, hear: Callable[[Sequence[Any]], object], gone: Callable[[], object]
    ) -> None:
        self._hear, self._gone = hear, gone
        self._channel = Channel(secured, asyncio.get_running_loop(), self)

    def say(self, messages: Sequence[Any]) -> None:
        """Send them."""
        try:
            self._channel.send(Role.MESSAGE, packed=pack(messages))
        except MessageError as error:  # The rule of a schedule cannot be pickled.
            self._part(error)

    def received(self, _: Role, __: int, packed: Packed) -> None:
        try:
            self._hear(unpack(packed, own_main_class))
        except Exception as error:  # noqa: BLE001 - what the process of a job says may be anything
            self._part(error)

    def _part(self, error: Exception) -> None:
        _logger.warning("a job shares its devices without regard to weights from now on: %s", error)
        self._channel.close()
        self._gone()

    def closed(self, error: Exception) -> None:
        self._gone()
