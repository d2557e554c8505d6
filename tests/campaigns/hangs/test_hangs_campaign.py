"""The short form of the campaign of hangs: a link that loses what is sent, and a task that never ends."""

from __future__ import annotations

import pytest

from tests.campaigns.hangs.campaign import Lane, lane
from tests.campaigns.harness import Campaign, Run, in_short

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("own_temporary_files")]

FLOOR = 2.0


def test_hangs_are_named():
    report = in_short(Campaign("hangs in short", run_two))
    assert not report.findings, report
    assert report.counts["outcome"] == {"link: named rightly": 1, "sleep: named rightly": 1}


async def run_two(run: Run) -> None:
    mine: Lane
    async with lane(floor=FLOOR) as mine:
        # The first one kills nobody, so that the second one has its workers.
        await mine.run(3, "link", run, workers=2)
        await mine.run(3, "sleep", run, workers=2)
