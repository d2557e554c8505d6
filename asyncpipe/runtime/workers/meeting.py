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
deadlock. Workers of one machine meet by Unix sockets, which also carry the descriptors of shared memory; others by TCP.
Nothing is unpickled.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import selectors
import socket
import stat
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from asyncpipe.errors import EdgeError
from asyncpipe.runtime.workers.handshake import RefusedError, Steps, introducing, letting_in
from asyncpipe.runtime.workers.held_folder import HeldFolder
from asyncpipe.runtime.workers.launcher import Address
from asyncpipe.runtime.workers.tcp import prepare

__all__ = ["Door", "Pair", "meet"]

Pair = tuple[int, int]
"""The workers that an edge leads from and to."""
VERSION = 2
RETRY_SECONDS = 0.01
LOOK_SECONDS = 0.05
"""Between two looks whether the pipeline is given up."""
HANDSHAKE_SECONDS = 10.0
"""For one that dials to show who it is."""
MOST_STRANGERS = 64
"""How many may be doing so at a time. One more, and the first of them is shown out."""
_NOT_THERE = {errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN}
_LENGTH = struct.Struct("<I")
_PAIR = struct.Struct("<qq")
_MOST_BYTES = 1 << 16

_logger = logging.getLogger(__name__)


class Door:
    """Where other workers reach this one until all have come. Opened and closed on any thread."""

    def __init__(self, me: int, *, folder: str | HeldFolder | None = None, host: str | None = None) -> None:
        """``me`` is this worker's number. It listens in ``folder``, which must be this user's alone, for workers of
        this machine, and at the address ``host`` for those of others. Raises ``EdgeError`` if it cannot.

        A ``HeldFolder`` is removed with the door.
        """
        self.me = me
        self._held = folder if isinstance(folder, HeldFolder) else None
        self.local: str | None = None
        """The path for workers of this machine."""
        self.remote: tuple[str, int] | None = None
        """Host and port for others."""
        self.sockets: list[socket.socket] = []
        """What is listened at."""
        self.is_given_up = False
        """Whether ``give_up`` was called."""
        try:
            if folder is not None:
                path = folder.path if isinstance(folder, HeldFolder) else folder
                _check_folder(path)
                self.local = str(Path(path) / str(me))
                self._listen(socket.socket(socket.AF_UNIX), self.local)
            if host is not None:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listening = self._listen(socket.socket(family), (host, 0))
                self.remote = listening.getsockname()[:2]
        except BaseException:
            self.close()
            raise

    def _listen(self, listening: socket.socket, address: Address) -> socket.socket:
        try:
            listening.bind(address)
        except OSError as error:
            listening.close()
            self.local = None  # Whoever has it.
            short = "; the folder's name must be short (about 100 letters)" if isinstance(address, str) else ""
            raise EdgeError(f"worker {self.me} cannot listen at {address}: {error}{short}") from error
        self.sockets.append(listening)
        listening.listen(MOST_STRANGERS)
        listening.setblocking(False)
        return listening

    def give_up(self) -> None:
        """Have ``meet`` end, with an ``EdgeError``."""
        self.is_given_up = True

    def close(self) -> None:
        """Let nobody in any more; twice is once."""
        for listening in self.sockets:
            listening.close()
        self.sockets.clear()
        if self.local is not None:
            with suppress(FileNotFoundError):
                os.unlink(self.local)
            self.local = None
        if self._held is not None:
            self._held.remove()


def meet(
    me: int,
    pairs: Sequence[Pair],
    door: Door,
    addresses: Mapping[int, Address],
    *,
    job: str,
    secret: bytes,
    timeout: float = 60.0,
) -> dict[Pair, socket.socket]:
    """A connection for each of ``pairs`` that worker ``me`` is in, and the peers know the ``secret``.

    Blocks. ``addresses`` are those of the workers that it sends to. Closes the door. Raises ``EdgeError``, which names
    the workers that have not come within ``timeout`` seconds, or that refuse. Nothing is left then.
    """
    with ExitStack() as stack:
        stack.callback(door.close)
        selector = stack.enter_context(selectors.DefaultSelector())
        meeting = _Meeting(me, [pair for pair in pairs if me in pair], door, addresses, job, secret, timeout, selector)
        stack.callback(meeting.close)
        return meeting.run()


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
        selector: selectors.BaseSelector,
    ) -> None:
        self._me = me
        self._pairs = pairs
        self._door = door
        self._addresses = addresses
        self._job = job
        self._secret = secret
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._selector = selector
        self._dialing: dict[Pair, socket.socket] = {}
        """From the first try that may work."""
        self._failures: dict[Pair, OSError] = {}
        """Of the last try by TCP."""
        self._strangers: OrderedDict[socket.socket, float] = OrderedDict()
        """Who has dialed and not shown yet who it is, with its deadline."""
        self._met: dict[Pair, socket.socket] = {}

    def run(self) -> dict[Pair, socket.socket]:
        for listening in self._door.sockets:
            self._selector.register(listening, selectors.EVENT_READ, partial(self._accept, listening))
        while len(self._met) < len(self._pairs):
            if self._door.is_given_up:
                raise EdgeError(f"worker {self._me} waits for no other workers any more: the pipeline is given up")
            waiting = [pair for pair in self._pairs if pair[0] == self._me and not self._has(pair)]
            for pair in waiting:
                self._dial(pair)
            seconds = RETRY_SECONDS if waiting else LOOK_SECONDS
            for key, _ in self._selector.select(max(0.0, min(seconds, self._deadline - time.monotonic()))):
                if key.fileobj.fileno() >= 0:  # type: ignore[union-attr] # What was handled before may have closed it.
                    key.data()
            now = time.monotonic()
            for stranger in [each for each, until in self._strangers.items() if now > until]:
                self._show_out(stranger, "it said nothing")
            if now >= self._deadline and len(self._met) < len(self._pairs):
                raise self._missing()
        met, self._met = self._met, {}
        return {pair: met[pair] for pair in self._pairs}

    def close(self) -> None:
        for each in (*self._dialing.values(), *self._strangers, *self._met.values()):
            each.close()

    # Senders dial

    def _dial(self, pair: Pair) -> None:
        address = self._addresses[pair[1]]
        if isinstance(address, str):
            family = socket.AF_UNIX
        else:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        dialing = socket.socket(family)
        dialing.setblocking(False)
        failed = dialing.connect_ex(address)
        if failed == errno.EINPROGRESS:
            self._dialing[pair] = dialing
            self._selector.register(dialing, selectors.EVENT_WRITE, partial(self._has_dialed, pair, dialing))
        elif failed:
            self._fail(pair, dialing, failed)
        else:
            self._dialing[pair] = dialing
            self._talk(dialing, self._greeting(pair), partial(self._answered, pair), partial(self._left, pair))

    def _has_dialed(self, pair: Pair, dialing: socket.socket) -> None:
        self._selector.unregister(dialing)
        if failed := dialing.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            del self._dialing[pair]
            self._fail(pair, dialing, failed)
        else:
            self._talk(dialing, self._greeting(pair), partial(self._answered, pair), partial(self._left, pair))

    def _has(self, pair: Pair) -> bool:
        return pair in self._dialing or pair in self._met

    def _fail(self, pair: Pair, dialing: socket.socket, failed: int) -> None:
        """It is tried again: the other worker may not be there yet, or its network."""
        dialing.close()
        error = OSError(failed, os.strerror(failed))
        if dialing.family != socket.AF_UNIX:
            self._failures[pair] = error
        elif failed not in _NOT_THERE:
            raise EdgeError(f"worker {pair[1]} cannot be reached: {error}", [pair[1]]) from error

    def _greeting(self, pair: Pair) -> Steps[dict[str, Any]]:
        yield from introducing(self._secret, _PAIR.pack(*pair))
        answer = yield from _exchanged({"version": VERSION, "job": self._job, "pair": pair})
        return answer

    def _answered(self, pair: Pair, answer: dict[str, Any]) -> None:
        if error := answer.get("error"):
            raise EdgeError(f"worker {pair[1]} refuses the edge from worker {pair[0]}: {error}", [pair[1]])
        self._met[pair] = self._dialing.pop(pair)

    def _left(self, pair: Pair, error: Exception) -> None:
        how = f"worker {pair[1]} went away while edges were connected: {error}"
        if isinstance(error, RefusedError):
            how = f"what answers at {self._addresses[pair[1]]} is not worker {pair[1]}: {error}"
        raise EdgeError(how, [pair[1]]) from error

    # Receivers accept

    def _accept(self, listening: socket.socket) -> None:
        try:
            stranger, _ = listening.accept()
        except OSError:  # It has gone again, or there are too many open files: others may come.
            return
        stranger.setblocking(False)
        if len(self._strangers) >= MOST_STRANGERS:
            self._show_out(next(iter(self._strangers)), "others wait")
        self._strangers[stranger] = time.monotonic() + HANDSHAKE_SECONDS
        self._talk(stranger, self._welcome(), partial(self._let_in, stranger), partial(self._show_out, stranger))

    def _welcome(self) -> Steps[Pair | None]:
        """The pair that a worker which has dialed names. It is told what is wrong, if something is."""
        token = yield from letting_in(self._secret)
        greeting = yield from _received()
        pair: Pair = _PAIR.unpack(token)
        error = None
        if (greeting.get("version"), greeting.get("job")) != (VERSION, self._job):
            error = f"worker {self._me} is of job {self._job!r} and version {VERSION}"
        elif greeting.get("pair") != list(pair) or pair not in self._pairs or pair[1] != self._me or pair in self._met:
            error = f"worker {self._me} knows of no edge from {pair[0]} to {pair[1]}"
        yield _framed({"error": error}), 0
        return None if error else pair

    def _let_in(self, stranger: socket.socket, pair: Pair | None) -> None:
        del self._strangers[stranger]
        if pair is None:
            stranger.close()
        else:
            self._met[pair] = stranger

    def _show_out(self, stranger: socket.socket, why: object) -> None:
        """A worker that is missed is named in the end."""
        del self._strangers[stranger]
        with suppress(KeyError):
            self._selector.unregister(stranger)
        stranger.close()
        if stranger.family != socket.AF_UNIX:
            _logger.warning("a connection to worker %d is refused: %s", self._me, why)

    # Both

    def _talk(
        self,
        connected: socket.socket,
        steps: Steps[Any],
        ended: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Go through ``steps`` while others do the same; then one of the functions is called."""
        prepare(connected)
        read, count = b"", 0

        def go_on() -> None:
            nonlocal read, count
            try:
                if count:
                    part = connected.recv(count - len(read))
                    if not part:
                        raise EOFError("the connection was closed")
                    read += part
                while len(read) == count:
                    data, next_count = steps.send(read) if count else next(steps)
                    read, count = b"", next_count
                    if data and connected.send(data) < len(data):
                        raise OSError("the connection takes nothing")
            except BlockingIOError:
                return
            except StopIteration as end:
                with suppress(KeyError):
                    self._selector.unregister(connected)
                ended(end.value)
            except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
                with suppress(KeyError):
                    self._selector.unregister(connected)
                failed(error)

        self._selector.register(connected, selectors.EVENT_READ, go_on)
        go_on()

    def _missing(self) -> EdgeError:
        pairs = [pair for pair in self._pairs if pair not in self._met]
        last = next((f"; the last try: {self._failures[pair]}" for pair in pairs if pair in self._failures), "")
        return EdgeError.not_there(self._me, pairs, self._timeout, last)


def _check_folder(folder: str) -> None:
    try:
        found = os.stat(folder)
    except OSError as error:
        raise EdgeError(f"the workers' folder {folder} is not there: {error}") from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise EdgeError(
            f"the workers' folder {folder} must belong to this user and be closed to others (mode 700); it has mode "
            f"{stat.S_IMODE(found.st_mode):o}"
        )


def _exchanged(value: Mapping[str, Any]) -> Steps[dict[str, Any]]:
    """Send ``value``, and receive another one."""
    yield _framed(value), 0
    return (yield from _received())


def _received() -> Steps[dict[str, Any]]:
    """What ``_framed`` has framed. Raises ``ValueError`` if it is nothing of the kind."""
    (length,) = _LENGTH.unpack((yield b"", _LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"a greeting of {length} bytes")
    value = json.loads((yield b"", length))
    if not isinstance(value, dict):
        raise ValueError("a greeting that is no table")
    return value


def _framed(value: Mapping[str, Any]) -> bytes:
    data = json.dumps(value).encode()
    return _LENGTH.pack(len(data)) + data
