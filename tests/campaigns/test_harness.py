"""What campaigns share sees what it is to see."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from tests.campaigns.harness import Campaign, Verdict, in_short, run_campaign


@pytest.mark.parametrize(("end", "outcome"), [("die", "crashed"), ("wait", "hung")])
def test_a_process_that_dies_or_hangs_is_a_result(end: str, outcome: str) -> None:
    def work(seeds: Sequence[int]) -> Iterator[Verdict]:
        yield Verdict("right")
        if end == "die":
            os._exit(3)
        while True:
            pass

    report = in_short(Campaign("test", lambda run: run.judge(run.chunks(2), work, 0.5), {"cases": 2, "case": -1}))
    assert report.counts["outcome"] == {"right": 1, outcome: 1}
    (found,) = report.findings.values()
    assert "python -m tests.campaigns test --case 1000001" in found[0]
    assert ("test_harness.py" in found[0]) == (outcome == "hung")


def test_the_report_and_the_exit_status_say_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {1: Verdict("right"), 2: Verdict("refused", "OptionError: 7 stages"), 3: Verdict("wrong", "off by 0.5")}

    def work(seeds: Sequence[int]) -> Iterator[Verdict]:
        yield from (outcomes[seed] for seed in seeds)

    options = {"cases": 2, "case": -1, "here": False}
    campaign = Campaign("test", lambda run: run.judge(run.chunks(1), work, 60), options, is_quiet=False)
    assert run_campaign(campaign, ["--case", "2", "--here"]) == 0
    assert "| refused: OptionError: # stages | 1 | python -m tests.campaigns test --case 2 |" in capsys.readouterr().out
    assert run_campaign(campaign, ["--case", "3", "--here"]) == 1
    said = capsys.readouterr()
    assert "## 1 × wrong: off by #" in said.out
    assert "wrong: off by 0.5" in said.err
    broken = Campaign("test", lambda run: 1 / 0, is_quiet=False)
    assert run_campaign(broken, []) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_every_case_is_judged_once() -> None:
    def work(seeds: Sequence[int]) -> Iterator[Verdict]:
        yield from (Verdict("right", label=str(seed)) for seed in seeds)

    options = {"cases": 7, "case": -1, "here": True}
    report = in_short(Campaign("test", lambda run: run.judge(run.chunks(3), work, 60), options), seed=2)
    assert report.counts["outcome"] == {str(seed): 1 for seed in range(2_000_000, 2_000_007)}
