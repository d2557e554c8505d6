"""Entries of workers for tests. They import no torch, so a worker is up in a tenth of a second."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import pickle
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from asyncpipe.runtime.workers.control_client import ControlClient

IMPORTED_LATER = ("numpy.random",)


class TwoArgumentsError(Exception):
    """Can be pickled, and not be unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class Deeds:
    """What a worker does when a message ``(name, *arguments)`` tells it to."""

    def __init__(self, control: ControlClient) -> None:
        self.control = control

    def handle(self, message: tuple[Any, ...]) -> Any:
        name, *arguments = message
        return getattr(self, name)(*arguments)

    def echo(self, value: Any) -> Any:
        return value

    async def later(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    async def never(self, *_: Any) -> None:
        await asyncio.Event().wait()

    async def cancelled(self) -> None:
        raise asyncio.CancelledError

    def length(self, value: Any) -> int:
        return len(value)

    def bytes(self, size: int) -> pickle.PickleBuffer:
        return pickle.PickleBuffer(bytearray(range(256)) * (size // 256))

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.control.send(message)

    def fail(self, error: Exception) -> None:
        raise error

    def fail_locally(self) -> None:
        class LocalError(Exception):
            pass

        raise LocalError("of a class that nobody can import")

    def fail_unpicklably(self) -> None:
        raise TwoArgumentsError(1, 2)

    def say_and_exit(self, count: int) -> None:
        for number in range(count):
            self.control.send(number)
        self.control.flush(60)
        os._exit(0)

    def unpicklable(self) -> Any:
        return lambda: None

    def exit(self, status: int, text: str = "") -> None:
        os.write(2, text.encode())
        os._exit(status)

    def write(self, text: str) -> None:
        os.write(2, text.encode())

    def signal(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def crash(self) -> None:
        ctypes.string_at(0)

    def hold_gil(self) -> None:
        """Says so first: nothing can be heard of it later."""
        self.control.send("it holds the GIL")
        self.control.flush(60)
        ctypes.PyDLL(None).sleep(1000)

    def block(self) -> None:
        time.sleep(1000)

    def log(self, name: str, level: int, text: str) -> None:
        logging.getLogger(name).log(level, text)

    def fork(self) -> int:
        """The number of a forked child that outlives this process, with all its files."""
        if not (child := os.fork()):
            time.sleep(1000)
        return child

    def facts(self) -> dict[str, Any]:
        return {
            "path": sys.path,
            "argv": sys.argv,
            "folder": os.getcwd(),
            "command": Path("/proc/self/cmdline").read_bytes(),
            "environment": dict(os.environ),
            "files": {os.readlink(f"/proc/self/fd/{number}") for number in range(3, 20) if _is_open(number)},
            "threads": threading.active_count(),
            "torch": "torch" in sys.modules,
            "stdin": sys.stdin.read(),
            "parent": os.getppid(),
            "drawn": import_module("numpy.random").random(),
        }


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


async def deeds(control: ControlClient) -> None:
    """Does as it is told."""
    await control.serve(Deeds(control).handle)


async def fails(control: ControlClient) -> None:
    """Raises before it serves."""
    raise RuntimeError("this entry fails before it serves")


async def hangs(control: ControlClient) -> None:
    """Never serves."""
    await asyncio.Event().wait()


async def says_bye(control: ControlClient) -> None:
    """Ends by itself when it has been told how many messages to send before."""

    class EnoughError(Exception):
        pass

    def end(count: int) -> None:
        for number in range(count):
            control.send(number)
        raise EnoughError

    with suppress(EnoughError):
        await control.serve(end)


async def hangs_up(control: ControlClient) -> None:
    """Closes its connection when it is told anything, and then lives on, with or without its thread for pings."""

    def hang_up(message: str) -> None:
        sys.setswitchinterval(1000)  # With the GIL, until it is given up.
        c = ctypes.PyDLL(None)
        numbers = [number for number in range(3, 100) if _is_open(number)]
        sockets = [number for number in numbers if os.readlink(f"/proc/self/fd/{number}").startswith("socket:")]
        for number in sockets:
            c.shutdown(number, socket.SHUT_WR)
        (c if message == "hold the GIL" else time).sleep(1000)

    await control.serve(hang_up)
