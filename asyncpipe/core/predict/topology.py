"""A topology: hosts, the devices on them, and the links over which these send each other tensors.

``cli/prediction_files.py`` reads one from a file.

**How a link carries messages.** One after the other, in the order in which they are made: a message of n bytes has the
link for n / bandwidth, and is there ``latency`` later. The next one begins when the link is free, so messages follow
each other on a long link. Two hosts have one link in each direction, which all pairs of their devices share. Inside a
host every ordered pair of devices has a link of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from asyncpipe.core.graph.task import Task
from asyncpipe.core.hosts import DeviceName
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import StageCosts
from asyncpipe.errors import DeviceError, TopologyError

__all__ = ["Host", "NetworkLink", "Route", "Topology", "TopologyCosts"]


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """How long messages take. Raises ``TopologyError`` for numbers that no link has."""

    latency: float = 0.0
    """Seconds that a message of nothing would take."""
    bandwidth: float = inf
    """Bytes per second."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency < inf:
            raise TopologyError(f"latency must be finite seconds, zero or more, got {self.latency!r}")
        if not self.bandwidth > 0:
            raise TopologyError(f"bandwidth must be more than 0 bytes per second, got {self.bandwidth!r}")

    def seconds(self, size: float) -> float:
        """How long a message of ``size`` bytes takes on a link that nothing else uses."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: its devices and how fast they are. Raises ``TopologyError`` for what cannot be."""

    name: str
    devices: tuple[str, ...]
    """As they are called there: ``cuda:0``."""
    speeds: tuple[float, ...] = ()
    """Of each device: a task takes its measured seconds divided by the speed. By default 1."""
    inside: NetworkLink | None = None
    """Between two of its devices; by default the topology's ``inside``."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise TopologyError(f"a host needs a name without '/', got {self.name!r}")
        object.__setattr__(self, "devices", _names(f"devices of host {self.name!r}", self.devices))
        speeds = tuple(self.speeds) or (1.0,) * len(self.devices)
        if len(speeds) != len(self.devices):
            raise TopologyError(
                f"speeds of host {self.name!r} must be one a device, {len(self.devices)}, got {len(speeds)}"
            )
        for speed in speeds:
            if not 0 < speed < inf:
                raise TopologyError(f"a speed of host {self.name!r} must be finite and more than 0, got {speed!r}")
        object.__setattr__(self, "speeds", speeds)


class Route(NamedTuple):
    """The way from one device to another."""

    channel: tuple[str, ...]
    """What the messages of all routes with the same channel share: it carries one after the other."""
    link: NetworkLink


@dataclass(frozen=True, slots=True)
class Topology:
    """Hosts in an order, and the links between them. Raises ``TopologyError`` for what does not fit together."""

    hosts: tuple[Host, ...]
    link: NetworkLink = field(default_factory=NetworkLink)
    """Between two hosts that ``links`` does not have."""
    inside: NetworkLink = field(default_factory=NetworkLink)
    """Between two devices of a host that says nothing else."""
    links: Mapping[frozenset[str], NetworkLink] = field(default_factory=dict)
    """By the names of two hosts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        names = _names("hosts", [host.name for host in self.hosts])
        for pair in self.links:
            if len(pair) != 2 or not pair <= set(names):
                raise TopologyError(
                    f"a link joins two of the hosts {', '.join(names)}, got {' and '.join(sorted(pair)) or 'nothing'}"
                )

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of all devices, host by host: ``host-a/cuda:0``."""
        return tuple(str(DeviceName(host.name, device)) for host in self.hosts for device in host.devices)

    def first_devices(self, count: int) -> tuple[str, ...]:
        """The names of the first ``count`` devices; raises ``TopologyError`` if there are fewer."""
        if len(self.devices) < count:
            raise TopologyError(f"the topology has {len(self.devices)} devices, the schedule needs {count}")
        return self.devices[:count]

    @property
    def speeds(self) -> dict[str, float]:
        """The speed of each device, by its name."""
        speeds = (speed for host in self.hosts for speed in host.speeds)
        return dict(zip(self.devices, speeds, strict=True))

    def host(self, device: str) -> Host:
        """The host of ``device``; raises ``DeviceError`` that lists the devices for one that is not here."""
        named = DeviceName.parse(device)
        for host in self.hosts:
            if host.name == named.host and named.device in host.devices:
                return host
        raise self.unknown(device)

    def unknown(self, device: str) -> DeviceError:
        """What is raised for a device that is not here."""
        known = self.devices
        shown = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
        return DeviceError(f"the topology has no device {device!r}; it has {shown}")

    def between(self, one: str, other: str) -> NetworkLink:
        """The link between two hosts, by their names."""
        return self.links.get(frozenset((one, other)), self.link)

    def route(self, source: str, target: str) -> Route:
        """How a message gets from one device to another; raises ``DeviceError`` for a device that is not here."""
        one, other = self.host(source), self.host(target)
        if one is other:
            return Route((source, target), one.inside or self.inside)
        return Route((one.name, other.name), self.between(one.name, other.name))

    def ordered(self, hosts: Iterable[str]) -> Topology:
        """The same with ``hosts`` (names) in this order, and no others."""
        by_name = {host.name: host for host in self.hosts}
        chosen = tuple(by_name[name] for name in hosts)
        left = {host.name for host in chosen}
        return replace(self, hosts=chosen, links={pair: link for pair, link in self.links.items() if pair <= left})


@dataclass(frozen=True, slots=True)
class TopologyCosts:
    """A cost model on a topology: those of ``costs`` at the speed of each device, and copies by the links.

    The simulator lets messages of one link wait for each other, so it must get this as it is: other models go inside.
    Devices of the graph are those of the topology. What ``costs`` says of copies does not count, nor what
    ``StageCosts`` say of the way of what A and G bring.
    """

    costs: Callable[[Task], float]
    topology: Topology
    sizes: Callable[[Task], float] | None = None
    """The bytes that a message for a task brings; by default those that ``costs`` knows (``StageCosts``), or none."""
    _speeds: dict[str, float] = field(init=False, repr=False, compare=False)
    _routes: dict[tuple[str, str], Route] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.sizes is None:
            object.__setattr__(self, "sizes", self.costs.size if isinstance(self.costs, StageCosts) else _nothing)
        if isinstance(self.costs, StageCosts):
            object.__setattr__(self, "costs", replace(self.costs, latency=0.0, bandwidth=inf))
        object.__setattr__(self, "_speeds", self.topology.speeds)
        object.__setattr__(self, "_routes", {})

    def __call__(self, task: Task) -> float:
        """The virtual seconds of ``task``; a copy takes none here, since its message is timed by its link."""
        if task.kind is TaskKind.COPY:
            return 0.0
        if (speed := self._speeds.get(task.lane.device)) is None:
            raise self.topology.unknown(task.lane.device)
        return self.costs(task) / speed

    def route(self, source: str, target: str) -> Route:
        """``Topology.route``, remembered."""
        found = self._routes.get((source, target))
        if found is None:
            found = self._routes[source, target] = self.topology.route(source, target)
        return found

    def size(self, task: Task) -> float:
        """The bytes of each message that ``task`` waits for."""
        assert self.sizes is not None
        return self.sizes(task)


def _nothing(task: Task) -> float:
    return 0.0


def _names(what: str, value: Any) -> tuple[str, ...]:
    """``value`` as a tuple; raises ``TopologyError`` unless it is one or more different names."""
    names = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
        raise TopologyError(f"{what} must be a list of different names, got {value!r}")
    return names
