"""Balance: even_balance against an exact dynamic programme and its three properties; the errors of check_balance."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from math import inf, nan

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncpipe.core.predict.balance import _even_out, check_balance, even_balance
from asyncpipe.errors import BalanceError


def stage_costs(costs: Sequence[float], sizes: Sequence[int]) -> list[Fraction]:
    """Exact: sums of floats depend on their order, and the promises are about sums."""
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return [sum(map(Fraction, costs[start:end]), Fraction(0)) for start, end in pairwise(ends)]


def least_dearest(costs: Sequence[float], stages: int) -> Fraction:
    """The highest cost of a stage in the best split into non-empty stages, by dynamic programming over prefixes."""
    prefix = [Fraction(0)]
    for cost in costs:
        prefix.append(prefix[-1] + Fraction(cost))
    best: dict[int, Fraction] = {n: prefix[n] for n in range(1, len(prefix))}
    for k in range(2, stages + 1):
        best = {
            n: min(max(best[start], prefix[n] - prefix[start]) for start in range(k - 1, n))
            for n in range(k, len(prefix))
        }
    return best[len(costs)]


def every_split(layers: int, stages: int) -> list[list[int]]:
    return [
        [end - start for start, end in pairwise((0, *borders, layers))]
        for borders in combinations(range(1, layers), stages - 1)
    ]


@st.composite
def layers_and_stages(draw: st.DrawFn, most_layers: int = 16) -> tuple[list[float], int]:
    """Costs that differ a little, or a lot, or are often zero; and a number of stages that they allow."""
    cost = draw(
        st.sampled_from(
            [
                st.integers(0, 20),
                st.sampled_from([0, 0, 1, 2, 3, 4, 5]),
                st.floats(0, 1),
                st.floats(0, 1e300),
            ]
        )
    )
    costs = draw(st.lists(cost, min_size=1, max_size=most_layers))
    return costs, draw(st.integers(1, len(costs)))


@settings(max_examples=60)
@given(layers_and_stages(most_layers=7))
def test_the_oracle_is_right(case: tuple[list[float], int]) -> None:
    costs, stages = case
    best = min(max(stage_costs(costs, split)) for split in every_split(len(costs), stages))
    assert least_dearest(costs, stages) == best


@settings(max_examples=300)
@given(layers_and_stages())
@example(([2, 5, 1, 5, 2], 3))
@example(([2, 4, 0, 1, 4, 1, 0, 0, 1], 3))
@example(([1, 4, 2, 4, 4, 0, 4, 1], 6))
@example(([2, 4, 4, 0, 0, 5, 1], 4))
@example(([0.1] * 10 + [0.3], 4))
def test_three_promises(case: tuple[list[float], int]) -> None:
    costs, stages = case
    sizes = even_balance(costs, stages)
    assert check_balance(sizes, len(costs)) == sizes
    assert len(sizes) == stages
    per_stage = stage_costs(costs, sizes)
    assert max(per_stage) == least_dearest(costs, stages)
    assert max(per_stage) - min(per_stage) <= Fraction(max(costs))
    for k in range(stages - 1):
        both = sizes[k] + sizes[k + 1]
        for first in range(1, both):
            moved = stage_costs(costs, [*sizes[:k], first, both - first, *sizes[k + 2 :]])
            assert max(moved[k : k + 2]) >= max(per_stage[k : k + 2])
    assert even_balance(costs, stages) == sizes


@st.composite
def any_start(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    costs = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 4, 5]), min_size=1, max_size=16))
    inner = draw(st.sets(st.integers(1, len(costs) - 1))) if len(costs) > 1 else set()
    return costs, [0, *sorted(inner), len(costs)]


@settings(max_examples=300)
@given(any_start())
@example(([0, 0, 3, 3], [0, 1, 2, 4]))
@example(([3, 3, 0, 0, 0], [0, 2, 3, 4, 5]))
def test_the_local_search_alone_evens_out_any_split(case: tuple[list[int], list[int]]) -> None:
    costs, borders = case
    before = stage_costs(costs, [end - start for start, end in pairwise(borders)])
    # Private: even_balance starts so near to even that the search of the proof rarely has anything to do.
    _even_out([0, *accumulate(costs)], borders)
    sizes = [end - start for start, end in pairwise(borders)]
    assert check_balance(sizes, len(costs)) == sizes
    after = stage_costs(costs, sizes)
    assert max(after) - min(after) <= max(costs)
    assert max(after) <= max(before)


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
        ([1, 1, 1], 2, [2, 1]),
        ([0, 0, 0, 0], 2, [2, 2]),
        ([0, 0, 0, 0, 0], 2, [3, 2]),
        ([5, 0, 0, 0, 0, 5], 2, [3, 3]),
        ([1, 1, 1, 1, 2, 6], 3, [3, 2, 1]),
    ],
)
def test_splits_by_hand(costs: list[float], stages: int, sizes: list[int]) -> None:
    assert even_balance(costs, stages) == sizes


@pytest.mark.parametrize(
    ("costs", "stages", "as_near_to_even_as_can_be", "sizes"),
    [
        ([2, 5, 1, 5, 2], 3, [2, 1, 2], [1, 2, 2]),
        # The cheapest takes the only layer of its neighbour, which takes one in turn, and so on up to the dearest.
        ([1, 4, 2, 4, 4, 0, 4, 1], 6, [2, 1, 1, 1, 1, 2], [1, 1, 1, 1, 2, 2]),
    ],
)
def test_a_starved_stage_takes_from_the_side_of_the_dearest(
    costs: list[float], stages: int, as_near_to_even_as_can_be: list[int], sizes: list[int]
) -> None:
    before, after = stage_costs(costs, as_near_to_even_as_can_be), stage_costs(costs, sizes)
    assert max(before) == max(after)
    assert max(before) - min(before) > max(costs) >= max(after) - min(after)
    assert even_balance(costs, stages) == sizes
    mirrored = stage_costs(costs[::-1], even_balance(costs[::-1], stages))
    assert max(mirrored) - min(mirrored) <= max(costs)


def test_no_stage_is_empty_even_where_layers_cost_nothing() -> None:
    sizes = even_balance([0, 0, 0, 0, 1], 4)
    assert min(sizes) > 0
    assert sum(sizes) == 5


def test_floats_are_summed_without_rounding() -> None:
    # As floats, 1e17 + 1 + … + 1 is 1e17, whatever the number of ones that a stage gets.
    assert even_balance([1e17, *[1.0] * 30, 1e17], 2) == [16, 16]
    assert even_balance([1.7e308] * 4, 2) == [2, 2]


def test_many_layers_into_many_stages() -> None:
    # Multiples of a number modulo a prime: irregular, and the same everywhere. The clock is the suite's own timeout.
    costs = [(k * 7919) % 1009 / 1009 for k in range(2000)]
    per_stage = stage_costs(costs, even_balance(costs, 64))
    assert max(per_stage) - min(per_stage) <= Fraction(max(costs))
    assert max(per_stage) <= sum(map(Fraction, costs)) / 64 + Fraction(max(costs))


@pytest.mark.parametrize("cost", [-1, -1e-300, nan, inf, -inf])
def test_a_cost_is_a_finite_number_that_is_not_negative(cost: float) -> None:
    with pytest.raises(BalanceError) as raised:
        even_balance([1.0, cost, 2.0], 2)
    assert str(raised.value) == f"layer 1 costs {cost}; a cost must be a finite number, zero or more"


@pytest.mark.parametrize("stages", [0, -1, 4, 1.5, True])
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
