"""Where the stages of a pipeline go on a topology: the order of its hosts.

Stages that follow each other go to devices that follow each other, host by host, so each host is entered and left once,
and of the links between hosts one fewer is crossed than there are hosts. Which ones these are follows from the order of
the hosts: the one in which a message takes the least time to pass them all. Faster devices get more layers
(``balance.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from asyncpipe.core.predict.topology import Topology

__all__ = ["best_host_order"]

MOST_EXACT = 10
"""Up to so many hosts every order is considered."""


def best_host_order(topology: Topology, size: float) -> Topology:
    """The topology with its hosts in the order in which a message of ``size`` bytes passes all of them soonest.

    Exact for up to ten hosts (shortest path over sets of hosts); of more, the nearest next host from each possible
    first one, and then turns of parts for as long as they help. Of equal orders the first one found stays, which is the
    one given if that is among them.
    """
    names = [host.name for host in topology.hosts]
    seconds = [[0.0 if a == b else topology.between(a, b).seconds(size) for b in names] for a in names]
    given = list(range(len(names)))
    found = _shortest_path(seconds) if len(names) <= MOST_EXACT else _short_path(seconds)
    order = found if _length(found, seconds) < _length(given, seconds) * (1 - 1e-12) else given
    return topology.ordered(names[k] for k in order)


def _length(order: Sequence[int], seconds: Sequence[Sequence[float]]) -> float:
    return sum(seconds[a][b] for a, b in pairwise(order))


def _shortest_path(seconds: Sequence[Sequence[float]]) -> list[int]:
    """Held and Karp (1962): the best path through each set of hosts, by its last one."""
    count = len(seconds)
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(1 << k, k): (0.0, [k]) for k in range(count)}
    for size in range(1, count):
        for (members, last), (length, path) in [item for item in best.items() if item[0][0].bit_count() == size]:
            for k in range(count):
                if not members >> k & 1:
                    longer = length + seconds[last][k], [*path, k]
                    key = members | 1 << k, k
                    if key not in best or longer < best[key]:
                        best[key] = longer
    return min(found for (members, _), found in best.items() if members == (1 << count) - 1)[1]


def _short_path(seconds: Sequence[Sequence[float]]) -> list[int]:
    paths = [_nearest(first, seconds) for first in range(len(seconds))]
    order = min(paths, key=lambda path: _length(path, seconds))
    count, turned = len(order), True
    while turned:
        turned = False
        for start in range(count - 1):
            for end in range(start + 2, count + 1):
                before = seconds[order[start - 1]][order[start]] if start else 0.0
                after = seconds[order[end - 1]][order[end]] if end < count else 0.0
                new_before = seconds[order[start - 1]][order[end - 1]] if start else 0.0
                new_after = seconds[order[start]][order[end]] if end < count else 0.0
                if new_before + new_after < (before + after) * (1 - 1e-12):
                    order[start:end] = order[start:end][::-1]
                    turned = True
    return order


def _nearest(first: int, seconds: Sequence[Sequence[float]]) -> list[int]:
    path, left = [first], set(range(len(seconds))) - {first}
    while left:
        path.append(min(left, key=lambda k: (seconds[path[-1]][k], k)))
        left.remove(path[-1])
    return path
