"""The soak's report in Markdown: verdicts first, then the figures behind them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tests.campaigns.soak.samples import MEASURES, spark

__all__ = ["markdown", "problems", "summary"]

MOST_LINES = 25
SURELY_SEEN = 10
"""If this many tasks hung, the watchdog must have given up at least one."""


def problems(figures: Mapping[str, Any]) -> list[str]:
    """Everything that is not in order, a sentence each. Growth is not included: the table of trends shows it."""
    jobs = figures["jobs"]
    found = [f"the history of {text}" for text in jobs["illegal_histories"]]
    found += [f"the loss curve of {job} lacks steps, or has some twice" for job in jobs["torn_curves"]]
    found += [f"{count} × {text}" for text, count in figures["surprises"].items()]
    if figures["last_job"] != "finished":
        found.append(f"the last job, which had no faults, {figures['last_job']}")
    if figures["doubled_threads"]:
        found.append(f"devices with more than one thread at the end: {', '.join(figures['doubled_threads'])}")
    if figures["threads_left"]:
        found.append(f"threads that outlived the service: {', '.join(figures['threads_left'])}")
    taken, given_up = figures["faults"]["hung task"]["taken"], figures["hung_tasks"]
    # Its limit for a task is generous until it has seen such tasks, so it may give up fewer than hung.
    if given_up > taken or (given_up == 0 and taken >= SURELY_SEEN):
        found.append(f"{taken} tasks hung, and the watchdog gave up {given_up:g}")
    return found


def summary(figures: Mapping[str, Any]) -> str:
    """A line for each measure, and one for each problem."""
    lines = [f"{figures['seconds'] / 60:.1f} minutes{', interrupted' if figures['interrupted'] else ''}"]
    for name, trend in figures["trends"].items():
        per_hour = f"{trend['slope']:+,.1f} ± {trend['uncertainty']:,.1f} per hour"
        lines.append(
            f"{MEASURES[name]:20} {trend['first']:12,.0f} → {trend['last']:12,.0f} {per_hour:>30}  {trend['verdict']}"
        )
    wrong = problems(figures)
    return "\n".join([*lines, *(f"not in order: {text}" for text in wrong), *(() if wrong else ("all in order",))])


def markdown(figures: Mapping[str, Any]) -> str:
    """The complete report."""
    return "\n".join([*_head(figures), *_growth(figures), *_faults(figures), *_jobs(figures), *_requests(figures), ""])


def _head(figures: Mapping[str, Any]) -> Iterator[str]:
    grown = [MEASURES[name] for name, trend in figures["trends"].items() if trend["verdict"] == "growth"]
    unclear = [MEASURES[name] for name, trend in figures["trends"].items() if trend["verdict"] == "unclear"]
    dealt = sum(fault["dealt"] for fault in figures["faults"].values())
    minutes = figures["seconds"] / 60
    yield "# Soak of a training service"
    yield ""
    yield (
        f"{minutes:.1f} minutes{', ended early by Ctrl-C' if figures['interrupted'] else ''}; {dealt} faults, one "
        f"every {figures['seconds'] / max(dealt, 1):.1f} s; Python {platform.python_version()}, torch "
        f"{torch.__version__}, {os.cpu_count()} cores."
    )
    yield ""
    yield f"- growth: **{', '.join(grown) or 'none found'}**"
    if unclear:
        yield f"- unclear: {', '.join(unclear)}"
    wrong = problems(figures)
    yield f"- not in order: **{len(wrong) or 'nothing'}**"
    for text in wrong[:MOST_LINES]:
        yield f"  - {text}"


def _growth(figures: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "## Resources of the process"
    yield ""
    yield (
        f"{len(figures['times'])} samples, each after a garbage collection. Slopes are least-squares fits to the "
        "last two thirds, ± two standard errors (widened by the correlation of neighbouring samples). A slope above "
        "three standard errors is growth."
    )
    yield ""
    rows = []
    for name, trend in figures["trends"].items():
        slope = f"{trend['slope']:+,.1f} ± {trend['uncertainty']:,.1f}"
        values = [f"{trend[key]:,.0f}" for key in ("first", "last", "least", "most")]
        rows.append([MEASURES[name], *values, slope, trend["verdict"], f"`{spark(figures['samples'][name])}`"])
    yield from _table(["", "first", "last", "least", "most", "per hour", "verdict", "over time"], rows)


def _faults(figures: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "## Faults"
    yield ""
    yield "A fault is dealt by the soak and taken by the first job that reaches its fault point."
    yield ""
    rows = [[kind, fault["dealt"], fault["taken"]] for kind, fault in figures["faults"].items()]
    yield from _table(["fault", "dealt", "taken"], rows)
    yield ""
    yield (
        f"The watchdog gave up {figures['hung_tasks']:g} tasks. At the end {len(figures['doubled_threads'])} devices "
        f"had more than one thread, and {len(figures['threads_left'])} threads outlived the service."
    )


def _jobs(figures: Mapping[str, Any]) -> Iterator[str]:
    jobs = figures["jobs"]
    states = sorted({state for counts in jobs["states"].values() for state in counts})
    number = sum(sum(counts.values()) for counts in jobs["states"].values())
    yield ""
    yield "## Jobs"
    yield ""
    yield from _table(
        ["job", *states],
        [[name, *(counts.get(state, 0) for state in states)] for name, counts in jobs["states"].items()],
    )
    yield ""
    yield (
        f"{number} jobs, {jobs['attempts']} attempts. Histories with an illegal transition: "
        f"{len(jobs['illegal_histories'])}. Finished jobs whose loss curve lacks a step or has one twice: "
        f"{len(jobs['torn_curves'])}. The last job, submitted after all faults: {figures['last_job']}. "
        f"The service's status afterwards: {figures['status']}."
    )
    if jobs["causes"]:
        yield ""
        yield from _table(["failed because", "jobs"], [[cause, count] for cause, count in jobs["causes"].items()])


def _requests(figures: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "## Requests and log messages"
    yield ""
    rows = [[what, count, figures["refused"].get(what, 0)] for what, count in figures["done"].items()]
    yield from _table(["request", "done", "refused in the job's state"], rows)
    yield ""
    yield from _table(
        ["warning or error", "times"],
        [[f"`{text}`", count] for text, count in list(figures["log"].items())[:MOST_LINES]],
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join(' --- ' for _ in head)}|"
    for row in rows:
        yield f"| {' | '.join(_cell(cell) for cell in row)} |"


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "¦").split())
