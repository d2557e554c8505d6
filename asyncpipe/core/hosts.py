"""Which workers are lost together: those of a host, which the names of their devices begin with.

::

    host-a/cuda:0   host-a/cuda:1      one host: its power, its network
    cpu:0           cpu:1              no host is named: each worker is lost by itself
"""

from __future__ import annotations

__all__ = ["host_of", "unit_of"]


def host_of(name: str) -> str:
    """The host in the name of a device or a worker; empty if it names none."""
    return name.rpartition("/")[0]


def unit_of(name: str) -> str:
    """What is lost together with the device or worker ``name``: its host, or without one that worker alone."""
    return host_of(name) or name.partition("#")[0]
