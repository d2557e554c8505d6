"""Makes a case smaller while its verdict stays alike."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from tests.campaigns.differential.cases import Case, Item, Unbuildable, build
from tests.campaigns.differential.judge import Verdict
from tests.campaigns.differential.workers import judged

T = TypeVar("T")


def minimise(case: Case, verdict: Verdict, *, deadline: float, seconds: float) -> tuple[Case, Verdict]:
    """The smallest case that was found in ``seconds``, and its verdict."""
    ends = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(case):
            if time.monotonic() > ends:
                return case, verdict
            if not _builds(smaller):
                continue
            ((_, found),) = judged([smaller], 1, deadline)
            if _alike(found, verdict):
                case, verdict, changed = smaller, found, True
                break
    return case, verdict


def _alike(found: Verdict, verdict: Verdict) -> bool:
    if found.outcome != verdict.outcome:
        return False
    return found.outcome == "wrong" or found.signature == verdict.signature


def _builds(case: Case) -> bool:
    try:
        build(case)
    except Unbuildable:
        return False
    return True


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the greatest things first."""
    for items in _fewer(case.items):
        yield replace(case, items=items)
    for options in _without_one(case.options):
        yield replace(case, options=options)
    for steps in _without_one(case.steps):
        if steps and steps[0] == "train":
            yield replace(case, steps=steps)
    if case.output:
        yield replace(case, output="")
    if case.cuts:
        for cuts in _without_one(case.cuts):
            yield replace(case, cuts=cuts, schedule="gpipe", devices=len(cuts) + 1)
    if case.schedule != "gpipe":
        yield replace(case, schedule="gpipe", devices=case.stages)
    if case.face not in ("sync step", "call"):
        yield replace(case, face="sync step" if case.face in ("step", "trace") else "call")
    if case.loss != "mean":
        yield replace(case, loss="mean")
    if case.checkpoint != "never":
        yield replace(case, checkpoint="never")
    if case.checkpoint == "except_last":
        yield replace(case, checkpoint="always")
    if case.microbatches > 1:
        fewer = case.microbatches - 1
        yield replace(case, microbatches=fewer, samples=2 * fewer)
    if case.samples > 2 * case.microbatches:
        yield replace(case, samples=2 * case.microbatches)


def _without_one(things: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    for number in range(len(things)):
        yield (*things[:number], *things[number + 1 :])


def _fewer(items: tuple[Item, ...]) -> Iterator[tuple[Item, ...]]:
    yield from _without_one(items)
    for number, item in enumerate(items):
        before, after = items[:number], items[number + 1 :]
        if item.inner:
            yield (*before, *item.inner, *after)
        for hooks in _without_one(item.hooks):
            yield (*before, replace(item, hooks=hooks), *after)
        for inner in _fewer(item.inner):
            yield (*before, replace(item, inner=inner), *after)
