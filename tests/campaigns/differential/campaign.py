"""Runs the campaign: draws cases, has each judged in a process of its own, and reports."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.campaigns.apart import Apart, in_turns
from tests.campaigns.differential.cases import Case, draw
from tests.campaigns.differential.judge import Verdict, general, judge


@dataclass
class Finding:
    """A case that is neither right nor refused."""

    case: Case
    verdict: Verdict


@dataclass
class Campaign:
    """What a campaign has found so far."""

    seed: int
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, list[tuple[Case, str]]] = field(default_factory=lambda: defaultdict(list))
    voids: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, case: Case, verdict: Verdict) -> None:
        """Count a verdict."""
        self.outcomes[verdict.outcome] += 1
        if verdict.outcome == "refused":
            self.refusals[general(verdict.text)].append((case, verdict.text))
        elif verdict.outcome == "void":
            self.voids[general(verdict.text)] += 1
        elif verdict.is_finding:
            self.findings.append(Finding(case, verdict))


def command(case: Case) -> str:
    """What reproduces a case."""
    return f"python -m tests.campaigns.differential --case {case.seed}"


def verdict_of(apart: Apart) -> Verdict:
    """The verdict on the case that a process has judged."""
    return Verdict(apart.outcome, apart.told) if apart.outcome else apart.results[0]


def judging(case: Case) -> Callable[[], Iterator[Verdict]]:
    """The work of such a process."""

    def work() -> Iterator[Verdict]:
        yield judge(case)

    return work


def run_campaign(
    seed: int, cases: int, *, minutes: float, processes: int, deadline: float, tell: Callable[[str], None]
) -> Campaign:
    """Judge ``cases`` cases from ``seed`` on, or as many as there is time for."""
    began = time.monotonic()
    campaign = Campaign(seed)

    def drawn() -> Iterator[Case]:
        for number in range(cases):
            if time.monotonic() - began > 60 * minutes:
                return
            yield draw(seed * 1_000_000 + number)

    for number, (case, apart) in enumerate(in_turns(drawn(), judging, processes, deadline), 1):
        verdict = verdict_of(apart)
        campaign.add(case, verdict)
        if verdict.is_finding:
            tell(f"{verdict.outcome}: {verdict.text.splitlines()[0][:200]}\n  {command(case)}")
        if number % 100 == 0:
            tell(f"{number} cases, {dict(campaign.outcomes)}, {time.monotonic() - began:.0f} s")
    campaign.seconds = time.monotonic() - began
    return campaign


def report(campaign: Campaign) -> str:
    """The report, in Markdown: findings, refusals by message, what torch itself refused."""
    total = sum(campaign.outcomes.values())
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in campaign.outcomes.most_common())
    lines = [f"seed {campaign.seed}: {total} cases in {campaign.seconds:.0f} s on {os.cpu_count()} cores: {outcomes}"]
    alike: dict[str, list[Finding]] = defaultdict(list)
    for finding in campaign.findings:
        alike[finding.verdict.signature].append(finding)
    for name, findings in sorted(alike.items(), key=lambda item: -len(item[1])):
        lines += ["", f"## {len(findings)} × {name}", *(f"    {command(each.case)}" for each in findings[:3])]
        lines += [f"    | {line}" for line in findings[0].verdict.text.splitlines()[:60]]
    if campaign.refusals:
        lines += ["", "## Refused", "", "| cases | message | for instance |", "|---:|---|---|"]
        for _, refused in sorted(campaign.refusals.items(), key=lambda item: -len(item[1])):
            case, text = refused[0]
            lines.append(f"| {len(refused)} | {text.splitlines()[0][:300]} | {case.seed} |")
    if campaign.voids:
        lines += ["", "## Void: the unsplit model itself fails", "", "| cases | message |", "|---:|---|"]
        lines += [f"| {count} | {message} |" for message, count in campaign.voids.most_common()]
    return "\n".join(lines)
