"""Runs the campaign: processes that judge cases, each case with a deadline, and the report."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from tests.campaigns.workers.cases import draw
from tests.campaigns.workers.judge import Verdict, judging

__all__ = ["Campaign", "command", "run_campaign", "run_case"]

START_SECONDS = 300.0
"""For a process and its workers to come up."""
STACK_SECONDS = 2.0
"""For workers to write their stacks, when a case is late."""
CASES_PER_PROCESS = 1000
_spawn = multiprocessing.get_context("spawn")


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


async def run_case(seed: int, times: int, deadline: float, transport: str) -> Verdict:
    """The verdict about one case, run so often, or until something is found."""
    async with judging(transport=transport) as judge:
        for _ in range(times):
            with _Deadline(seed, deadline, lambda: judge.pids):
                verdict = await judge.judge(draw(seed))
            if verdict.is_finding:
                break
        return verdict


def run_campaign(
    seed: int,
    cases: int,
    *,
    minutes: float,
    processes: int,
    deadline: float,
    transport: str,
    tell: Callable[[str], object],
) -> Campaign:
    """Judge ``cases`` cases from ``seed`` on, or as many as there is time for."""
    began = time.monotonic()
    campaign = Campaign(seed)
    rest: Iterator[int] = iter(range(seed * 1_000_000, seed * 1_000_000 + cases))
    judges = [_Process(deadline, transport) for _ in range(processes)]
    try:
        while judges:
            ready = wait([judge.connection for judge in judges], timeout=1.0)
            for place, judge in enumerate(tuple(judges)):
                if judge.connection in ready or judge.is_late:
                    if (answer := judge.take()) is not None:
                        campaign.add(*answer)
                        if answer[1].is_finding:
                            tell(f"{answer[1][:2000]}\n    {command(answer[0])}")
                        if sum(campaign.outcomes.values()) % 500 == 0:
                            tell(f"{dict(campaign.outcomes)} in {time.monotonic() - began:.0f} s")
                    if judge.is_over:
                        judge.end()
                        judge = judges[place] = _Process(deadline, transport)
                    elif not judge.give(None if time.monotonic() - began > 60 * minutes else next(rest, None)):
                        judge.end()
                        judges[place] = judge
            judges = [judge for judge in judges if not judge.is_ended]
    finally:
        for judge in judges:
            judge.end()
    campaign.seconds = time.monotonic() - began
    return campaign


class _Process:
    """A process with a judge, which says when it is up, and then answers each case with a verdict."""

    def __init__(self, deadline: float, transport: str) -> None:
        self.connection, theirs = _spawn.Pipe()
        # No daemon: it has workers, which end with it.
        self._process = _spawn.Process(target=_serve, args=(theirs, deadline, transport))
        self._process.start()
        theirs.close()
        self._deadline = deadline
        self._case: int | None = None
        self._due = time.monotonic() + START_SECONDS
        self._done = 0
        self._is_gone = False
        self.is_ended = False

    @property
    def is_late(self) -> bool:
        """Whether it has not even said that its case is late."""
        return time.monotonic() > self._due

    @property
    def is_over(self) -> bool:
        """Whether another one is to take its place."""
        return self._is_gone or self._done >= CASES_PER_PROCESS

    def give(self, case: int | None) -> bool:
        """Have a case judged; false if there is none."""
        if case is not None:
            self._case, self._due = case, time.monotonic() + 2 * self._deadline
            self.connection.send(case)
        return case is not None

    def take(self) -> tuple[int, Verdict] | None:
        """Its verdict; ``None`` if it has only come up. A finding if it is gone, or silent."""
        case, self._case = self._case, None
        self._done += 1
        try:
            if not self.connection.poll():
                raise EOFError
            text = self.connection.recv()
        except (EOFError, OSError):
            self._is_gone = True
            text = "the process is gone, or silent"
        return None if case is None else (case, Verdict(text))

    def end(self) -> None:
        self.is_ended = True
        with suppress(OSError):
            self.connection.send(None)
        self.connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, deadline: float, transport: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    with suppress(EOFError, OSError):  # Who began it is gone, and the workers go with this process.
        asyncio.run(_judge(connection, deadline, transport))
    os._exit(0)


async def _judge(connection: Connection, deadline: float, transport: str) -> None:
    async with judging(transport=transport) as judge:
        connection.send("up")
        while (case := await asyncio.to_thread(connection.recv)) is not None:
            with _Deadline(case, deadline, lambda: judge.pids, connection):
                verdict = await judge.judge(draw(case))
            connection.send(str(verdict))


class _Deadline:
    """Inside it, a case has so many seconds; then it is named, all stacks are written, and the process ends."""

    def __init__(
        self, case: int, seconds: float, pids: Callable[[], list[int]], connection: Connection | None = None
    ) -> None:
        self._case = case
        self._seconds = seconds
        self._pids = pids
        self._connection = connection
        self._timer = threading.Timer(seconds, self._late)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _late(self) -> None:
        text = f"deadlock: not done after {self._seconds:g} s"
        print(f"{text}\n    {command(self._case)}\n{draw(self._case)}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        if self._connection is not None:
            self._connection.send(text)
        os._exit(1)
