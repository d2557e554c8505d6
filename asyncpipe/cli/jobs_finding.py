"""``asyncpipe jobs list`` and ``watch``: which jobs, and what becomes of them; ``priority``, ``weight`` and ``tag``."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import count, seconds
from asyncpipe.cli.jobs_text import change_text, jobs_table, plain

if TYPE_CHECKING:
    from asyncpipe.service.client import JobClient

__all__ = ["STATES", "WATCH", "add_every", "add_filters", "filters", "moment", "table_of_jobs", "watch"]

STATES = ("queued", "running", "paused", "finished", "failed", "cancelled", "quarantined")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

WATCH = """\
Show the jobs that have not ended, again and again, until Ctrl-C; with filters as of `list`, those that meet them. Where
the output is no terminal, a line for each change of a job's state.
"""


def moment(text: str) -> float:
    """A Unix time: a number, a date and time as ISO 8601 has it, or a span of time from now (``6h``), as ``-2d``."""
    if found := re.fullmatch(r"([+-]?[0-9]+(?:\.[0-9]+)?)([smhd])", text):
        return time.time() + float(found[1]) * UNITS[found[2]]
    try:
        return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        rule = "must be a time as 2026-12-01T08:00, a Unix time, or a span from now as 6h or -2d"
        raise argparse.ArgumentTypeError(f"{rule}; got {text!r}") from None


def add_filters(parser: argparse.ArgumentParser, limit: int) -> None:
    """Add the options that say which jobs."""
    add = parser.add_argument
    add("--state", action="append", choices=STATES, help="only jobs in this state; may be repeated")
    add("--entry", metavar="ENTRY", help="only jobs of this entry")
    add("--tag", action="append", metavar="TAG", help="only jobs with this tag; may be repeated")
    add("--text", metavar="TEXT", help="only jobs with this text in their name, entry, id, cause or tags")
    add("--since", type=moment, metavar="TIME", help="only jobs that changed since then: 2026-12-01T08:00, or -2d")
    add("--limit", type=count, default=limit, metavar="N", help=f"at most N jobs (default: {limit})")


def filters(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``JobClient.list`` for the options of ``add_filters``."""
    return {
        "entry": args.entry, "tags": args.tag or (), "text": args.text, "since": args.since, "limit": args.limit,
    }  # fmt: skip


def table_of_jobs(jobs: tuple[dict[str, Any], ...]) -> str:
    """A row for each job."""
    shown = [{**job, "cause": job.get("waits_for") or job["cause"]} for job in jobs]
    return jobs_table(shown) if shown else "no jobs"


def watch(client: JobClient, args: argparse.Namespace) -> int:
    """Show jobs again and again."""
    pictures = _pictures(client, args)
    for text in _drawn(pictures) if sys.stdout.isatty() else _changes(pictures):
        if text:
            print(text, flush=True)
    return 0


def _pictures(client: JobClient, args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], ...]]:
    for turn in itertools.count() if args.turns is None else range(args.turns):
        if turn:
            time.sleep(args.every)
        yield tuple(client.list(args.state or STATES[:3], **filters(args)))


def _drawn(pictures: Iterator[tuple[dict[str, Any], ...]]) -> Iterator[str]:
    for jobs in pictures:
        yield f"\x1b[H\x1b[2J{datetime.now():%H:%M:%S}, Ctrl-C ends\n{table_of_jobs(jobs)}"


def _changes(pictures: Iterator[tuple[dict[str, Any], ...]]) -> Iterator[str]:
    before: dict[str, dict[str, Any]] = {}
    for jobs in pictures:
        now = {job["id"]: job for job in jobs}
        lines = [change_text(job) for job in jobs[::-1] if before.get(job["id"], {}).get("state") != job["state"]]
        lines += [f"{plain(job['name'])} ({plain(each)}) is {plain(job['state'])} no more"
                  for each, job in before.items() if each not in now]  # fmt: skip
        yield "\n".join(lines)
        before = now


def add_every(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``watch`` beside its filters."""
    parser.add_argument("--every", type=seconds, default=2.0, metavar="SECONDS", help="how often (default: 2)")
    parser.add_argument("--turns", type=count, metavar="N", help="end after N times")
