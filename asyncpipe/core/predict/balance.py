"""Split a sequence of layers into stages of even cost.

A pipeline is as fast as its dearest stage, so that one is made as cheap as can be. Many splits do that, and some of
them starve another stage for nothing. This picks one where no two stages are further apart than one layer can put
them, which is always possible: the theorem of Bárány and Grinberg. Its proof is a local search. While a stage is
too cheap, it takes the next layer on the side of the dearest one::

    layers     2  5  │  1  │  5  2        stages cost 7, 1, 7: 6 apart, more than the dearest layer, 5
                     ◀                    the second takes a layer from the first
    layers     2  │  5  1  │  5  2        stages cost 2, 6, 7: 5 apart, and no split has a dearest below 7
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import inf, lcm

from asyncpipe.errors import BalanceError

__all__ = ["check_balance", "even_balance"]


def even_balance(costs: Sequence[float], stages: int) -> list[int]:
    """How many consecutive layers each of ``stages`` stages gets, at least one each.

    ``costs`` are those of the layers, in any unit, zero or more. Three things hold, exactly, for floats too:

    - the dearest stage is as cheap as in any split into that many stages;
    - no two stages differ in cost by more than the dearest layer costs;
    - no border can be put elsewhere so that the dearer one of the two stages at it gets cheaper.

    The same costs always give the same split. The first comes from a search for the least cost that holds every
    stage, the second from the local search in the proof of I. Bárány and V. S. Grinberg, Block partitions of
    sequences, Israel Journal of Mathematics 206 (2015), the third from moving borders while it does not hold.
    O(layers · stages) to begin with, then at most layers · stages² moves of the local search in O(stages) each,
    of which mostly there are none or a few, and as many sweeps over the borders as the last part takes. Raises
    ``BalanceError`` for fewer layers than stages, and for a cost that is negative, infinite or not a number.
    """
    layers = len(costs)
    if isinstance(stages, bool) or not isinstance(stages, int) or not 1 <= stages <= layers:
        raise BalanceError(f"cannot split {layers} layers into {stages} stages; give at most as many stages as layers")
    prefix = [0]
    for cost in _exact(costs):
        prefix.append(prefix[-1] + cost)
    borders = _near_even(prefix, stages, _least_limit(prefix, stages))
    _even_out(prefix, borders)
    _centre(prefix, borders)
    return [end - start for start, end in pairwise(borders)]


def _exact(costs: Sequence[float]) -> list[int]:
    """The costs in a unit of which all of them are multiples: sums of floats would round, sums of these do not."""
    for layer, cost in enumerate(costs):
        if not 0 <= cost < inf:
            raise BalanceError(f"layer {layer} costs {cost}; a cost must be a finite number, zero or more")
    ratios = [cost.as_integer_ratio() for cost in costs]
    unit = lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _least_limit(prefix: Sequence[int], stages: int) -> int:
    """The cost of the dearest stage in the best split, found by halving the range that it must be in.

    It is no less than the mean and than the dearest layer; by the theorem it is no more than the two together.
    """

    def fits(limit: int) -> bool:
        border = 0
        for _ in range(stages):
            border = _furthest_end(prefix, border, limit)
        return border == len(prefix) - 1

    dearest = _dearest_layer(prefix)
    mean = -(-prefix[-1] // stages)
    low, high = max(mean, dearest), mean + dearest
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _near_even(prefix: Sequence[int], stages: int, limit: int) -> list[int]:
    """Borders of stages that have a layer each and cost ``limit`` at most, as near to even as that allows.

    ``limit`` must be one that a split can keep. Where costs do not tell two borders apart (a layer may cost
    nothing), numbers of layers do, and where those do not, the earlier stage gets more.
    """
    layers = len(prefix) - 1
    # Where the stages that are left must begin at the earliest to hold all that is left: the last one first.
    earliest = [layers]
    for _ in range(stages - 1):
        earliest.append(bisect_left(prefix, prefix[earliest[-1]] - limit))
    borders = [0]
    for k in range(1, stages):

        def uneven(border: int, k: int = k) -> tuple[int, int, int]:
            return abs(stages * prefix[border] - k * prefix[-1]), abs(stages * border - k * layers), -border

        first = max(earliest[stages - k], borders[-1] + 1)
        last = min(_furthest_end(prefix, borders[-1], limit), layers - (stages - k))
        borders.append(min(range(first, last + 1), key=uneven))
    return [*borders, layers]


def _even_out(prefix: Sequence[int], borders: list[int]) -> None:
    """Move ``borders`` until no two stages differ by more than the dearest layer; none gets dearer than the dearest.

    The cheapest stage takes the next layer on the side of the dearest. A stage that had no other layer takes one
    itself in the same way; the dearest has more than one, or it could not be that much dearer. Why this ends:
    whoever takes stays cheaper than the dearest was, and each border moves towards the dearest, until the dearest
    gives a layer away. So stages of the highest cost get fewer, but one is left: no split does without.
    """
    dearest_layer = _dearest_layer(prefix)
    while True:
        costs = [prefix[end] - prefix[start] for start, end in pairwise(borders)]
        dearest, cheapest = costs.index(max(costs)), costs.index(min(costs))
        if costs[dearest] - costs[cheapest] <= dearest_layer:
            return
        step, border = (-1, cheapest) if dearest < cheapest else (1, cheapest + 1)
        borders[border] += step
        while borders[border] == borders[border + step]:
            border += step
            borders[border] += step


def _centre(prefix: Sequence[int], borders: list[int]) -> None:
    """Move each of ``borders`` to the middle between its neighbours, until none can make its two stages more even.

    Two stages share a fixed cost, so the dearer gets cheaper by what the cheaper gets dearer: the dearest of all
    gets no dearer, the cheapest no cheaper. It ends, since each move lowers the sum of the squares of the costs.
    """
    moved = True
    while moved:
        moved = False
        for k in range(1, len(borders) - 1):
            before, after = borders[k - 1], borders[k + 1]

            def dearer(border: int, start: int = prefix[before], end: int = prefix[after]) -> int:
                return max(prefix[border] - start, end - prefix[border])

            middle = bisect_left(prefix, (prefix[before] + prefix[after] + 1) // 2, before + 1, after - 1)
            best = min(middle, max(middle - 1, before + 1), key=dearer)
            if dearer(best) < dearer(borders[k]):
                borders[k] = best
                moved = True


def _furthest_end(prefix: Sequence[int], start: int, limit: int) -> int:
    """The last border at which a stage may end that starts at border ``start`` and costs ``limit`` at most."""
    return bisect_right(prefix, prefix[start] + limit) - 1


def _dearest_layer(prefix: Sequence[int]) -> int:
    return max(end - start for start, end in pairwise(prefix))


def check_balance(balance: Sequence[int], layers: int) -> list[int]:
    """``balance`` if it splits ``layers`` layers; raises ``BalanceError`` that says what is off."""
    sizes = list(balance)
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise BalanceError(f"balance must be a list of positive integers, one a stage, got {sizes}")
    if sum(sizes) != layers:
        raise BalanceError(
            f"balance {sizes} sums up to {sum(sizes)}, but the model has {layers} layers; it must sum up to {layers}"
        )
    return sizes
