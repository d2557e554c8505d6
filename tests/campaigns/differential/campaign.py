"""Runs the campaign: draws cases, has them judged, minimises what it finds, and reports."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.campaigns.differential.cases import Case, draw
from tests.campaigns.differential.judge import Verdict, general
from tests.campaigns.differential.minimise import minimise
from tests.campaigns.differential.pieces import LEFT_OUT
from tests.campaigns.differential.workers import judged

SECONDS_TO_MINIMISE = 20.0


@dataclass
class Finding:
    """A case that is neither right nor refused, and the smallest one that was found like it."""

    case: Case
    verdict: Verdict
    smallest: Case | None = None

    @property
    def alike(self) -> str:
        """The same for findings that probably have one cause."""
        if self.smallest is None:
            return self.verdict.signature
        names = ", ".join(sorted({str([item.name, *item.hooks]) for item in self.smallest.all_items()}))
        return f"{self.verdict.outcome}: {names} {list(self.smallest.options)}"


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


def command(case: Case, *, drawn: bool) -> str:
    """What reproduces a case."""
    given = str(case.seed) if drawn else shlex.quote(case.to_json())
    return f"python -m tests.campaigns.differential --case {given}"


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

    for number, (case, verdict) in enumerate(judged(drawn(), processes, deadline), 1):
        campaign.add(case, verdict)
        if verdict.is_finding:
            tell(f"{verdict.outcome}: {verdict.text.splitlines()[0][:200]}\n  {command(case, drawn=True)}")
        if number % 100 == 0:
            tell(f"{number} cases, {dict(campaign.outcomes)}, {time.monotonic() - began:.0f} s")
    campaign.seconds = time.monotonic() - began
    for found in sorted(campaign.findings, key=lambda each: each.verdict.signature):
        if time.monotonic() - began > 60 * minutes:
            break
        found.smallest, found.verdict = minimise(
            found.case, found.verdict, deadline=deadline, seconds=SECONDS_TO_MINIMISE
        )
        tell(f"minimised {found.case.seed}: {found.alike}")
    return campaign


def report(campaign: Campaign) -> str:
    """The report, in Markdown: findings, refusals by message, what torch itself refused."""
    total = sum(campaign.outcomes.values())
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in campaign.outcomes.most_common())
    lines = [f"seed {campaign.seed}: {total} cases in {campaign.seconds:.0f} s on {os.cpu_count()} cores: {outcomes}"]
    lines += [f"without layers of {library}, which {why}" for library, why in LEFT_OUT.items()]
    alike: dict[str, list[Finding]] = defaultdict(list)
    for finding in campaign.findings:
        alike[finding.alike].append(finding)
    for name, findings in sorted(alike.items(), key=lambda item: -len(item[1])):
        lines += [
            "",
            f"## {len(findings)} × {name}",
            *(f"    {command(each.case, drawn=True)}" for each in findings[:3]),
        ]
        first = findings[0]
        if first.smallest is not None:
            lines.append(f"    smallest: {command(first.smallest, drawn=False)}")
        lines += [f"    | {line}" for line in first.verdict.text.splitlines()[:60]]
    if campaign.refusals:
        lines += ["", "## Refused", "", "| cases | message | for instance |", "|---:|---|---|"]
        for _, refused in sorted(campaign.refusals.items(), key=lambda item: -len(item[1])):
            case, text = refused[0]
            lines.append(f"| {len(refused)} | {text.splitlines()[0][:300]} | {case.seed} |")
    if campaign.voids:
        lines += ["", "## Void: the unsplit model itself fails", "", "| cases | message |", "|---:|---|"]
        lines += [f"| {count} | {message} |" for message, count in campaign.voids.most_common()]
    return "\n".join(lines)
