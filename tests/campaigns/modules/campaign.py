"""The campaign: cases in chunks, each of which has a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.campaigns.harness import OPTIONS, Campaign, Run, Verdict
from tests.campaigns.modules.cases import draw, fixed, modules
from tests.campaigns.modules.judge import judge

__all__ = ["CAMPAIGN"]

CHUNK = 50
SECONDS = 120.0


def _judged(numbers: Sequence[int]) -> Iterator[Verdict]:
    yield from map(judge, map(draw, numbers))


def _run(run: Run) -> None:
    total = len(fixed())  # Made before processes are forked.
    if not run.options.cases:
        run.options.seed, run.options.cases = 0, total
    run.judge(run.chunks(CHUNK), _judged, SECONDS)
    seen = {topic.rpartition(": ")[0] for topic in run.report.counts["topic"]}
    run.report.tables.append(f"\n{len(seen)} of the {len(modules())} modules, {total} cases in the fixed list")


CAMPAIGN = Campaign(
    "modules",
    _run,
    {"cases": (2000, "how many; 0: the fixed list")} | {n: OPTIONS[n] for n in ("processes", "case", "here")},
    draw,
)
