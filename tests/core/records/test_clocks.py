"""Shifts of clocks: within their errors, so that nothing arrives before it left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.core.records.clocks import EdgePassage, agreed_shifts

WORKERS = ("a", "b", "c", "d")
TINY = 1e-8
"""Of the arithmetic."""


@st.composite
def observed(draw: st.DrawFn) -> tuple[dict[str, float], dict[str, float], list[EdgePassage]]:
    """Errors, what clocks are really off, and messages whose true times are in order."""
    errors = {worker: draw(st.floats(0, 1)) for worker in WORKERS}
    off = {worker: draw(st.floats(-1, 1)) * error for worker, error in errors.items()}
    crossings = []
    for _ in range(draw(st.integers(0, 12))):
        sender, receiver = draw(st.permutations(WORKERS))[:2]
        left = draw(st.floats(0, 10))
        arrived = left + draw(st.floats(0, 0.5))
        crossings.append(EdgePassage(sender, left + off[sender], receiver, arrived + off[receiver]))
    return errors, off, crossings


@given(observed())
def test_nothing_arrives_before_it_left_and_times_are_as_exact_as_they_were_said_to_be(
    case: tuple[dict[str, float], dict[str, float], list[EdgePassage]],
) -> None:
    errors, off, crossings = case
    shifts = agreed_shifts(errors, crossings)
    for each in crossings:
        assert each.arrived + shifts[each.receiver] >= each.left + shifts[each.sender] - TINY
    for worker, error in errors.items():
        assert abs(shifts[worker]) <= error + TINY
        assert abs(shifts[worker] + off[worker]) <= error + TINY
    true = [EdgePassage(s, left - off[s], r, arrived - off[r]) for s, left, r, arrived in crossings]
    if not any(each.arrived < each.left for each in true):
        assert agreed_shifts(errors, true) == dict.fromkeys(WORKERS, 0.0), "times that agree stay as they are"


def test_a_clock_that_nobody_has_asked_yet_moves_no_more_than_it_must() -> None:
    shifts = agreed_shifts({"a": 0.0, "b": float("inf")}, [EdgePassage("a", 1.0, "b", 0.9)])
    assert shifts == {"a": 0.0, "b": pytest.approx(0.1)}


def test_messages_that_no_shifts_explain() -> None:
    crossings = [EdgePassage("a", 1.0, "b", 0.9), EdgePassage("b", 2.0, "a", 1.9)]
    assert agreed_shifts({"a": 1.0, "b": 1.0}, crossings) == {"a": 0.0, "b": 0.0}
