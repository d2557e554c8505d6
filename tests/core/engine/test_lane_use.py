"""The account of how long others had a lane: its totals, who is counted, and its bound."""

from __future__ import annotations

from asyncpipe.core.engine.lane_use import MOST_POINTS, LaneUse, spans_taken
from asyncpipe.core.policies.jobs import JobAccount
from asyncpipe.core.policies.share import Share


def account(name: str) -> JobAccount:
    return JobAccount(name, True, Share(name))


A, B = account("a"), account("b")


def test_a_lane_that_is_kept_empty_is_taken_from_those_that_are_ready() -> None:
    lane = LaneUse()
    lane.begin(A, 0.0)
    lane.begin(B, 0.0)
    lane.keep([A], 1.0)
    lane.keep([A], 2.0)
    lane.keep([A, B], 3.0)
    lane.handed_over(4.0, is_first=True)
    assert lane.taken(A) == ((0.0, 0.0), (1.0, 0.0), (3.0, 2.0), (4.0, 3.0))
    assert lane.taken(B) == ((0.0, 0.0), (3.0, 0.0), (4.0, 1.0))
    lane.keep([], 5.0)
    lane.handed_over(6.0, is_first=True)
    assert lane.taken(B)[-1] == (4.0, 1.0)


def test_nothing_is_counted_twice_and_a_free_lane_is_nobodys() -> None:
    lane = LaneUse()
    lane.begin(A, 0.0)
    lane.handed_over(1.0, is_first=True)
    lane.ended(B, 3.0)
    lane.handed_over(2.5, is_first=True)  # The clocks of devices and of the scheduler differ a little.
    lane.ended(B, 3.5)
    lane.handed_over(4.0, is_first=True)
    lane.ended(B, 5.0)
    assert lane.taken(A)[-1] == (5.0, 3.5)
    assert spans_taken(lane.taken(A), 0.0, 10.0) == [(1.0, 3.5), (4.0, 5.0)]
    assert spans_taken(lane.taken(A), 2.0, 4.5) == [(2.0, 3.5), (4.0, 4.5)]


def test_an_account_is_bounded_and_keeps_its_total() -> None:
    lane = LaneUse()
    lane.begin(A, 0.0)
    for task in range(10 * MOST_POINTS):
        lane.handed_over(float(task), is_first=True)
        lane.ended(B, task + 0.75)
    taken = lane.taken(A)
    assert len(taken) <= MOST_POINTS
    assert taken[-1][1] == 0.75 * 10 * MOST_POINTS
    assert [taken[0][0], taken[-1][0]] == [0.0, 10 * MOST_POINTS - 0.25]
