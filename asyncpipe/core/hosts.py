"""Names of devices, which may begin with that of their host, and which workers are lost together: those of a host.

::

    host-a/cuda:0   host-a/cuda:1      one host: its power, its network
    cpu:0           cpu:1              no host is named: each worker is lost by itself
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DeviceName", "host_of", "unit_of"]


def host_of(name: str) -> str:
    """The host in the name of a device or a worker; empty if it names none."""
    return name.rpartition("/")[0]


def unit_of(name: str) -> str:
    """What is lost together with the device or worker ``name``: its host, or without one that worker alone."""
    return host_of(name) or name.partition("#")[0]


class DeviceName(NamedTuple):
    """A name, taken apart."""

    host: str
    """Empty if none is named."""
    device: str
    """As torch calls it on that host; the second of one name ends with ``#1``, and so on."""

    @classmethod
    def parse(cls, name: str) -> DeviceName:
        """``host/device``, or a device alone."""
        host, _, device = name.rpartition("/")
        return cls(host, device)

    @property
    def physical(self) -> str:
        """The device without the number that tells two of one name apart."""
        return self.device.partition("#")[0]

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU's, of which every host has as many as it is asked for."""
        return self.device.partition(":")[0] == "cpu"

    def __str__(self) -> str:
        return f"{self.host}/{self.device}" if self.host else self.device
