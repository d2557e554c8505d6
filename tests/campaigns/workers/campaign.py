"""Runs the campaign: processes that judge some cases each, with a limit of time, and the report."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from tests.campaigns.apart import in_turns
from tests.campaigns.workers.cases import draw
from tests.campaigns.workers.judge import Judge, Verdict, judging

__all__ = ["Campaign", "command", "run_campaign"]

START_SECONDS = 60.0
"""For a process and its workers to come up."""
TOGETHER = 25
"""Cases of one process, which share its workers."""


@dataclass
class Campaign:
    """What a campaign has found."""

    seed: int
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, str]] = field(default_factory=list)

    def add(self, case: int, verdict: Verdict) -> None:
        """Count a verdict."""
        kind = "finding" if verdict.is_finding else verdict.partition(":")[0]
        self.outcomes[kind] += 1
        if verdict.is_finding:
            self.findings.append((case, verdict))
        elif kind == "refused":
            self.refusals[re.sub(r"\d+", "N", verdict.splitlines()[0])[:160]] += 1

    def report(self) -> str:
        """What was run, and what was found, as text."""
        total = sum(self.outcomes.values())
        counts = ", ".join(f"{count} {kind}" for kind, count in self.outcomes.most_common())
        lines = [f"seed {self.seed}: {total} cases in {self.seconds:.0f} s on {os.cpu_count()} cores: {counts}"]
        lines += [f"finding: {verdict.splitlines()[0][:300]}\n    {command(case)}" for case, verdict in self.findings]
        lines += [f"{count:6} {text}" for text, count in self.refusals.most_common()]
        return "\n".join(lines)


def command(case: int) -> str:
    """What repeats a case."""
    return f"python -m tests.campaigns.workers --case {case} --times 100"


def run_campaign(
    cases: range, *, minutes: float, processes: int, deadline: float, transport: str, tell: Callable[[str], object]
) -> Campaign:
    """Judge the cases, or as many as there is time for. Each process has ``deadline`` seconds for all of its own."""
    began = time.monotonic()
    campaign = Campaign(cases.start)

    def chunks() -> Iterator[range]:
        for start in cases[::TOGETHER]:
            if time.monotonic() - began < 60 * minutes:
                yield range(start, min(start + TOGETHER, cases.stop))

    def work(chunk: range) -> Callable[[], Iterator[Verdict]]:
        return lambda: _judged(chunk, transport, deadline)

    for chunk, apart in in_turns(chunks(), work, processes, START_SECONDS + deadline):
        verdicts = [*apart.results]
        if apart.outcome:
            verdicts.append(Verdict(f"{apart.outcome}: {apart.told}"))
        for case, verdict in zip(chunk, verdicts, strict=False):
            campaign.add(case, verdict)
            if verdict.is_finding:
                tell(f"{verdict[:2000]}\n    {command(case)}")
        if sum(campaign.outcomes.values()) % (20 * TOGETHER) == 0:
            tell(f"{dict(campaign.outcomes)} in {time.monotonic() - began:.0f} s")
    campaign.seconds = time.monotonic() - began
    return campaign


def _judged(cases: range, transport: str, deadline: float) -> Iterator[Verdict]:
    """The verdicts, each as soon as it is known. The workers write their stacks when the time is over."""
    verdicts: queue.SimpleQueue[Verdict] = queue.SimpleQueue()

    async def judge_all() -> None:
        async with judging(transport=transport) as judge:
            timer = threading.Timer(deadline, _show_stacks, (judge,))
            timer.daemon = True
            timer.start()
            for case in cases:
                verdicts.put(await judge.judge(draw(case)))

    judging_thread = threading.Thread(target=asyncio.run, args=(judge_all(),), daemon=True)
    judging_thread.start()
    for _ in cases:
        while True:
            try:
                yield verdicts.get(timeout=1.0)
                break
            except queue.Empty:
                if not judging_thread.is_alive() and verdicts.empty():
                    raise RuntimeError("the judge has ended with an error") from None


def _show_stacks(judge: Judge) -> None:
    for pid in judge.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
