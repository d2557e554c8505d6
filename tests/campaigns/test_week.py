"""The week of a team, in short: everybody has a turn, and the real queue is fairer than plain ones."""

from __future__ import annotations

from statistics import median

from tests.campaigns.week import POLICIES, Result, fair_shares, result_of, simulate, trace

DEVICES = [f"cuda:{number}" for number in range(8)]


def test_users_have_their_turns_in_a_short_week() -> None:
    asks = trace(1, 150, 10, DEVICES, 0.7)
    assert asks == trace(1, 150, 10, DEVICES, 0.7)
    found: dict[str, Result] = {}
    for name, make in POLICIES.items():
        at = simulate(asks, make(DEVICES))
        assert at == simulate(asks, make(DEVICES))
        assert all(at[each.job][0] >= each.at for each in asks)
        found[name] = result_of(asks, at, len(DEVICES))
    assert found["queue"].fairness > found["one user"].fairness > found["fifo"].fairness
    assert median(found["queue"].all) <= median(found["fifo"].all) <= median(found["names"].all)
    shares = fair_shares(asks, simulate(asks, POLICIES["queue"](DEVICES)), len(DEVICES))
    assert shares.keys() == {each.user for each in asks}
