"""Split a sequence of layers into stages, so that the slowest stage is as quick as it can be.

A pipeline is as fast as its slowest stage. Of the many splits with the same slowest stage, the one with the most even
stages fills the least memory and leaves the smallest bubbles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from asyncpipe.errors import BalanceError

__all__ = ["balance_by_speed", "check_balance", "even_balance"]


def even_balance(costs: Sequence[float], stages: int) -> list[int]:
    """How many consecutive layers each of ``stages`` stages gets, at least one each; see ``balance_by_speed``."""
    if isinstance(stages, bool) or not isinstance(stages, int):
        raise BalanceError(f"the number of stages must be an integer, got {stages!r}")
    return balance_by_speed(costs, [1.0] * stages)


def balance_by_speed(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """How many consecutive layers each stage gets, where stage k runs at ``speeds[k]``: at least one each.

    ``costs`` are those of the layers, in any unit, zero or more. The slowest stage is as quick as in any other split.
    Of several starts of a stage that agree in this, the one with the least sum of squared times so far is chosen, and
    of equal ones the latest. The same costs always give the same split.

    Dynamic programming over (stage, last layer), in O(stages · layers²) at most. Raises ``BalanceError`` for fewer
    layers than stages, and for a cost that is negative, infinite or NaN.
    """
    layers, stages = len(costs), len(speeds)
    if not 1 <= stages <= layers:
        raise BalanceError(f"cannot split {layers} layers into {stages} stages; give at most as many stages as layers")
    for layer, cost in enumerate(costs):
        if not 0 <= cost < inf:
            raise BalanceError(f"layer {layer} costs {cost}; a cost must be a finite number, zero or more")
    prefix = [0.0, *accumulate(costs)]
    slowest, squares = [0.0] + [inf] * layers, [0.0] + [inf] * layers
    """By border: the time of the slowest of the stages before it, and the sum of their squared times."""
    starts: list[list[int]] = []
    """By stage and its end: where it begins, then."""
    for stage, speed in enumerate(speeds):
        best, least, chosen = [inf] * (layers + 1), [inf] * (layers + 1), [0] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                own = (prefix[end] - prefix[start]) / speed
                if own > best[end]:
                    break  # An earlier start makes this stage slower still.
                time, square = max(own, slowest[start]), squares[start] + own * own
                if (time, square) < (best[end], least[end]):
                    best[end], least[end], chosen[end] = time, square, start
        slowest, squares = best, least
        starts.append(chosen)
    borders = [layers]
    for chosen in reversed(starts):
        borders.append(chosen[borders[-1]])
    return [end - start for start, end in pairwise(reversed(borders))]


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
