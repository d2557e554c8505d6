"""Balance: the slowest stage against every split, evenness behind it, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.core.predict.balance import balance_by_speed, check_balance, even_balance
from asyncpipe.errors import BalanceError


def times(costs: Sequence[float], sizes: Sequence[int], speeds: Sequence[float]) -> list[float]:
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return [sum(costs[a:b]) / speed for (a, b), speed in zip(pairwise(ends), speeds, strict=True)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=7),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=4),
)
def test_no_split_has_a_quicker_slowest_stage(costs: list[int], speeds: list[float]) -> None:
    stages = len(speeds)
    if stages > len(costs):
        with pytest.raises(BalanceError, match="cannot split"):
            balance_by_speed(costs, speeds)
        return
    borders = ((0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1))
    least = min(max(times(costs, [b - a for a, b in pairwise(ends)], speeds)) for ends in borders)
    found = balance_by_speed(costs, speeds)
    assert check_balance(found, len(costs)) == found
    assert max(times(costs, found, speeds)) == pytest.approx(least)
    assert balance_by_speed(costs, speeds) == found


@pytest.mark.parametrize(
    ("costs", "stages", "sizes"),
    [
        ([4, 3, 2, 6, 7], 3, [2, 2, 1]),
        ([1, 1, 1], 2, [2, 1]),
        # The first and the last are the slowest in any case; the others are as even as can be.
        ([10, 1, 1, 1, 1, 1, 1], 3, [1, 3, 3]),
        ([1, 1, 1, 1, 1, 1, 10], 3, [3, 3, 1]),
    ],
)
def test_splits_by_hand(costs: list[float], stages: int, sizes: list[int]) -> None:
    assert even_balance(costs, stages) == sizes


@pytest.mark.parametrize("cost", [-1, -1e-300, nan, inf, -inf])
def test_a_cost_is_a_finite_number_that_is_not_negative(cost: float) -> None:
    with pytest.raises(BalanceError, match=f"layer 1 costs {cost}; a cost must be a finite number, zero or more"):
        even_balance([1.0, cost, 2.0], 2)


@pytest.mark.parametrize("stages", [0, -1, 4, 1.5, True])
def test_as_many_stages_as_layers_at_most(stages: int) -> None:
    with pytest.raises(BalanceError, match=r"cannot split 3 layers into|the number of stages must be an integer"):
        even_balance([1, 1, 1], stages)


@pytest.mark.parametrize("balance", [[], [0, 3], [-1, 4], [1.0, 2], [True, 2], ["1", 2], [None]])
def test_sizes_are_positive_integers(balance: list[int]) -> None:
    with pytest.raises(BalanceError) as raised:
        check_balance(balance, 3)
    assert str(raised.value) == f"balance must be a list of positive integers, one a stage, got {balance}"


@pytest.mark.parametrize("balance", [[1, 1], [2, 2], [4]])
def test_sizes_sum_up_to_the_layers(balance: list[int]) -> None:
    with pytest.raises(BalanceError, match="but the model has 3 layers; it must sum up to 3"):
        check_balance(balance, 3)
