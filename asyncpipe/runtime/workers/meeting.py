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
from dataclasses import dataclass, field

from asyncpipe.errors import EdgeError
from asyncpipe.runtime.thread_calls import set_within
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


@dataclass(eq=False, slots=True)
class _Meeting:
    me: int
    pairs: Sequence[Pair]
    door: Door
    addresses: Mapping[int, Address]
    job: str
    secret: bytes
    timeout: float
    failures: dict[Pair, OSError] = field(default_factory=dict)
    """Of the last try by TCP."""
    met: dict[Pair, Secured] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when somebody has come, or cannot."""

    async def run(self) -> dict[Pair, Secured]:
        entrance = Entrance(self.door.sockets, self.secret, self._welcome, f"worker {self.me}")
        dials = [asyncio.create_task(self._dial(pair)) for pair in self.pairs if pair[0] == self.me]
        for dial in dials:
            dial.add_done_callback(lambda _: self.changed.set())
        try:
            await self._all_met(dials)
            met, self.met = self.met, {}
            return {pair: met[pair] for pair in self.pairs}
        finally:
            entrance.close()
            for dial in dials:
                dial.cancel()
            await asyncio.gather(*dials, return_exceptions=True)
            for each in self.met.values():
                each.socket.close()

    async def _all_met(self, dials: Sequence[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.timeout
        while len(self.met) < len(self.pairs):
            self.changed.clear()
            for dial in dials:
                if dial.done():
                    dial.result()
            if self.door.is_given_up:
                raise EdgeError(f"worker {self.me} waits for no other workers any more: the pipeline is given up")
            if loop.time() >= until:
                raise self._missing()
            await set_within(self.changed, min(LOOK_SECONDS, until - loop.time()))

    # Senders dial

    async def _dial(self, pair: Pair) -> None:
        dialed = await self._connected(pair)
        try:
            met = await introduce(dialed, self.secret, _PAIR.pack(*pair))
            await send_values(met, {"version": VERSION, "job": self.job, "pair": pair})
            answer = await receive_values(met)
            if error := answer.get("error"):
                raise EdgeError(f"worker {pair[1]} refuses the edge from worker {pair[0]}: {error}", [pair[1]])
        except BaseException as error:
            dialed.close()
            if isinstance(error, RefusedError):
                how = f"what answers at {self.addresses[pair[1]]} is not worker {pair[1]}: {error}"
                raise EdgeError(how, [pair[1]]) from error
            if isinstance(error, OSError | ValueError):
                how = f"worker {pair[1]} went away while edges were connected: {error}"
                raise EdgeError(how, [pair[1]]) from error
            raise
        self.met[pair] = met

    async def _connected(self, pair: Pair) -> socket.socket:
        """A connection to the other worker. It is tried again: that may not be there yet, or its network."""
        address = self.addresses[pair[1]]
        while True:
            try:
                return await connect(address)
            except OSError as error:
                failed = OSError(error.errno, os.strerror(error.errno or 0))
                if not isinstance(address, str):
                    self.failures[pair] = failed
                elif error.errno not in _NOT_THERE:
                    raise EdgeError(f"worker {pair[1]} cannot be reached: {failed}", [pair[1]]) from error
            await asyncio.sleep(RETRY_SECONDS)

    # Receivers accept

    async def _welcome(self, stranger: Secured, token: bytes) -> None:
        """A worker that has dialed names its pair, and is told what is wrong, if something is."""
        greeting = await receive_values(stranger)
        pair: Pair = _PAIR.unpack(token)
        error = None
        if (greeting.get("version"), greeting.get("job")) != (VERSION, self.job):
            error = f"worker {self.me} is of job {self.job!r} and version {VERSION}"
        elif greeting.get("pair") != list(pair) or pair not in self.pairs or pair[1] != self.me or pair in self.met:
            error = f"worker {self.me} knows of no edge from {pair[0]} to {pair[1]}"
        await send_values(stranger, {"error": error})
        if error is not None:
            raise ConnectionRefusedError(error)
        self.met[pair] = stranger
        self.changed.set()

    def _missing(self) -> EdgeError:
        """A worker that is missed is named in the end."""
        pairs = [pair for pair in self.pairs if pair not in self.met]
        last = next((f"; the last try: {self.failures[pair]}" for pair in pairs if pair in self.failures), "")
        return EdgeError.not_there(self.me, pairs, self.timeout, last)
