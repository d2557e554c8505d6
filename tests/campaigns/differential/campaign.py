"""The campaign: cases are drawn, and each is judged in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.campaigns.differential.cases import draw
from tests.campaigns.differential.judge import judge
from tests.campaigns.harness import OPTIONS, Campaign, Verdict

__all__ = ["CAMPAIGN"]

SECONDS = 60.0


def _judged(seeds: Sequence[int]) -> Iterator[Verdict]:
    yield from map(judge, map(draw, seeds))


CAMPAIGN = Campaign(
    "differential",
    lambda run: run.judge(run.chunks(1), _judged, SECONDS),
    {name: OPTIONS[name] for name in ("cases", "processes", "case", "here")},
    draw,
)
