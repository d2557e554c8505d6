"""How workers that have edges find each other: ``Door`` and ``meet``.

::

    sender                            controller                            receiver
      Door ─────── its addresses ────────▶ │ ◀──────── its addresses ─────────── Door
      ◀──────────── whom to dial where ─── │ ─── whom to dial where ────────────▶
      meet ══ dials ═══════════════════════╪═══════════════════════════════════▶ meet
           ◀══ both show that they know the secret (``handshake.py``) ═════════▶
           ══ greeting: version, job, pair ════════════════════════════════════▶
           ◀══ what is wrong with it, or nothing ═══════════════════════════════

All doors are open before anybody dials, and nobody waits for one peer before it has tried all. So no order of pairs can
deadlock. Workers of one machine meet by Unix sockets, which also carry the descriptor of shared memory; others by TCP.
Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress

from asyncpipe.errors import EdgeError
from asyncpipe.runtime.workers.door import Door
from asyncpipe.runtime.workers.entrance import Entrance
from asyncpipe.runtime.workers.handshake import RefusedError, introduce, receive_values, send_values
from asyncpipe.runtime.workers.launcher import Address
from asyncpipe.runtime.workers.tcp import connect
from asyncpipe.secured import Secured

__all__ = ["Pair", "meet"]

Pair = tuple[int, int]
"""The workers that an edge leads from and to."""
VERSION = 3
RETRY_SECONDS = 0.01
LOOK_SECONDS = 0.05
"""Between two looks whether the pipeline is given up."""
_NOT_THERE = {errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN}
_PAIR = struct.Struct("<qq")


def meet(
    me: int,
    pairs: Sequence[Pair],
    door: Door,
    addresses: Mapping[int, Address],
    *,
    job: str,
    secret: bytes,
    timeout: float = 60.0,
) -> dict[Pair, Secured]:
    """A connection for each of ``pairs`` that worker ``me`` is in, and the peers know the ``secret``.

    Blocks, on a thread without a loop. ``addresses`` are those of the workers that it sends to. Closes the door. Raises
    ``EdgeError``, which names the workers that have not come within ``timeout`` seconds, or that refuse. Nothing is
    left then.
    """
    try:
        return asyncio.run(
            _Meeting(me, [pair for pair in pairs if me in pair], door, addresses, job, secret, timeout).run()
        )
    finally:
        door.close()


class _Meeting:
    def __init__(
        self,
        me: int,
        pairs: Sequence[Pair],
        door: Door,
        addresses: Mapping[int, Address],
        job: str,
        secret: bytes,
        timeout: float,
    ) -> None:
        self._me = me
        self._pairs = pairs
        self._door = door
        self._addresses = addresses
        self._job = job
        self._secret = secret
        self._timeout = timeout
        self._failures: dict[Pair, OSError] = {}
        """Of the last try by TCP."""
        self._met: dict[Pair, Secured] = {}
        self._changed = asyncio.Event()
        """Set when somebody has come, or cannot."""

    async def run(self) -> dict[Pair, Secured]:
        entrance = Entrance(self._door.sockets, self._secret, self._welcome, f"worker {self._me}")
        dials = [asyncio.create_task(self._dial(pair)) for pair in self._pairs if pair[0] == self._me]
        for dial in dials:
            dial.add_done_callback(lambda _: self._changed.set())
        try:
            await self._all_met(dials)
            met, self._met = self._met, {}
            return {pair: met[pair] for pair in self._pairs}
        finally:
            entrance.close()
            for dial in dials:
                dial.cancel()
            await asyncio.gather(*dials, return_exceptions=True)
            for each in self._met.values():
                each.socket.close()

    async def _all_met(self, dials: Sequence[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timeout
        while len(self._met) < len(self._pairs):
            self._changed.clear()
            for dial in dials:
                if dial.done():
                    dial.result()
            if self._door.is_given_up:
                raise EdgeError(f"worker {self._me} waits for no other workers any more: the pipeline is given up")
            if loop.time() >= until:
                raise self._missing()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_SECONDS, until - loop.time())):
                    await self._changed.wait()

    # Senders dial

    async def _dial(self, pair: Pair) -> None:
        dialed = await self._connected(pair)
        try:
            met = await introduce(dialed, self._secret, _PAIR.pack(*pair))
            await send_values(met, {"version": VERSION, "job": self._job, "pair": pair})
            answer = await receive_values(met)
            if error := answer.get("error"):
                raise EdgeError(f"worker {pair[1]} refuses the edge from worker {pair[0]}: {error}", [pair[1]])
        except BaseException as error:
            dialed.close()
            if isinstance(error, RefusedError):
                how = f"what answers at {self._addresses[pair[1]]} is not worker {pair[1]}: {error}"
                raise EdgeError(how, [pair[1]]) from error
            if isinstance(error, OSError | ValueError):
                how = f"worker {pair[1]} went away while edges were connected: {error}"
                raise EdgeError(how, [pair[1]]) from error
            raise
        self._met[pair] = met

    async def _connected(self, pair: Pair) -> socket.socket:
        """A connection to the other worker. It is tried again: that may not be there yet, or its network."""
        address = self._addresses[pair[1]]
        while True:
            try:
                return await connect(address)
            except OSError as error:
                failed = OSError(error.errno, os.strerror(error.errno or 0))
                if not isinstance(address, str):
                    self._failures[pair] = failed
                elif error.errno not in _NOT_THERE:
                    raise EdgeError(f"worker {pair[1]} cannot be reached: {failed}", [pair[1]]) from error
            await asyncio.sleep(RETRY_SECONDS)

    # Receivers accept

    async def _welcome(self, stranger: Secured, token: bytes) -> None:
        """A worker that has dialed names its pair, and is told what is wrong, if something is."""
        greeting = await receive_values(stranger)
        pair: Pair = _PAIR.unpack(token)
        error = None
        if (greeting.get("version"), greeting.get("job")) != (VERSION, self._job):
            error = f"worker {self._me} is of job {self._job!r} and version {VERSION}"
        elif greeting.get("pair") != list(pair) or pair not in self._pairs or pair[1] != self._me or pair in self._met:
            error = f"worker {self._me} knows of no edge from {pair[0]} to {pair[1]}"
        await send_values(stranger, {"error": error})
        if error is not None:
            raise ConnectionRefusedError(error)
        self._met[pair] = stranger
        self._changed.set()

    def _missing(self) -> EdgeError:
        """A worker that is missed is named in the end."""
        pairs = [pair for pair in self._pairs if pair not in self._met]
        last = next((f"; the last try: {self._failures[pair]}" for pair in pairs if pair in self._failures), "")
        return EdgeError.not_there(self._me, pairs, self._timeout, last)
