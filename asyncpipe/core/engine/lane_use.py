"""How long other jobs had a lane, for each job that has a step under way there.

What a task of one job waits for, once its inputs are there, is the scheduler's delay or another job's use of the
device. The two are told apart by an account for each job: moments, and the seconds until then in which another job had
the lane::

    the lane    ▓▓b▓▓ a ▓▓▓b▓▓▓ ····· a     b and a: tasks of two jobs;  ····: empty, and kept for b, though a is ready
    a's account 0───2   2─────5─────7       seconds that others had it; level while a runs, or the lane is just free

Another job has the lane while a task of its own is the first that the device holds, and while the lane is kept empty
for it although a task of this job is ready. The account is a line between a bounded number of points; where there would
be more, every other one is left out, so all its totals stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from asyncpipe.core.policies.jobs import JobAccount

__all__ = ["MOST_POINTS", "LaneUse", "Taken", "spans_taken"]

MOST_POINTS = 2048
"""Of one account. A step with more tasks of others between its own has a coarser one."""

Taken = Sequence[tuple[float, float]]
"""(time, seconds until then in which another job had the lane), in the order of time; a straight line in between."""


class LaneUse:
    """The accounts of one lane. Mutated by the scheduler alone."""

    def __init__(self) -> None:
        self._accounts: dict[JobAccount, list[tuple[float, float]]] = {}
        self._busy_since = 0.0
        """When the first of the tasks in flight became that, if there are any."""
        self._kept: tuple[float, tuple[JobAccount, ...]] | None = None
        """Since when the lane is kept empty, and which jobs have a ready task there."""

    def begin(self, job: JobAccount, now: float) -> None:
        """A step of ``job`` begins."""
        self._accounts.setdefault(job, [(now, 0.0)])

    def handed_over(self, now: float, *, is_first: bool) -> None:
        """A task was handed over; ``is_first`` if the lane was empty."""
        self._end_keeping(now)
        if is_first:
            self._busy_since = now

    def ended(self, job: JobAccount, now: float) -> None:
        """A task of ``job``, the first that the device holds, has ended or failed."""
        for other, account in self._accounts.items():
            if other is not job:
                _add(account, self._busy_since, now)
        self._busy_since = max(self._busy_since, now)

    def keep(self, waiting: Iterable[JobAccount], now: float) -> None:
        """The lane is empty, and stays so for somebody else although tasks of ``waiting`` are ready."""
        jobs = tuple(waiting)
        if self._kept is None or self._kept[1] != jobs:
            self._end_keeping(now)
            self._kept = (now, jobs) if jobs else None

    def taken(self, job: JobAccount) -> Taken:
        """The account of ``job``; empty if no other has had the lane."""
        account = self._accounts.get(job, [])
        return tuple(account) if len(account) > 1 else ()

    def end(self, job: JobAccount) -> None:
        """No step of ``job`` is under way any more."""
        self._accounts.pop(job, None)

    def _end_keeping(self, now: float) -> None:
        if self._kept is not None:
            since, jobs = self._kept
            self._kept = None
            for job in jobs:
                if (account := self._accounts.get(job)) is not None:
                    _add(account, since, now)


def spans_taken(taken: Taken, since: float, until: float) -> list[tuple[float, float]]:
    """When another job had the lane, between ``since`` and ``until``: (begin, end) of each span, in their order."""
    found: list[tuple[float, float]] = []
    for (start, before), (end, total) in pairwise(taken):
        begin, over = max(start, since), min(end, until)
        if over <= begin or total - before < (end - start) / 2:
            continue
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, over))
    return found


def _add(account: list[tuple[float, float]], start: float, end: float) -> None:
    """Another job had the lane from ``start`` to ``end``. What the account has already is not counted twice."""
    last, total = account[-1]
    start = max(start, last)
    if end <= start:
        return
    if start > last:
        account.append((start, total))
    account.append((end, total + end - start))
    if len(account) > MOST_POINTS:
        del account[1:-1:2]
