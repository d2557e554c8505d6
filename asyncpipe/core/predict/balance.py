"""Split a sequence of layers into stages of even cost.

A pipeline is as fast as its most expensive stage, so that stage is made as cheap as possible. Of the many splits that
do so, this chooses one where no two stages differ by more than the most expensive layer. By the theorem of Bárány and
Grinberg such a split always exists. Its proof is a local search: while a stage is too cheap, it takes the next layer on
the side of the most expensive stage::

    layers     2  5  │  1  │  5  2        stages cost 7, 1, 7: a difference of 6, the largest layer costs 5
                     ◀                    the second stage takes a layer from the first
    layers     2  │  5  1  │  5  2        stages cost 2, 6, 7: a difference of 5; every split has a stage of 7 or more
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

    ``costs`` are those of the layers, in any unit, zero or more. The result has three properties, exactly, also for
    floats:

    1. the most expensive stage is as cheap as in any split into that many stages;
    2. no two stages differ by more than the cost of the most expensive layer;
    3. moving one border cannot make the more expensive of its two stages cheaper.

    The same costs always give the same split. The first property comes from a search for the least limit that all
    stages can keep, the second from the local search in the proof of I. Bárány and V. S. Grinberg, Block partitions of
    sequences, Israel Journal of Mathematics 206 (2015), the third from moving borders until it holds. The first part
    takes O(layers · stages); the local search at most layers · stages² moves of O(stages), in practice few or none; the
    last part as many sweeps over the borders as it needs. Raises ``BalanceError`` for fewer layers than stages, and for
    a cost that is negative, infinite or NaN.
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
    """The costs as integers, in a unit that divides all of them, so that sums are exact."""
    for layer, cost in enumerate(costs):
        if not 0 <= cost < inf:
            raise BalanceError(f"layer {layer} costs {cost}; a cost must be a finite number, zero or more")
    ratios = [cost.as_integer_ratio() for cost in costs]
    unit = lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _least_limit(prefix: Sequence[int], stages: int) -> int:
    """The cost of the most expensive stage in the best split, by binary search.

    It is at least the mean and at least the most expensive layer; by the theorem it is at most their sum.
    """

    def fits(limit: int) -> bool:
        border = 0
        for _ in range(stages):
            border = _furthest_end(prefix, border, limit)
        return border == len(prefix) - 1

    largest = _largest_layer(prefix)
    mean = -(-prefix[-1] // stages)
    low, high = max(mean, largest), mean + largest
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _near_even(prefix: Sequence[int], stages: int, limit: int) -> list[int]:
    """Borders of stages that have at least one layer and cost at most ``limit``, each as near to even as possible.

    ``limit`` must be feasible. Between borders of equal costs (a layer may cost nothing) the numbers of layers decide;
    if they are equal too, the earlier stage gets more.
    """
    layers = len(prefix) - 1
    # The earliest border after which the last stage, the last two stages … can hold all remaining layers.
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
    """Move ``borders`` until no two stages differ by more than the most expensive layer. The maximum does not grow.

    The cheapest stage takes the next layer on the side of the most expensive stage. A stage left without layers takes
    one in the same way; the most expensive stage has more than one, or it would not cost that much more. This
    terminates: a stage that takes a layer stays cheaper than the maximum, and borders only move towards the most
    expensive stage, until that one gives a layer away. So the number of stages of maximal cost decreases, and one
    remains, since no split has a lower maximum.
    """
    largest_layer = _largest_layer(prefix)
    while True:
        costs = [prefix[end] - prefix[start] for start, end in pairwise(borders)]
        largest, smallest = costs.index(max(costs)), costs.index(min(costs))
        if costs[largest] - costs[smallest] <= largest_layer:
            return
        step, border = (-1, smallest) if largest < smallest else (1, smallest + 1)
        borders[border] += step
        while borders[border] == borders[border + step]:
            border += step
            borders[border] += step


def _centre(prefix: Sequence[int], borders: list[int]) -> None:
    """Move each of ``borders`` to the middle between its neighbours, until no move makes its two stages more even.

    A move keeps the sum of the two stages, so the maximum of all stages does not grow and the minimum does not shrink.
    This terminates, because each move lowers the sum of the squares of the costs.
    """
    moved = True
    while moved:
        moved = False
        for k in range(1, len(borders) - 1):
            before, after = borders[k - 1], borders[k + 1]

            def larger(border: int, start: int = prefix[before], end: int = prefix[after]) -> int:
                return max(prefix[border] - start, end - prefix[border])

            middle = bisect_left(prefix, (prefix[before] + prefix[after] + 1) // 2, before + 1, after - 1)
            best = min(middle, max(middle - 1, before + 1), key=larger)
            if larger(best) < larger(borders[k]):
                borders[k] = best
                moved = True


def _furthest_end(prefix: Sequence[int], start: int, limit: int) -> int:
    """The last border at which a stage of cost ``limit`` at most may end if it starts at border ``start``."""
    return bisect_right(prefix, prefix[start] + limit) - 1


def _largest_layer(prefix: Sequence[int]) -> int:
    return max(end - start for start, end in pairwise(prefix))


def check_balance(balance: Sequence[int], layers: int) -> list[int]:
    """``balance`` as a list; raises ``BalanceError`` unless it splits ``layers`` layers."""
    sizes = list(balance)
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise BalanceError(f"balance must be a list of positive integers, one a stage, got {sizes}")
    if sum(sizes) != layers:
        raise BalanceError(
            f"balance {sizes} sums up to {sum(sizes)}, but the model has {layers} layers; it must sum up to {layers}"
        )
    return sizes
