"""Where a worker is: on which machine, and where others reach it."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
import struct
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncpipe.errors import OptionError

__all__ = ["LOOPBACK", "MACHINE", "WorkerPlace", "address_of_interface", "interface_of", "is_loopback", "this_machine"]

LOOPBACK = "127.0.0.1"
MACHINE = "ASYNCPIPE_MACHINE"
"""A variable of the environment: the machine that a process says it is on, for tests of hosts on one."""
_GET_ADDRESS = 0x8915
"""``SIOCGIFADDR`` of Linux."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """What a worker says of itself when it comes up."""

    machine: str
    """Equal for processes that can share memory and Unix sockets, and only for them."""
    host: str
    """The machine's name, for people."""
    address: str
    """The IP address of its connection to the controller, at which other machines reach it, too. One of loopback if the
    controller is on its machine."""

    @classmethod
    def of_this_process(cls, control: socket.socket) -> WorkerPlace:
        """The place of the worker that has the connection ``control`` to its controller."""
        address = LOOPBACK if control.family == socket.AF_UNIX else control.getsockname()[0]
        return cls(this_machine(), socket.gethostname(), address)


def address_of_interface(interface: str) -> str:
    """The address of this machine at an interface: its name, an address of it, or a network that it is in.

    ::

        "eth0"   "10.1.0.7"   "10.1.0.0/16"

    Raises ``OptionError``, which names those that there are.
    """
    with suppress(ValueError):
        network = ipaddress.ip_network(interface, strict=False)
        if network.num_addresses == 1:
            if _can_bind(str(network[0])):
                return str(network[0])
        else:
            for _, address in _interfaces():
                if ipaddress.ip_address(address) in network:
                    return address
    there = list(_interfaces())
    for name, address in there:
        if name == interface:
            return address
    listed = ", ".join(f"{name} ({address})" for name, address in there)
    raise OptionError(
        f"{socket.gethostname()} has no interface {interface!r}, which is a name, an address or a network "
        f"(10.1.0.0/16); it has {listed}"
    )


def interface_of(address: str) -> str:
    """The name of the interface that has ``address``; empty if none has."""
    return next((name for name, other in _interfaces() if other == address), "")


def is_loopback(address: str) -> bool:
    """Whether only processes of the same machine reach it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interfaces() -> Iterator[tuple[str, str]]:
    """The names of this machine's interfaces with their addresses, those of IPv4 first."""
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        from fcntl import ioctl

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # It has none.
                answer = ioctl(asking, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != "20":  # Those of a link alone need its number, too.
                yield name, str(ipaddress.IPv6Address(int(digits, 16)))


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
    return True


def this_machine() -> str:
    """``WorkerPlace.machine`` of this process.

    That is the kernel that runs, what it shows of file systems, and whose files they are: sockets lie in a user's
    folder.
    """
    if given := os.environ.get(MACHINE):
        return given
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        mounts = os.readlink("/proc/self/ns/mnt")
    except OSError:  # Not Linux.
        boot, mounts = f"{platform.node()}-{uuid.getnode():x}", ""
    return f"{boot} {mounts} {os.getuid()}"
