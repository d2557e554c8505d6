"""Where a job's devices are: a pure choice among those that it can have now, and a sentence that says why.

::

    any 2        cuda:0 ■  cuda:1 □  cuda:2 □  cuda:3 ■      ─▶ cuda:1, cuda:2: both are free, and neighbours
    any 2        cuda:0 □  cuda:1 ■  cuda:2 □  cuda:3 □      ─▶ cuda:2, cuda:3: neighbours before the first ones
    any 2        a: □ □ □ □          b: ■ ■ □ □              ─▶ on b, which leaves a whole for a job that wants more

First as few devices as possible that other jobs use; then few hosts; then neighbours; then the host that has the fewest
others left; then those with the least load. Among equal choices the first in the service's order is taken, so the same
question always has the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TypeAlias

from asyncpipe.core.hosts import DeviceName, host_of
from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.service.job_states import DeviceRequest

__all__ = ["Apart", "index_apart", "place", "why_there"]

Apart: TypeAlias = Callable[[str, str], float]
"""How far two devices of a host are from each other: 1 for neighbours. A topology can say it better than names."""


def index_apart(one: str, other: str) -> float:
    """How far two devices of a host are apart by their numbers, which is all that their names say."""
    return abs(_index(one) - _index(other))


@cache
def _index(name: str) -> int:
    return int(DeviceName.parse(name).physical.partition(":")[2] or 0)


def place(
    request: DeviceRequest, usable: Sequence[str], load: Mapping[str, float], apart: Apart = index_apart
) -> tuple[str, ...] | None:
    """The devices for ``request``, of those that are ``usable``, in their order; ``None`` if they are not enough.

    ``load`` is what other jobs want of each device; a device that it does not have is free. A device is listed once for
    each time that a job may have it.
    """
    if not request.fits(usable):
        return None
    if request.names:
        return request.names
    free = [device for device in usable if not load.get(device)]
    among = free if request.fits(free) else list(usable)

    def worse(choice: _Choice) -> tuple[int, int, float, int, float, list[int]]:
        chosen, left = choice
        names = [among[at] for at in chosen]
        used = [load.get(name, 0.0) for name in names]
        far = sum(apart(*pair) for pair in pairwise(names) if host_of(pair[0]) == host_of(pair[1]))
        return sum(map(bool, used)), len(set(map(host_of, names))), far, left, sum(used), chosen

    best, _ = min(_choices(request, among, load, apart), key=worse)
    return tuple(among[at] for at in best)


_Choice: TypeAlias = tuple[list[int], int]
"""Positions among the devices, and how many others their host has left."""


def _choices(
    request: DeviceRequest, among: Sequence[str], load: Mapping[str, float], apart: Apart
) -> Iterator[_Choice]:
    """The choices that are worth to be compared."""
    hosts: dict[str, list[int]] = {}
    for at, device in enumerate(among):
        hosts.setdefault(host_of(device), []).append(at)
    used = [load.get(device, 0.0) for device in among]
    for here in hosts.values():
        if len(here) >= request.count:
            for first in here:
                order = sorted((used[at] > 0, apart(among[first], among[at]), used[at], at) for at in here)
                yield sorted(at for *_, at in order[: request.count]), len(here) - request.count
    # Over several hosts: the fullest ones whole, and of the others the smallest that has enough.
    chosen: list[int] = []
    rest = sorted(hosts.values(), key=len, reverse=True)
    while rest and len(chosen) < request.count:
        missing = request.count - len(chosen)
        here = rest.pop(max((n for n, each in enumerate(rest) if len(each) >= missing), default=0))
        chosen += sorted(here, key=lambda at: used[at])[:missing]
    yield sorted(chosen), 0


def why_there(devices: Sequence[str], load: Mapping[str, float], left: Mapping[str, int]) -> str:
    """Where a job has been placed, and why there; ``left`` are the bytes that jobs may still have of each device."""
    *others, last = devices
    names = f"{', '.join(others)} and {last}" if others else last
    is_free, hosts = not any(load.get(device) for device in devices), set(map(host_of, devices))
    near = bool(others) and len(hosts) == 1 and all(index_apart(*pair) <= 1 for pair in pairwise(devices))
    text = f"on {names}: {'free' if is_free else 'the least loaded'}" + " neighbours" * near
    text += f", on {len(hosts)} hosts" * (len(hosts) > 1)
    known = [left[device] for device in devices if device in left]
    return text + (f", {format_bytes(min(known))} left" + " on each" * bool(others) if known else "")
