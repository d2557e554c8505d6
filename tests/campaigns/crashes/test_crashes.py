"""The short form of the campaign of crashes: a worker that is stopped inside a task, so that it is killed.

Workers that die in tasks are in ``tests/pipeline/test_workers.py``, a service's in ``tests/service/jobs``.
"""

from __future__ import annotations

import sys

import preloaded
import pytest
import torch

from tests.campaigns.crashes.campaign import Rounds
from tests.campaigns.crashes.strikes import Strike
from tests.campaigns.harness import Campaign, Run

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("own_temporary_files"),
    pytest.mark.skipif(sys.platform != "linux", reason="it looks at processes in /proc"),
]


@pytest.mark.promise("A lost worker", "However a worker crashes, its job continues with bit-identical results.")
async def test_a_job_goes_on_bit_equal_after_a_strike_and_nothing_is_left(tmp_path):
    torch.manual_seed(0)
    preloaded.start()
    run = Run(Campaign("crashes in short", print), lambda _: None)
    async with Rounds(run, devices=2, steps=60, kinds="U") as rounds:
        await rounds.round(Strike("stop", "U", "cpu:0", 1, 0, tmp_path / "struck"))
        await rounds.round(None)
    rounds.check_nothing_is_left()
    assert run.report.counts["round"] == {"stop in U": 1}
