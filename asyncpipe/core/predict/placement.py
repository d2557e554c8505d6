"""Where the stages of a pipeline go on a topology: the order of its hosts, and layers by the speed of devices.

Stages that follow each other go to devices that follow each other, host by host, so each host is entered and left once,
and of the links between hosts one fewer is crossed than there are hosts. Which ones these are follows from the order of
the hosts: the one in which a message takes the least time to pass them all. Faster devices get more layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from asyncpipe.core.predict.topology import Topology
from asyncpipe.errors import BalanceError

__all__ = ["balance_by_speed", "best_host_order"]

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


def balance_by_speed(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """How many consecutive layers each stage gets, where stage k runs at ``speeds[k]``: at least one each.

    The slowest stage is as quick as it can be; of equal balances the earlier stages get less. Takes
    O(stages · layers²), by dynamic programming. Raises ``BalanceError`` for fewer layers than stages.
    """
    layers, stages = len(costs), len(speeds)
    if not 1 <= stages <= layers:
        raise BalanceError(f"cannot split {layers} layers into {stages} stages; give at most as many stages as layers")
    prefix = [0.0, *accumulate(costs)]
    slowest = [0.0] + [inf] * layers
    """By border: the time of the slowest of the stages before it, at best."""
    starts: list[list[int]] = []
    """By stage and its end: where it begins, then."""
    for stage, speed in enumerate(speeds):
        after, chosen = [inf] * (layers + 1), [0] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                own = (prefix[end] - prefix[start]) / speed
                if own >= after[end]:
                    break  # What begins earlier takes longer still.
                if max(own, slowest[start]) <= after[end]:
                    after[end], chosen[end] = max(own, slowest[start]), start
        slowest = after
        starts.append(chosen)
    borders = [layers]
    for chosen in reversed(starts):
        borders.append(chosen[borders[-1]])
    return [end - start for start, end in pairwise(reversed(borders))]
