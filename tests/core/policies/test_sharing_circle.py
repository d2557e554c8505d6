"""Jobs that wait for one another on different lanes go on, whatever they expect of each other."""

from __future__ import annotations

import pytest

from asyncpipe.core.graph.lower import CheckpointMode, lower
from asyncpipe.core.policies import fair_share
from asyncpipe.core.policies.share import Share
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.simulate import SimulatedJob, simulate_jobs
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule

DEVICES = ["d0", "d1"]


@pytest.mark.parametrize("order", ["strict", "hint"])
@pytest.mark.parametrize("background", [False, True])
def test_a_lane_does_not_wait_for_ever(monkeypatch, background, order):
    """The lookahead says of every lane that foreground jobs are expected there, again and again."""
    # A private name: no job can be made to be expected for ever.
    real = fair_share._fits
    monkeypatch.setattr(fair_share, "_fits", lambda flow, *others: flow.background and real(flow, *others))
    shape = Shape(2, 4, 2)
    graph = lower(find_schedule("1f1b", order=order), shape, devices=DEVICES, checkpoint=CheckpointMode.NEVER)
    jobs = [
        SimulatedJob(graph, Costs(), Share(f"job {weight}", weight, background and weight == 2), steps=6)
        for weight in (1, 2, 7)
    ]
    runs = simulate_jobs(jobs)
    assert [len(run.records) for run in runs] == [6, 6, 6]
