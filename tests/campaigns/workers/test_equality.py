"""The short form of the campaign of workers, and that it sees what it is to see: each rule of edges, broken once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import count, islice

import pytest

from tests.campaigns.harness import Verdict
from tests.campaigns.models.items import Item
from tests.campaigns.workers.cases import MAPPING, Case, Plan, Step, draw
from tests.campaigns.workers.judge import Judge, judging

pytestmark = pytest.mark.timeout(120)

CASES = 8
NAMES = "ab"
DEADLINE = 60.0
HANG_SECONDS = 1.0
EQUAL = Verdict("equal")

PLAN = Plan(
    seed=1,
    devices=("cpu:0", "cpu:1"),
    schedule="gpipe",
    order="strict",
    balance=(4, 5),
    kind="vector",
    items=(Item("pack tuple", tuple(map(Item, "Linear Tanh Dropout Linear Tanh fails Linear".split()))),),
    microbatches=4,
    checkpoint="never",
    dtype="float32",
    length=0,
    samples=8,
    ready_made=False,
    loss="counted",
    optimizer="adam",
    autocast=False,
    deferred=False,
    job="",
    background=False,
    steps=(Step("train"), Step("accumulate"), Step("train")),
)
SKIPPING = replace(
    PLAN,
    schedule="interleaved",
    items=(Item("Linear"), Item("stash", tuple(map(Item, ("Linear", "Tanh", "Linear")))), Item("Linear")),
    balance=(2, 1, 2, 2),
)
"""What stage 0 sends to stage 3 is taken behind what it sends to stage 1, on the same edge."""
FAILING = replace(PLAN, steps=(Step("train"), *([Step("fail"), Step("train")] * 6)))


def test_random_runs_are_equal_and_broken_rules_are_seen(no_leaks):
    asyncio.run(judge_all())


def suits(case: Case) -> bool:
    """Whether it needs no other workers."""
    return all(MAPPING[device] in NAMES for plan in case.plans for device in plan.devices)


async def judge_all() -> None:
    # One run for all: its workers take longer to start than all cases take.
    async with judging(NAMES) as judge:
        found: Counter[str] = Counter()
        for case in islice(filter(suits, map(draw, count())), CASES):
            verdict = await asyncio.wait_for(judge.judge(case), DEADLINE)
            assert not verdict.is_finding, f"{case}: {verdict}"
            found[verdict.outcome] += 1
        assert found["equal"] + found["close"] > CASES // 2
        case = Case(0, (PLAN,), 0)
        assert await judge.judge(case) == EQUAL
        swapped = await judge.judge(case, breaks="swap")
        assert swapped.is_finding, "rule (1): two messages swapped their tensors, and nothing came of it"
        failing = Case(0, (FAILING,), 3000)
        assert await judge.judge(failing) == EQUAL
        assert await is_seen(judge, failing, "stale"), "rule (6): what came for an old step counted for a new one"
        skipping = Case(0, (SKIPPING,), 0)
        assert await judge.judge(skipping) == EQUAL
        assert await is_seen(judge, skipping, "wait"), "rule (3): an edge waited for a task, and nothing came of it"


async def is_seen(judge: Judge, case: Case, breaks: str) -> bool:
    """Whether a broken rule gives other results, or none."""
    try:
        verdict = await asyncio.wait_for(judge.judge(case, breaks), HANG_SECONDS)
    except TimeoutError:
        return True
    return verdict.is_finding


def test_a_case_is_the_same_whenever_it_is_drawn():
    for seed in range(300):
        assert draw(seed) == draw(seed)
