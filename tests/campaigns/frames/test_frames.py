"""The short form of the campaign of frames, and that it sees what it is to see."""

from __future__ import annotations

import pytest

from asyncpipe.secured import Macs
from tests.campaigns.frames.campaign import CAMPAIGN
from tests.campaigns.harness import in_short


@pytest.mark.promise(
    "Security", "Over TCP, nothing of a message that was changed, inserted, repeated or swapped on the path is used."
)
def test_nothing_of_a_changed_frame_is_used(no_leaks):
    report = in_short(CAMPAIGN, seed=7, cases=200, here=True)
    assert not report.findings, report
    assert report.counts["outcome"].total() == 200


def test_macs_that_nobody_looks_at_are_seen(monkeypatch):
    monkeypatch.setattr(Macs, "check", lambda self, piece, mac: None)
    report = in_short(CAMPAIGN, seed=7, cases=40, here=True)
    assert len(report.findings) > 5, report
