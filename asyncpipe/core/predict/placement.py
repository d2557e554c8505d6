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
"""Of more hosts, the caller chooses the order."""


def best_host_order(topology: Topology, size: float) -> Topology:
    """The topology with its hosts in the order in which a message of ``size`` bytes passes all of them soonest.

    If the order given is as good as any, it stays. So does that of more than ten hosts, whose sets are too many.
    """
    names = [host.name for host in topology.hosts]
    if len(names) > MOST_EXACT:
        return topology
    seconds = [[0.0 if a == b else topology.between(a, b).seconds(size) for b in names] for a in names]
    given = list(range(len(names)))
    found = _shortest_path(seconds)
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
