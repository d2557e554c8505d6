"""Which of the ended jobs' data is not kept: a pure function of what there is, the rules and the time.

::

    ended jobs, the newest first    ■ ■ ■ ■ ■ ■ ■ ■ ■ ■
    days = 30, count = 8            ──── kept ────┊ ▲ ▲     the rest goes: what is older, too many, or too large

Each kind has its rule: whole jobs first, then snapshots, losses and logs of those that stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from asyncpipe.service.settings.retention_settings import RetentionRule, RetentionSettings

__all__ = ["EndedJob", "KeptBytes", "Kind", "Removal", "removals"]

DAY = 86400.0


class Kind(StrEnum):
    """What a rule is about."""

    JOBS = "jobs"
    SNAPSHOTS = "snapshots"
    LOSSES = "losses"
    LOGS = "logs"
    LEFTOVERS = "leftovers"
    """What a process left that was killed while it wrote; always removed."""


class KeptBytes(NamedTuple):
    """What a job has on disk, in bytes, by kind."""

    snapshots: int = 0
    losses: int = 0
    logs: int = 0
    leftovers: int = 0

    def of(self, kind: Kind) -> int:
        """Those of one kind; all for whole jobs."""
        return sum(self) if kind is Kind.JOBS else int(getattr(self, kind.value))


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended, and what it has."""

    id: str
    name: str
    ended: float
    """Unix time."""
    bytes: KeptBytes


class Removal(NamedTuple):
    """Something that is not kept."""

    job: str
    name: str
    kind: Kind
    bytes: int
    reason: str


def removals(jobs: Iterable[EndedJob], rules: RetentionSettings, now: float) -> list[Removal]:
    """What of ``jobs`` is not kept at the Unix time ``now``."""
    newest_first = sorted(jobs, key=lambda job: (job.ended, job.id), reverse=True)
    found = _beyond(newest_first, Kind.JOBS, rules.jobs, now)
    gone = {each.job for each in found}
    left = [job for job in newest_first if job.id not in gone]
    for kind, rule in ((Kind.SNAPSHOTS, rules.snapshots), (Kind.LOSSES, rules.losses), (Kind.LOGS, rules.logs)):
        found += _beyond([job for job in left if job.bytes.of(kind)], kind, rule, now)
    reason = "left by a process that was killed"
    found += [
        Removal(job.id, job.name, Kind.LEFTOVERS, job.bytes.leftovers, reason) for job in left if job.bytes.leftovers
    ]
    return found


def _beyond(jobs: Sequence[EndedJob], kind: Kind, rule: RetentionRule, now: float) -> list[Removal]:
    """What is beyond the limits of ``rule``, of ``jobs`` with the newest first."""
    found, total = [], 0
    if rule.is_empty:
        return []
    for index, job in enumerate(jobs):
        size = job.bytes.of(kind)
        total += size
        age = (now - job.ended) / DAY
        reason = ""
        if rule.days is not None and age > rule.days:
            reason = f"ended {age:.1f} days ago, days = {rule.days:g}"
        elif rule.count is not None and index >= rule.count:
            reason = f"{index} newer ones, count = {rule.count}"
        elif rule.bytes is not None and total > rule.bytes:
            reason = f"{total} bytes with the newer ones, bytes = {rule.bytes}"
        if reason:
            found.append(Removal(job.id, job.name, kind, size, reason))
    return found
