"""The short form of the soak, and that its samples and trends see what they are to see."""

from __future__ import annotations

from random import Random

import pytest
import torch

pytest.importorskip("fastapi", reason="a service needs FastAPI: pip install -e '.[service]'")

from tests.campaigns.harness import Run
from tests.campaigns.soak.samples import measure, trend
from tests.campaigns.soak.soak import CAMPAIGN, LEAST_SAMPLES, Soak


@pytest.mark.timeout(120)
def test_a_soak_finds_its_service_in_order():
    run = Run(CAMPAIGN, lambda _: None, minutes=0.1)
    soak = Soak(run, sample_every=1, fault_every=0.2)
    soak.run()
    assert not run.report.findings, run.report
    assert min(soak.dealt.values()) > 0
    assert soak.states["last: finished"] == 1
    assert len(soak.samples) >= LEAST_SAMPLES
    assert "| memory (MiB) |" in str(run.report)


@pytest.mark.parametrize(("growing", "verdict"), [(0.0, "no growth"), (-3.0, "no growth"), (3.0, "growth")])
def test_growth_is_found_in_noise_and_only_where_it_is(growing, verdict):
    random = Random(3)
    times = [10.0 * number for number in range(180)]
    found = trend(times, [500 + random.gauss(0, 1) + growing * time / 600 for time in times])
    assert found.verdict == verdict
    assert abs(found.slope - growing * 6) < 3 * found.error
    assert trend(times[:7], times[:7]).verdict == "too short"


def test_a_sample_sees_what_is_held():
    held = measure()
    kept = [torch.nn.Parameter(torch.zeros(1)) for _ in range(100)]
    assert measure()["tensors"] - held["tensors"] == len(kept)
