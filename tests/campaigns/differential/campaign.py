"""The campaign: cases are drawn, and some at a time are judged in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.campaigns.differential.cases import draw
from tests.campaigns.differential.judge import judge
from tests.campaigns.harness import OPTIONS, Campaign, Verdict

__all__ = ["CAMPAIGN"]

TOGETHER = 20
"""Cases of one process: what the first of them imports serves all. A case alone takes ten times as long."""
SECONDS = 1200.0
"""For all of a process, beside other programs as well."""


def _judged(seeds: Sequence[int]) -> Iterator[Verdict]:
    yield from map(judge, map(draw, seeds))


CAMPAIGN = Campaign(
    "differential",
    lambda run: run.judge(run.chunks(TOGETHER), _judged, SECONDS),
    {name: OPTIONS[name] for name in ("cases", "processes", "case", "here")},
    draw,
)
