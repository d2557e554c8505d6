"""A week of a team in virtual time: the service's own queue, placement and usage, against plain queues. No torch.

10 users share 8 devices for a week, and submit 2,000 jobs. The trace is drawn; its features are those that have been
published of Philly (Jeon and others, ATC 2019) and Helios (Hu and others, SC 2021):

jobs      most want one device, few want all; those with more devices run longer
lengths   log-normal: half of them are done in minutes, one in a hundred runs for more than a day
users     a few have most jobs, by Zipf's law, and submit sweeps: several alike at once
arrivals  by day more than by night, on weekdays more than at the weekend

A job of ``SCALE`` seconds in the mean makes the load that is asked for: device seconds over those that there are.

Each job runs as long as the trace says, wherever it is. Jobs do not share devices. Compared are

- ``names``: first come, first served on named devices, as without placement: a user has favourites, and names them;
- ``fifo``: first come, first served on any devices, and whoever waits keeps back all behind;
- ``queue``: the service's queue with users, as it is; ``one user``: the same, where all jobs are one user's.

Jain's index of fairness is (sum x)^2 / (n sum x^2) over users, where x is the device seconds that a user has got, over
those that max-min fairness would have given: at each instant the devices are shared equally by the users who have jobs
that have not ended, and what one of them does not want goes to the others. It is 1 if x is the same for all users, and
1 / n if one user gets all.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import cos, pi
from random import Random
from statistics import fmean, median, quantiles

from asyncpipe.service.job_states import DeviceRequest, JobRecord, JobState
from asyncpipe.service.jobs.job_queue import Candidate, Capacity, JobQueue, QueueAction, decisions
from tests.campaigns.harness import Campaign, Run

__all__ = ["CAMPAIGN"]

WEEK = 7 * 86400.0
SIZES, SHARES = (1, 2, 4, 8), (0.70, 0.18, 0.09, 0.03)
"""Devices of a job, and how many of the jobs want so many."""
SIGMA = 2.0
"""Of the logarithm of a job's length: the mean is 7.4 times the median."""
LONGEST = 86400.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A job of the trace."""

    job: str
    user: str
    at: float
    devices: int
    seconds: float
    favourites: tuple[str, ...]


def trace(seed: int, jobs: int, users: int, devices: Sequence[str], load: float, week: float = WEEK) -> list[Ask]:
    """The jobs, the first first, with so many device seconds over those of the ``week``."""
    random = Random(seed)
    weights = [1 / rank for rank in range(1, users + 1)]
    drawn: list[Ask] = []
    while len(drawn) < jobs:
        user = random.choices(range(users), weights)[0]
        at = _arrival(random, week)
        size = min(random.choices(SIZES, SHARES)[0], len(devices))
        sweep = min(1 + int(random.expovariate(0.5)), jobs - len(drawn))
        first = user * 3 % len(devices)
        favourites = tuple(devices[(first + number) % len(devices)] for number in range(size))
        for _ in range(sweep):
            seconds = random.lognormvariate(0.0, SIGMA) * size**0.5
            drawn.append(Ask("", f"user {user}", at + random.uniform(0.0, 60.0), size, seconds, favourites))
    scale = 1.0
    for _ in range(20):  # What is cut off of the longest ones goes to the others.
        cut = sum(min(each.seconds * scale, LONGEST) * each.devices for each in drawn)
        scale *= load * week * len(devices) / cut
    drawn.sort(key=lambda each: each.at)
    return [
        replace(each, job=f"{number:05}", seconds=min(max(each.seconds * scale, 5.0), LONGEST))
        for number, each in enumerate(drawn)
    ]


def _arrival(random: Random, week: float) -> float:
    """A time of the week: three times as often at 14 h as at 2 h, and a third as often at the weekend."""
    while True:
        at = random.uniform(0.0, week)
        day = at * 7 / week
        rate = (1 - 0.5 * cos(2 * pi * (day - 2 / 24))) / 1.5 / (3 if day >= 5 else 1)
        if random.random() < rate:
            return at


class Plain:
    """First come, first served; whoever waits keeps back all behind, or those that name the same devices."""

    def __init__(self, devices: Sequence[str], *, named: bool) -> None:
        self._devices, self._named = devices, named
        self._waiting: dict[str, Ask] = {}

    def put(self, ask: Ask, now: float) -> None:
        """A job comes."""
        self._waiting[ask.job] = ask

    def next(self, busy: set[str], now: float) -> tuple[str, tuple[str, ...]] | None:
        """The job that begins now, and where."""
        taken = set(busy)
        for ask in self._waiting.values():
            if self._named and taken.isdisjoint(ask.favourites):
                return ask.job, ask.favourites
            free = [each for each in self._devices if each not in taken]
            if not self._named:
                return (ask.job, tuple(free[: ask.devices])) if len(free) >= ask.devices else None
            taken |= set(ask.favourites)
        return None

    def begin(self, job: str, devices: tuple[str, ...], now: float) -> None:
        """It has begun."""
        del self._waiting[job]

    def end(self, job: str, now: float) -> None:
        """It has ended."""


class Real:
    """The service's own queue."""

    def __init__(self, devices: Sequence[str], *, users: bool) -> None:
        self._has, self._users = Capacity(devices, len(devices), share_devices=False), users
        self._queue = JobQueue()
        self._running: dict[str, tuple[str | None, Candidate]] = {}

    def put(self, ask: Ask, now: float) -> None:
        """A job comes."""
        document = {"pipeline": {"devices": {"count": ask.devices}}}
        owner = ask.user if self._users else None
        self._queue.put(JobRecord(ask.job, document, JobState.QUEUED, "submitted", ask.at, ask.at, owner=owner))

    def next(self, busy: set[str], now: float) -> tuple[str, tuple[str, ...]] | None:
        """The job that begins now, and where."""
        waiting = (
            Candidate(each.id, DeviceRequest.of(each.table("pipeline")["devices"]), 0, False, (), 1.0, *passed)
            for each in self._queue.ordered(now)
            for passed in (self._queue.passed(each.id),)
        )
        for decision in decisions(waiting, [each for _, each in self._running.values()], self._has):
            self._queue.follow(decision)
            if decision.action is QueueAction.BEGIN:
                return decision.job, decision.devices
        return None

    def begin(self, job: str, devices: tuple[str, ...], now: float) -> None:
        """It has begun."""
        record = self._queue.get(job)
        assert record is not None
        self._queue.discard(job)
        self._queue.usage.begin(record.owner, job, len(devices), now)
        self._running[job] = record.owner, Candidate(job, record.request, devices=devices)

    def end(self, job: str, now: float) -> None:
        """It has ended."""
        owner, _ = self._running.pop(job)
        self._queue.usage.end(owner, job, now)


Policy = Plain | Real
POLICIES: dict[str, Callable[[Sequence[str]], Policy]] = {
    "names": lambda devices: Plain(devices, named=True),
    "fifo": lambda devices: Plain(devices, named=False),
    "one user": lambda devices: Real(devices, users=False),
    "queue": lambda devices: Real(devices, users=True),
}


def simulate(asks: Sequence[Ask], policy: Policy) -> dict[str, tuple[float, float]]:
    """When each job begins and ends."""
    ends: list[tuple[float, str]] = []
    at: dict[str, tuple[float, float]] = {}
    where: dict[str, tuple[str, ...]] = {}
    by_job, coming = {each.job: each for each in asks}, iter(asks)
    following, now = next(coming, None), 0.0
    while following is not None or ends:
        if following is not None and (not ends or following.at <= ends[0][0]):
            now = following.at
            policy.put(following, now)
            following = next(coming, None)
        else:
            now, job = heappop(ends)
            policy.end(job, now)
            del where[job]
        busy = {device for devices in where.values() for device in devices}
        while (begins := policy.next(busy, now)) is not None:
            job, devices = begins
            assert busy.isdisjoint(devices)
            assert len(set(devices)) == by_job[job].devices
            policy.begin(job, devices, now)
            where[job] = devices
            busy |= set(devices)
            at[job] = now, now + by_job[job].seconds
            heappush(ends, (at[job][1], job))
    assert at.keys() == by_job.keys(), "somebody waits for ever"
    return at


def fair_shares(asks: Sequence[Ask], at: dict[str, tuple[float, float]], devices: int) -> dict[str, float]:
    """The device seconds of each user if all devices were shared max-min fairly at each instant."""
    wanted, fair = defaultdict[str, int](int), defaultdict[str, float](float)
    events = [(each.at, each.devices, each.user) for each in asks]
    events += [(at[each.job][1], -each.devices, each.user) for each in asks]
    now = 0.0
    for then, change, user in sorted(events):
        left, waiting = float(devices), sorted((count, name) for name, count in wanted.items() if count)
        for number, (count, name) in enumerate(waiting):
            share = min(float(count), left / (len(waiting) - number))
            fair[name] += share * (then - now)
            left -= share
        wanted[user] += change
        now = then
    return fair


@dataclass(frozen=True)
class Result:
    """What became of a week."""

    utilization: float
    """Of the devices, until the last job has come."""
    makespan: float
    waits: dict[str, list[float]]
    """By user."""
    small: list[float]
    """The waits of the jobs with one device, and of those with more than half of all."""
    large: list[float]
    fairness: float

    @property
    def all(self) -> list[float]:
        """All waits."""
        return [each for waits in self.waits.values() for each in waits]


def result_of(asks: Sequence[Ask], at: dict[str, tuple[float, float]], devices: int) -> Result:
    """The figures of a week."""
    waits, work, last, used = defaultdict[str, list[float]](list), defaultdict[str, float](float), asks[-1].at, 0.0
    for each in asks:
        began, ended = at[each.job]
        waits[each.user].append(began - each.at)
        work[each.user] += each.devices * each.seconds
        used += each.devices * max(0.0, min(ended, last) - began)
    fair = fair_shares(asks, at, devices)
    rates = [work[user] / fair[user] for user in work]
    fairness = sum(rates) ** 2 / (len(rates) * sum(rate**2 for rate in rates))
    by_size = {size: [at[each.job][0] - each.at for each in asks if each.devices == size] for size in SIZES}
    makespan = max(ended for _, ended in at.values())
    return Result(used / devices / last, makespan, dict(sorted(waits.items())), by_size[1], by_size[8], fairness)


def rows(results: dict[str, Result]) -> Iterator[str]:
    """The figures as tables."""
    yield from (
        "",
        "| policy | utilization | makespan (h) | wait: median, mean, p95 (min) | one device: p95 | 8: p95 |",
    )
    yield "|---|---:|---:|---:|---:|---:|"
    rate = {name: [median(waits) for waits in each.waits.values()] for name, each in results.items()}
    for name, each in results.items():
        waits = f"{median(each.all) / 60:.1f}, {fmean(each.all) / 60:.0f}, {_p95(each.all):.0f}"
        sizes = f"{_p95(each.small):.0f} | {_p95(each.large):.0f}"
        yield f"| {name} | {each.utilization:.1%} | {each.makespan / 3600:.1f} | {waits} | {sizes} |"
    yield from (
        "",
        "| policy | Jain's index | users: least and most median wait (min) | least and most p95 |",
        "|---|---:|---:|---:|",
    )
    for name, each in results.items():
        tails = [_p95(waits) for waits in each.waits.values()]
        middle = f"{min(rate[name]) / 60:.1f}, {max(rate[name]) / 60:.1f}"
        yield f"| {name} | {each.fairness:.3f} | {middle} | {min(tails):.0f}, {max(tails):.0f} |"
    yield from (
        "",
        f"| wait (min): median, p95 | jobs | {' | '.join(results)} |",
        f"|---|---:{'|---:' * len(results)}|",
    )
    for user, waits in next(iter(results.values())).waits.items():
        found = (each.waits[user] for each in results.values())
        cells = " | ".join(f"{median(each) / 60:.1f}, {_p95(each):.0f}" for each in found)
        yield f"| {user} | {len(waits)} | {cells} |"


def _p95(waits: Sequence[float]) -> float:
    """In minutes."""
    return (quantiles(waits, n=20)[-1] if len(waits) > 1 else sum(waits)) / 60


def describe(asks: Sequence[Ask], devices: int) -> str:
    """The trace in a line."""
    lengths = sorted(each.seconds for each in asks)
    ones = sum(each.devices == 1 for each in asks)
    work = sum(each.devices * each.seconds for each in asks)
    least = sum(each.devices * each.seconds for each in asks if each.devices == 1)
    top = sorted((sum(other.user == user for other in asks) for user in {each.user for each in asks}), reverse=True)
    return (
        f"{len(asks)} jobs, {ones / len(asks):.0%} with one device ({least / work:.0%} of the device seconds); length: "
        f"median {median(lengths) / 60:.1f} min, mean {fmean(lengths) / 60:.0f} min, p99 "
        f"{lengths[bisect(range(100), 98) * len(lengths) // 100] / 3600:.1f} h; the first two of {len(top)} users have "
        f"{sum(top[:2]) / len(asks):.0%} of the jobs; load {work / devices / WEEK:.2f}"
    )


def _work(run: Run) -> None:
    options = run.options
    devices = [f"cuda:{number}" for number in range(options.devices)]
    asks = trace(options.seed, options.jobs, options.users, devices, options.load)
    results = {name: result_of(asks, simulate(asks, make(devices)), len(devices)) for name, make in POLICIES.items()}
    run.report.tables += ["", describe(asks, len(devices)), *rows(results)]
    if results["queue"].fairness < results["fifo"].fairness:
        run.report.find("fifo is fairer")


CAMPAIGN = Campaign(
    "week",
    _work,
    {
        "jobs": (2000, "of the week"),
        "users": (10, "of the team"),
        "devices": (8, "of the service"),
        "load": (0.7, "device seconds of all jobs, over those of the week"),
    },
)
