"""Split a sequence of layers into stages of even cost."""

from __future__ import annotations

from collections.abc import Sequence

from asyncpipe.errors import BalanceError

__all__ = ["check_balance", "even_balance"]


def even_balance(costs: Sequence[float], stages: int) -> list[int]:
    """How many consecutive layers each of ``stages`` stages gets, so that the dearest stage is as cheap as can be.

    ``costs`` are those of the layers, in any unit, not negative. Exact, by dynamic programming over prefixes in
    O(layers² · stages). Raises ``BalanceError`` if there are fewer layers than stages.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise BalanceError(f"cannot split {layers} layers into {stages} stages; give at most as many stages as layers")
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # best[n]: (dearest stage, start of the last stage) when the first n layers make k stages.
    best = [(prefix[n], 0) for n in range(layers + 1)]
    starts: list[list[int]] = [[0] * (layers + 1)]
    for k in range(2, stages + 1):
        previous, best = best, [(float("inf"), 0)] * (layers + 1)
        for n in range(k, layers + 1):
            best[n] = min((max(previous[s][0], prefix[n] - prefix[s]), s) for s in range(k - 1, n))
        starts.append([start for _, start in best])
    sizes, end = [], layers
    for row in reversed(starts):
        sizes.append(end - row[end])
        end = row[end]
    return sizes[::-1]


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
