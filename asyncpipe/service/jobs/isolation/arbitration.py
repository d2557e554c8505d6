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
from typing import Any, NamedTuple

from asyncpipe.errors import InvalidTransition, MessageError
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.turn_taking import ServedArbiter
from asyncpipe.runtime.workers.channel import Channel, Role
from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.group import SECRET_BYTES
from asyncpipe.runtime.workers.handshake import introduce
from asyncpipe.runtime.workers.launcher import Address
from asyncpipe.runtime.workers.listener import ControlListener
from asyncpipe.runtime.workers.main_module import own_main_class
from asyncpipe.runtime.workers.packed import Packed, pack, unpack
from asyncpipe.runtime.workers.tcp import connect
from asyncpipe.secured import Secured

__all__ = ["ENTRY", "ArbiterAddress", "serve", "take_seat"]

_logger = logging.getLogger(__name__)

ENTRY = "asyncpipe.service.jobs.isolation.arbitration:serve"
IMPORTED_LATER = ("asyncpipe.service.jobs.isolation.job_process",)
"""What jobs are forked with, too."""
CONNECT_SECONDS = 20.0
"""For a job that was told of the arbiter to come."""


class ArbiterAddress(NamedTuple):
    """Where one job may come, once."""

    address: Address
    secret: bytes
    token: bytes

    def __repr__(self) -> str:
        return f"ArbiterAddress({self.address!r})"


async def serve(control: ControlClient) -> None:
    """Serve the service until it says to stop."""
    await control.serve(_Door().handle)


class _Door:
    """Lets jobs in that the service has announced."""

    def __init__(self) -> None:
        self._arbiter = ServedArbiter()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = ControlListener(self._secret, None)
        self._expecting: set[asyncio.Task[None]] = set()

    async def handle(self, devices: tuple[str, ...]) -> ArbiterAddress:
        """Expect a job with these devices."""
        opened: asyncio.Future[ArbiterAddress] = asyncio.get_running_loop().create_future()
        expecting = asyncio.create_task(self._expect(devices, opened))
        self._expecting.add(expecting)
        expecting.add_done_callback(self._expecting.discard)
        return await opened

    async def _expect(self, devices: tuple[str, ...], opened: asyncio.Future[ArbiterAddress]) -> None:
        come = asyncio.Event()

        def connected(secured: Secured) -> None:
            arbiter = self._arbiter
            talk = _Talk(secured, hear=lambda said: arbiter.hear(talk, said), gone=lambda: arbiter.leave(talk))
            arbiter.join(talk, devices, talk.say)
            come.set()

        with self._listener.expecting(connected) as (address, token):
            opened.set_result(ArbiterAddress(address, self._secret, token))
            with suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    await come.wait()


async def take_seat(driver: Driver, where: ArbiterAddress) -> None:
    """Have a driver share its devices as the arbiter ``where`` says, on its loop. One that is gone changes nothing."""
    assert driver.turns is not None
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            secured = await introduce(await connect(where.address), where.secret, where.token)
    except OSError:
        return  # The service will name another one.
    talk = _Talk(secured, hear=lambda answers: seat.answered(answers), gone=lambda: seat.lost())
    seat = driver.turns.sit_down(talk.say)


class _Talk:
    """One end of the connection of a job and the arbiter: a ``Receiver``."""

    def __init__(
        self, secured: Secured, *, hear: Callable[[Sequence[Any]], object], gone: Callable[[], object]
    ) -> None:
        self._hear, self._gone = hear, gone
        self._channel = Channel(secured, asyncio.get_running_loop(), self)

    def say(self, messages: Sequence[Any]) -> None:
        """Send them."""
        self._channel.send(Role.MESSAGE, packed=pack(messages))

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def received(self, _: Role, __: int, packed: Packed) -> None:
        try:
            self._hear(unpack(packed, own_main_class))
        except (MessageError, InvalidTransition) as error:
            _logger.warning("jobs that share devices cannot agree on turns: %s", error)
            self.close()
            self._gone()

    def closed(self, error: Exception) -> None:
        self._gone()
