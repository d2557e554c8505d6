"""The short form of the campaign of crashes: one worker that dies and one that is stopped, each inside a task."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.campaigns.crashes.campaign import Campaign
from tests.campaigns.crashes.strikes import Strike

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.one_loop,
    pytest.mark.usefixtures("own_temporary_files"),
    pytest.mark.skipif(sys.platform != "linux", reason="it looks at processes in /proc"),
]


async def test_a_job_goes_on_bit_equal_after_each_strike_and_nothing_is_left(tmp_path):
    torch.manual_seed(0)
    note = tmp_path / "struck"
    campaign = Campaign(devices=2, tell=lambda _: None, steps=60)
    async with campaign:
        await campaign.round(Strike("kill", "B", "cpu:1", 1, 2, note))
        await campaign.round(Strike("stop", "U", "cpu:0", 1, 0, note))
        await campaign.round(None)
    campaign.check_nothing_is_left()
    assert campaign.figures.rounds == {"kill in B": 1, "stop in U": 1}
