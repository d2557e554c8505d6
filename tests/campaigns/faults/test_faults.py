"""The short form of the campaign of faults, and that it sees what it is to see."""

from __future__ import annotations

import pytest

from asyncpipe.ops.execute import compute
from tests.campaigns.faults.campaign import Case, run_campaign, run_case


def test_steps_after_random_faults_are_right(no_leaks):
    counts = run_campaign(7, 24)
    assert sum(counts.values()) == 24
    assert sum(count for what, count in counts.items() if not what.endswith("right")) > 12


def test_a_lost_gradient_is_seen(monkeypatch):
    backward = compute.StageCompute.backward

    def forgetful(self, task):
        backward(self, task)
        self.stages[0].module.layers[0].bias.grad = None

    monkeypatch.setattr(compute.StageCompute, "backward", forgetful)
    with pytest.raises(AssertionError):
        run_case(Case(1, "step", "1f1b", "never", 2, 2, "error", 3))
