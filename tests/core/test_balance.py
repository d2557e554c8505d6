"""Balance: even_balance against every possible split, and what check_balance says of bad ones."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.core.balance import check_balance, even_balance
from asyncpipe.errors import BalanceError


def dearest(costs: list[int], sizes: list[int]) -> int:
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return max(sum(costs[start:end]) for start, end in pairwise(ends))


def every_split(layers: int, stages: int) -> list[list[int]]:
    return [
        [end - start for start, end in pairwise((0, *borders, layers))]
        for borders in combinations(range(1, layers), stages - 1)
    ]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_dearest_stage_is_as_cheap_as_can_be(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
    stages = data.draw(st.integers(1, len(costs)))
    sizes = even_balance(costs, stages)
    assert check_balance(sizes, len(costs)) == sizes
    assert len(sizes) == stages
    assert dearest(costs, sizes) == min(dearest(costs, split) for split in every_split(len(costs), stages))


@pytest.mark.parametrize(
    ("costs", "stages", "sizes"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 9], 2, [3, 1]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([4, 3, 2, 6, 7], 3, [2, 2, 1]),
        ([0.5, 0.25, 0.25], 2, [1, 2]),
        ([7], 1, [1]),
        ([5, 5, 5], 3, [1, 1, 1]),
    ],
)
def test_splits_by_hand(costs: list[float], stages: int, sizes: list[int]) -> None:
    assert even_balance(costs, stages) == sizes


def test_no_stage_is_empty_even_where_layers_cost_nothing() -> None:
    sizes = even_balance([0, 0, 0, 0, 1], 4)
    assert min(sizes) > 0
    assert sum(sizes) == 5


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_as_many_stages_as_layers_at_most(stages: int) -> None:
    with pytest.raises(BalanceError, match=f"cannot split 3 layers into {stages} stages; give at most as many stages"):
        even_balance([1, 1, 1], stages)


@pytest.mark.parametrize("balance", [[], [0, 3], [-1, 4], [1.0, 2], [True, 2], ["1", 2], [None]])
def test_sizes_are_positive_integers(balance: list[int]) -> None:
    with pytest.raises(BalanceError) as raised:
        check_balance(balance, 3)
    assert str(raised.value) == f"balance must be a list of positive integers, one a stage, got {balance}"


@pytest.mark.parametrize("balance", [[1, 1], [2, 2], [4]])
def test_sizes_sum_up_to_the_layers(balance: list[int]) -> None:
    with pytest.raises(BalanceError) as raised:
        check_balance(balance, 3)
    message = f"balance {balance} sums up to {sum(balance)}, but the model has 3 layers; it must sum up to 3"
    assert str(raised.value) == message


def test_any_sequence_is_a_balance() -> None:
    assert check_balance((1, 2), 3) == [1, 2]
