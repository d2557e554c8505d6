"""The short form of the campaign of hangs: a link that loses what is sent, and a task that never ends."""

from __future__ import annotations

import pytest
import torch

from tests.campaigns.hangs.campaign import Figures, lane

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("own_temporary_files")]

FLOOR = 2.0


async def test_hangs_are_named():
    torch.manual_seed(0)
    figures = Figures()
    async with lane(lambda _: None, floor=FLOOR) as mine:
        # The first one kills nobody, so that the second one has its workers.
        await mine.run("link", 3, figures, workers=2)
        await mine.run("sleep", 3, figures, workers=2)
    assert not figures.wrong
    assert figures.right == {"link": 1, "sleep": 1}
