"""The short form of the campaign of hosts: the network of one is cut, while it is at work.

Hosts that are switched off are in ``tests/train/test_lasting_run.py``.
"""

from __future__ import annotations

import pytest

from tests.campaigns.harness import Campaign, Run
from tests.campaigns.hosts.campaign import HOSTS, Round, Rounds

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("own_temporary_files")]


@pytest.mark.promise(
    "A lost worker",
    "A run that loses workers and continues, with others or with replacements, ends with bit-identical results.",
)
async def test_a_job_goes_on_without_a_host_that_is_cut_off_and_takes_it_in_again(tmp_path):
    run = Run(Campaign("hosts in short", print), lambda _: None)
    await Rounds(run, [Round("cut", "cpu:1", "B", 1)], tmp_path, hosts=HOSTS[:3], latest=60.0).run()
    assert run.report.counts["way to go on"] == {"split anew": 1}
