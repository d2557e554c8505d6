"""Where the processes meet that ``torchrun`` has started: rank 0 is the controller, and the others become agents.

::

    rank 0  Rendezvous ◀── rank's number, secret shown by both ── rank 1   serve_rank
                    ─── an invitation ──────────────────────▶          becomes the agent (``agent.py``)
                    ◀── that this has ended ─────────────────
                    ─── another one, or the end ────────────▶

On one host the ranks find port and secret in a file that only their user can read. On several hosts the secret comes
from ``ASYNCPIPE_SECRET``, which whoever starts torchrun sets on each: torchrun's own store lets in everybody.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import hashlib
import json
import os
import secrets
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncpipe.errors import LauncherError, OptionError
from asyncpipe.runtime.portal import Portal
from asyncpipe.runtime.workers.entrance import Entrance
from asyncpipe.runtime.workers.handshake import TOKEN_BYTES, introduce, receive_values, send_values
from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.tcp import connect
from asyncpipe.runtime.workers.worker_main import become_worker
from asyncpipe.secured import Secured

__all__ = ["Rendezvous", "Rank", "RankHere", "rendezvous", "serve_rank"]

SECRET_VARIABLE = "ASYNCPIPE_SECRET"  # noqa: S105 - its name
PORT_VARIABLE = "ASYNCPIPE_CONTROL_PORT"
SHORTEST_SECRET = 16
RETRY_SECONDS = 0.1
HANDSHAKE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Rank:
    """What torchrun tells a process of itself."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    run: str
    """Names the start: no two of one user on one host are alike."""

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> Rank:
        """By the environment. Raises ``OptionError`` if torchrun has not started this process."""
        try:
            rank, world, local_rank, local_world = (
                int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            )
            address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        except (KeyError, ValueError) as error:
            raise OptionError(
                f"workers='torchrun' are the processes that torchrun has started, and the environment lacks {error}; "
                "start the program by torchrun (torchrun --nproc-per-node 3 -m asyncpipe.worker PROGRAM)"
            ) from None
        run = "-".join(environment.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
        return cls(rank, world, local_rank, local_world, address, port, f"{run}-{port}")

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_world_size == self.world_size

    @property
    def control_port(self) -> int:
        """Where the controller listens for the ranks of other hosts."""
        return int(os.environ.get(PORT_VARIABLE, self.master_port + 1))

    def shared_secret(self) -> bytes:
        """What all hosts were given. Raises ``OptionError`` if this one was not."""
        text = os.environ.get(SECRET_VARIABLE, "")
        if len(text) < SHORTEST_SECRET:
            raise OptionError(
                f"torchrun has started ranks on several hosts, and workers run what their controller sends: set the "
                f"environment variable {SECRET_VARIABLE} to one text of {SHORTEST_SECRET} letters or more on all of "
                "them (openssl rand -hex 32 makes one)"
            )
        return hashlib.sha256(text.encode()).digest()

    @property
    def file(self) -> Path:
        """Where ranks of one host find port and secret. Raises ``OptionError`` if others could have written it."""
        folder = Path(tempfile.gettempdir()) / f"asyncpipe-torchrun-{os.getuid()}"
        folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise OptionError(f"{folder} must be a folder of this user that is closed to others (mode 700); remove it")
        name = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in self.run)
        return folder / name


@dataclass(slots=True)
class RankHere:
    """A rank that has come, as the controller sees it."""

    rank: int
    host: str
    connected: Secured
    ended: concurrent.futures.Future[int | None] | None = None
    """Of the agent that it is, if it is one."""
    is_gone: bool = False


class Rendezvous:
    """The controller's side: there is one in a process, until that ends. Its connections are served by a thread."""

    def __init__(self, own: Rank) -> None:
        """Listens. Raises ``OptionError`` without a secret, or where the address is not this host's."""
        self.own = own
        self.address = "127.0.0.1"
        self.secret = secrets.token_bytes(32)
        """What all ranks know."""
        self._here: dict[int, RankHere] = {}
        self._changed = threading.Condition()
        self._file: Path | None = None
        port = 0
        if not own.is_one_host:
            self.secret, port = own.shared_secret(), own.control_port
            self.address = str(socket.getaddrinfo(own.master_address, port, type=socket.SOCK_STREAM)[0][4][0])
        try:
            family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
            self._listening = socket.create_server((self.address, port), family=family)
        except OSError as error:
            raise OptionError(
                f"the controller cannot listen at {self.address}, port {port}, which MASTER_ADDR and MASTER_PORT + 1 "
                f"name ({error}); {PORT_VARIABLE} sets another port, on all hosts"
            ) from error
        self._listening.setblocking(False)
        if own.is_one_host:
            self._file = own.file
            values = {"port": self._listening.getsockname()[1], "secret": self.secret.hex()}
            new = self._file.with_name(f"{self._file.name}.{os.getpid()}")
            new.touch(mode=0o600)
            new.write_text(json.dumps(values))
            new.rename(self._file)
        self._portal = Portal()
        self._serving: set[asyncio.Task[None]] = set()
        self._entrance = self._portal.call(self._open())
        atexit.register(self.close)

    def all_here(self, seconds: float) -> list[RankHere]:
        """All ranks but this one, in order, when they have come. Blocks. Raises ``LauncherError``."""
        wanted = range(1, self.own.world_size)
        with self._changed:
            if not self._changed.wait_for(lambda: all(rank in self._here for rank in wanted), seconds):
                missing = ", ".join(str(rank) for rank in wanted if rank not in self._here)
                raise LauncherError(f"of torchrun's ranks, {missing} did not come within {seconds:g} s")
            return [self._here[rank] for rank in wanted]

    def begin(self, rank: int, line: bytes) -> concurrent.futures.Future[int | None]:
        """Have a rank become the agent that ``line`` invites, with a hidden secret; its end.

        Raises ``LauncherError`` if it is gone.
        """
        here = self._here[rank]
        if here.is_gone:
            raise LauncherError(
                f"rank {rank} on {here.host} is gone, and torchrun starts it only together with all others "
                "(--max-restarts); the job goes on from its last snapshot (--resume)"
            )
        here.ended = concurrent.futures.Future()
        asyncio.run_coroutine_threadsafe(self._send(here, line), self._portal.loop)
        return here.ended

    def hang_up(self, rank: int) -> None:
        """Let a rank end."""
        with suppress(OSError):
            self._here[rank].connected.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let all ranks end."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        for rank in list(self._here):
            self.hang_up(rank)
        self._portal.close()
        self._portal.join()
        self._listening.close()

    async def _open(self) -> Entrance:
        return Entrance([self._listening], self.secret, self._welcome, "torchrun's rank 0")

    async def _welcome(self, connected: Secured, token: bytes) -> None:
        rank = int.from_bytes(token, "big")
        here = RankHere(rank, str((await receive_values(connected)).get("host")), connected)
        with self._changed:
            self._here[rank] = here
            self._changed.notify_all()
        self._serving.add(task := asyncio.create_task(self._serve(here)))
        task.add_done_callback(self._serving.discard)

    async def _serve(self, here: RankHere) -> None:
        with suppress(OSError, ValueError), here.connected.socket:
            while await receive_values(here.connected):
                if here.ended is not None and not here.ended.done():
                    here.ended.set_result(0)
        here.is_gone = True
        if here.ended is not None and not here.ended.done():
            here.ended.set_result(None)

    async def _send(self, here: RankHere, line: bytes) -> None:
        with suppress(OSError):
            await send_values(here.connected, json.loads(line))


_rendezvous: Rendezvous | None = None
_lock = threading.Lock()


def rendezvous(own: Rank) -> Rendezvous:
    """That of this process, which is made at the first call."""
    global _rendezvous
    with _lock:
        if _rendezvous is None:
            _rendezvous = Rendezvous(own)
        return _rendezvous


def serve_rank() -> None:
    """What a rank other than 0 does until rank 0 has ended: agents, one after the other. Blocks."""
    own = Rank.of_this_process()
    with asyncio.Runner() as runner:
        connected, secret = runner.run(_connected(own))
        os.environ.pop(SECRET_VARIABLE, None)
        with connected.socket, suppress(OSError, ValueError):  # The controller has ended.
            runner.run(send_values(connected, {"host": socket.gethostname()}))
            while True:
                values = runner.run(receive_values(connected))
                theirs = [entry for entry in values["sys_path"] if os.path.exists(entry)]
                sys.path[:] = [*theirs, *[entry for entry in sys.path if entry not in theirs]]
                invitation = Invitation.from_json(values["invitation"]).hidden(secret)
                become_worker(values | {"invitation": invitation.to_json()}, None)
                runner.run(send_values(connected, {"has_ended": True}))


async def _connected(own: Rank) -> tuple[Secured, bytes]:
    """The connection to rank 0, and the secret of both.

    Rank 0 may come later. Waits as long as it takes: torchrun ends this if that fails.
    """
    secret = None if own.is_one_host else own.shared_secret()
    while True:
        connected: socket.socket | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                if own.is_one_host:
                    values = json.loads(own.file.read_text())
                    address, secret = ("127.0.0.1", int(values["port"])), bytes.fromhex(values["secret"])
                else:
                    address = own.master_address, own.control_port
                connected = await connect(address)
                assert secret is not None
                return await introduce(connected, secret, own.rank.to_bytes(TOKEN_BYTES, "big")), secret
        except (OSError, ValueError, KeyError):
            # It is not there yet, or the file is of a start that was killed.
            if connected is not None:
                connected.close()
            await asyncio.sleep(RETRY_SECONDS)
