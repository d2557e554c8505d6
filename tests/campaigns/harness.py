"""What all campaigns share: options, cases from a seed, processes with a time limit, progress, and one report.

Campaign   what the command line knows of one: its options, how to run it, how a case is repeated
Run        one under way: the cases that there is time for, and the report
Report     counts, seconds and findings, in Markdown
Verdict    what became of one case
Apart      a forked process: that it dies or is late is a result as well
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import inspect
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from pathlib import Path
from pprint import pformat
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

__all__ = ["Apart", "Campaign", "Report", "Run", "Verdict", "general", "in_short", "run_campaign"]

PASSED = ("right", "equal", "close", "refused", "void")
"""Outcomes that nobody must look at."""
OPTIONS: dict[str, tuple[Any, str]] = {
    "seed": (1, "of the campaign"),
    "minutes": (30.0, "begin nothing more after that"),
    "cases": (2000, "how many"),
    "case": (-1, "run only the case of this seed"),
    "times": (1, "run each case so often, or until something is found"),
    "here": (False, "run cases in this process, for a debugger"),
    "processes": (min(2, os.cpu_count() or 1), "how many judge cases at a time"),
    "only": ("", "run only these, by name"),
}
PROGRESS = 100
"""Cases after which a line says how far the campaign is."""

_fork = multiprocessing.get_context("fork")


class Verdict(NamedTuple):
    """What became of a case."""

    outcome: str
    """One of ``PASSED``, or the kind of a finding: ``wrong``, ``error``, ``crashed``, ``hung`` …"""
    text: str = ""
    """The message of a refusal; what was found, first in one line."""
    label: str = ""
    """What is counted in place of the outcome."""
    topic: str = ""
    """What the case is about: a table says how often it was seen, by outcome."""

    @property
    def is_finding(self) -> bool:
        """Whether somebody must look at it."""
        return self.outcome not in PASSED


def general(text: str) -> str:
    """The first line of a message, without what differs from case to case."""
    line = text.splitlines()[0] if text else ""
    line = re.sub(r"'[^']{0,60}'", "'…'", line)
    line = re.sub(r"\[[^\]]*\]", "[…]", line)
    return re.sub(r"[FBRIWCU]\(\d[^)]*\)|-?\d+(\.\d+)?(e-?\d+)?", "#", line)[:300].replace("|", "¦")


@dataclass
class Report:
    """What a campaign has seen so far."""

    title: str = ""
    began: float = field(default_factory=time.monotonic)
    counts: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Tables of how often something was seen, by title; ``outcome`` has the cases."""
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    findings: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Findings that look alike, by what they have in common."""
    tables: list[str] = field(default_factory=list)
    """Further parts, in Markdown."""
    examples: dict[str, str] = field(default_factory=dict)
    """Of a line in a table: how to repeat one case."""

    def add(self, verdict: Verdict, repeat: str) -> None:
        """Count a verdict; ``repeat`` is the command for its case."""
        outcome = verdict.label or verdict.outcome
        self.counts["outcome"][outcome] += 1
        if verdict.topic:
            self.counts["topic"][f"{verdict.topic}: {outcome}"] += 1
        if verdict.is_finding:
            self.find(f"{verdict.outcome}: {verdict.text}", repeat)
        elif verdict.outcome in ("refused", "void"):
            line = f"{verdict.outcome}: {general(verdict.text)}"
            self.counts["message"][line] += 1
            self.examples.setdefault(line, repeat)

    def find(self, text: str, repeat: str = "") -> None:
        """Note something that is wrong."""
        self.findings[general(text)].append(f"{repeat}\n{text}".strip())

    def __str__(self) -> str:
        lines = [f"# {self.title}", "", f"{time.monotonic() - self.began:.0f} s on {os.cpu_count()} cores"]
        for name, alike in sorted(self.findings.items(), key=lambda item: -len(item[1])):
            lines += ["", f"## {len(alike)} × {name}"]
            lines += [f"    {line}" for each in alike[:3] for line in each.splitlines()[:60]]
        lines += [] if self.findings else ["", "- all in order"]
        for title, counts in self.counts.items():
            lines += ["", f"| {title} | times | for instance |", "|---|---:|---|"]
            lines += [f"| {key} | {count} | {self.examples.get(key, '')} |" for key, count in counts.most_common()]
        if self.seconds:
            lines += ["", "| seconds | times | median | most |", "|---|---:|---:|---:|"]
            for name, all_of_it in sorted(self.seconds.items()):
                lines.append(f"| {name} | {len(all_of_it)} | {median(all_of_it):.3f} | {max(all_of_it):.3f} |")
        return "\n".join([*lines, *self.tables])


@dataclass(frozen=True)
class Campaign:
    """What the command line knows of a campaign."""

    name: str
    work: Callable[[Run], Any]
    """Runs it; may be a coroutine function."""
    options: dict[str, Any] = field(default_factory=dict)
    """Besides ``seed`` and ``minutes``: by name, the default, or the default and what it means."""
    draw: Callable[[int], Any] | None = None
    """The case of a seed, to be shown."""
    repeat: Callable[[Any], str] = lambda case: f"--case {case}"
    """The options that repeat a case."""
    is_quiet: bool = True
    """Whether nothing is logged: faults cause thousands of lines."""

    def table(self) -> dict[str, tuple[Any, str]]:
        """Default and meaning of each option."""
        found = {name: OPTIONS[name] for name in ("seed", "minutes")}
        for name, each in self.options.items():
            found[name] = each if isinstance(each, tuple) else (each, OPTIONS[name][1])
        return found


class Run:
    """A campaign under way."""

    def __init__(self, campaign: Campaign, tell: Callable[[str], object], **options: Any) -> None:
        values = {name: default for name, (default, _) in campaign.table().items()} | options
        self.campaign = campaign
        self.options = argparse.Namespace(**values)
        self.tell = tell
        said = (f"{name} {value}" for name, value in values.items() if value not in ("", -1, False))
        self.report = Report(", ".join([campaign.name, *said]))
        self._until = time.monotonic() + 60 * self.options.minutes

    @property
    def has_time(self) -> bool:
        """Whether something more may begin."""
        return time.monotonic() < self._until

    def while_time(self, items: Iterable[Any]) -> Iterator[Any]:
        """``items``, until the time is over."""
        for item in items:
            if not self.has_time:
                self.tell("the time is over")
                return
            yield item

    def seeds(self) -> Iterator[int]:
        """The cases that there is time for, or the one that is wanted."""
        options, first = self.options, self.options.seed * 1_000_000
        cases: Iterable[int] = range(first, first + options.cases)
        if options.case >= 0:
            cases = [options.case] * getattr(options, "times", 1)
        return self.while_time(cases)

    def chunks(self, size: int) -> Iterator[list[int]]:
        """The same, so many at a time."""
        seeds = self.seeds()
        while chunk := list(islice(seeds, size)):
            yield chunk

    def add(self, case: Any, verdict: Verdict) -> None:
        """Count a verdict, and tell of a finding at once."""
        repeat = f"python -m tests.campaigns {self.campaign.name} {self.campaign.repeat(case)}"
        self.report.add(verdict, repeat)
        if verdict.is_finding:
            self.tell(f"{verdict.outcome}: {verdict.text[:2000]}\n    {repeat}")
        if (counts := self.report.counts["outcome"]).total() % PROGRESS == 0:
            self.tell(f"{dict(counts)} in {time.monotonic() - self.report.began:.0f} s")

    def judge(
        self, chunks: Iterable[Sequence[Any]], work: Callable[[Any], Iterable[Verdict | str]], seconds: float
    ) -> None:
        """Have each of ``chunks`` judged in a process of its own, which has so many ``seconds``.

        ``work`` yields a verdict for each case of a chunk, in order; texts between them are told.
        """
        if getattr(self.options, "here", False):
            for chunk in chunks:
                self._take(chunk, work(chunk))
            return
        for chunk, apart in in_turns(chunks, work, getattr(self.options, "processes", 1), seconds):
            ends = [Verdict(apart.outcome, apart.told)] if apart.outcome else []
            self._take(chunk, [*apart.results, *ends])

    def _take(self, chunk: Sequence[Any], results: Iterable[Verdict | str]) -> None:
        cases = iter(chunk)
        for result in results:
            if isinstance(result, str):
                self.tell(result)
            else:
                self.add(next(cases, chunk[-1]), result)


def run_campaign(campaign: Campaign, arguments: Sequence[str]) -> int:
    """Run the command line of a campaign and print the report; 1 if something was found."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.campaigns {campaign.name}")
    for name, (default, meaning) in campaign.table().items():
        kind = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", help=f"{meaning} (default: %(default)s)", **kind)
    options = parser.parse_args(arguments)
    run = Run(campaign, partial(print, file=sys.stderr, flush=True), **vars(options))
    if campaign.draw is not None and options.case >= 0:
        print(pformat(campaign.draw(options.case), width=120))
    if campaign.is_quiet:
        logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    get_temp_dir()  # Made where it stays.
    # What is left behind in the folder is no other program's; sockets want a short path.
    with (
        tempfile.TemporaryDirectory(prefix="c-") as folder,
        patch.object(tempfile, "tempdir", folder),
        patch.dict(os.environ, TMPDIR=folder),
    ):
        try:
            _work(run)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - a finding, and the end
            run.report.find(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    print(run.report)
    return int(bool(run.report.findings))


def in_short(campaign: Campaign, **options: Any) -> Report:
    """The report of a campaign with these options, for a test."""
    run = Run(campaign, lambda _: None, **options)
    _work(run)
    return run.report


def _work(run: Run) -> None:
    done = run.campaign.work(run)
    if inspect.iscoroutine(done):
        asyncio.run(done)


class Apart:
    """One process, which sends what ``work`` yields."""

    def __init__(self, work: Callable[[], Iterable[Any]], seconds: float) -> None:
        self.results: list[Any] = []
        self.outcome = ""
        """``crashed`` or ``hung``; empty if all was well."""
        self.told = ""
        """How, with the stacks of all threads."""
        self._stacks = tempfile.NamedTemporaryFile(suffix=".stacks")  # noqa: SIM115 - until the end
        self.connection, theirs = _fork.Pipe()
        self._process = _fork.Process(target=_serve, args=(theirs, self._stacks.name, work), daemon=True)
        self._process.start()
        theirs.close()
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def is_over(self) -> bool:
        """Take what is there; whether nothing will come any more."""
        try:
            while self.connection.poll():
                self.results.append(self.connection.recv())
        except (EOFError, ConnectionError):
            self._process.join()
            if code := self._process.exitcode:
                name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                self._end("crashed", f"the process ended with {name}")
            else:
                self._end()
            return True
        if time.monotonic() < self._until:
            return False
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGUSR1)
        self._process.join(0.5)
        self._end("hung", f"not done after {self._seconds:g} s")
        return True

    def _end(self, outcome: str = "", told: str = "") -> None:
        self.outcome, self.told = outcome, f"{told}\n{Path(self._stacks.name).read_text(encoding='utf-8')}"
        self.stop()

    def stop(self) -> None:
        """Kill the process, if it runs."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._stacks.close()


def in_turns(
    items: Iterable[Any], work: Callable[[Any], Iterable[Any]], processes: int, seconds: float
) -> Iterator[tuple[Any, Apart]]:
    """Each of ``items`` with the end of its ``work``, in the order of their ends; so many ``processes`` at a time."""
    rest = iter(items)
    busy: list[tuple[Any, Apart]] = []
    try:
        while True:
            while len(busy) < processes and (item := next(rest, None)) is not None:
                busy.append((item, Apart(partial(work, item), seconds)))
            if not busy:
                return
            wait([apart.connection for _, apart in busy], timeout=0.5)
            for entry in list(busy):
                if entry[1].is_over():
                    busy.remove(entry)
                    yield entry
    finally:
        for _, apart in busy:
            apart.stop()


def _serve(connection: Connection, stacks: str, work: Callable[[], Iterable[Any]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stacks, "w", encoding="utf-8") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        torch.set_num_threads(1)
        logging.disable(logging.CRITICAL)
        for result in work():
            connection.send(result)
    connection.close()
    os._exit(0)
