"""The short form of the campaign of faults, and that it sees what it is to see."""

from __future__ import annotations

import pytest

from asyncpipe.ops.execute import compute
from tests.campaigns.faults.campaign import CAMPAIGN, Case, run_case
from tests.campaigns.harness import in_short


@pytest.mark.promise(
    "A step that fails",
    "A step that fails at a random task leaves the gradients as they were, and the next step is right.",
)
def test_steps_after_random_faults_are_right(no_leaks):
    report = in_short(CAMPAIGN, seed=7, cases=24, here=True)
    counts = report.counts["outcome"]
    assert not report.findings, report
    assert counts.total() == 24
    assert sum(count for what, count in counts.items() if not what.endswith("right")) > 12


def test_a_lost_gradient_is_seen(monkeypatch):
    backward = compute.StageCompute.backward

    def forgetful(self, task):
        backward(self, task)
        self.stages[0].module.layers[0].bias.grad = None

    monkeypatch.setattr(compute.StageCompute, "backward", forgetful)
    with pytest.raises(AssertionError):
        run_case(Case(1, "step", "1f1b", "never", 2, 2, "error", 3))
