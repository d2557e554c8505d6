"""The load on the soak's service: long jobs, small jobs that come and go, and clients that follow them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from random import Random
from typing import Any, TypeVar

from asyncpipe.service.client import JobClient
from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobState, JobStateError
from asyncpipe.service.store.job_store import JobFilter
from asyncpipe.service.training_service import TrainingService
from tests.campaigns.soak.workload import ENTRY
from tests.support.store_helpers import check_history

__all__ = ["DEVICES", "EVERY", "LIMITED", "SMALL", "Crowd", "Tally", "account", "submission", "unfinished"]

_T = TypeVar("_T")

LONG: Mapping[str, Mapping[str, Any]] = {
    "foreground of weight 1": {},
    "foreground of weight 3": {"weight": 3.0},
    "background": {"priority_class": "background"},
}
"""Jobs of which one each always runs, with what they add to the submission."""
SMALL, MEASURED = "small", "measured"
DEVICES, LIMITED = ("cpu:0", "cpu:1"), "cpu:2"
"""Memory is limited on ``LIMITED`` only. Jobs that run there are measured before they start, and take no faults because
the watchdog does not guard a measurement."""
LONG_STEPS, EVERY = 400, 20
MOST_SMALL = 2
MOST_TEXT = 300
SEVERAL_RETRIES = 1000
"""Practically unlimited: a long job goes back to its snapshots as often as needed."""


class Tally:
    """What the soak observed beside its samples: only counts, so that the tally itself does not grow."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        """Requests to the service that succeeded."""
        self.refused: Counter[str] = Counter()
        """Requests that it legitimately refused, for example because the job had ended already."""
        self.surprises: Counter[str] = Counter()
        """Unexpected errors."""

    async def ask(self, what: str, request: Awaitable[_T]) -> _T | None:
        """Await ``request`` and count its outcome; returns its result, or ``None`` if it failed or was refused."""
        try:
            found = await request
        except JobStateError:
            self.refused[what] += 1
        except Exception as error:  # noqa: BLE001 - a part of the report
            self.surprises[f"{what}: {type(error).__name__}: {error}"[:200]] += 1
        else:
            self.done[what] += 1
            return found
        return None


def submission(name: str, steps: int, seed: int, **more: Any) -> dict[str, Any]:
    """A job with two stages on ``DEVICES``, as a client submits it."""
    return {
        "name": name,
        "entry": ENTRY,
        "pipeline": {"devices": list(DEVICES), "microbatches": 4},
        "training": {"steps": steps, "batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 10, "seed": seed},
        "snapshots": {"every": EVERY, "keep": 2},
        "faults": {"non_finite": "skip", "snapshot_retries": SEVERAL_RETRIES},
        **more,
    }


async def all_jobs(service: TrainingService) -> AsyncIterator[JobRecord]:
    """Every job in the store."""
    after = None
    while page := await service.list(after=after):
        for record in page:
            yield record
        after = page[-1].id


async def unfinished(service: TrainingService) -> tuple[JobRecord, ...]:
    """The jobs that are queued, running or paused."""
    return await service.list(JobFilter(frozenset(JobState) - FINAL_STATES))


class Crowd:
    """Submits the jobs that should run and do not, alternately by the service's methods and by HTTP."""

    def __init__(self, service: TrainingService, client: JobClient, tally: Tally, random: Random) -> None:
        self._service = service
        self._client = client
        self._tally = tally
        self._random = random
        self._submitted = 0
        self._followers: set[asyncio.Task[None]] = set()

    async def fill(self) -> None:
        """Submit the long jobs that have ended, and a small one if there are few."""
        there = Counter(record.spec.name for record in await unfinished(self._service))
        for name, special in LONG.items():
            if not there[name]:
                await self._submit(submission(name, LONG_STEPS, self._submitted, **special))
        if there[SMALL] < MOST_SMALL:
            steps = self._random.randint(5, 40)
            await self._submit(submission(SMALL, steps, self._submitted, faults={"snapshot_retries": 1}))
        if not there[MEASURED]:
            alone = {"devices": [LIMITED], "microbatches": 2}
            meets_none = {"parameters": {"faults": False}, "faults": {}}
            await self._submit(submission(MEASURED, 20, self._submitted, pipeline=alone, **meets_none))

    async def close(self) -> None:
        """Cancel the followers that are left."""
        for follower in self._followers:
            follower.cancel()
        if self._followers:
            await asyncio.wait(self._followers)

    async def _submit(self, job: Mapping[str, Any]) -> None:
        self._submitted += 1
        key = f"soak-{self._submitted}"
        if self._submitted % 2:
            made = await self._tally.ask("submit", self._service.submit(job, key))
            if made is not None:
                self._watch(made[0].id)
            return
        asked = await self._tally.ask("submit by HTTP", asyncio.to_thread(self._client.submit, job, key))
        again = await self._tally.ask("submit again", self._service.submit(job, key))
        if asked is not None and again is not None and (again[1] or again[0].id != asked["id"]):
            self._tally.surprises["the same key made two jobs"] += 1

    def _watch(self, job: str) -> None:
        """Start to follow a job, to its end or for a few events."""
        most = None if self._random.random() < 0.5 else self._random.randint(1, 20)
        task = asyncio.create_task(self._follow(job, most))
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)

    async def _follow(self, job: str, most: int | None) -> None:
        async def events() -> None:
            seen = 0
            following: Any = self._service.follow(job)
            async with aclosing(following):
                async for _ in following:
                    seen += 1
                    if seen == most:
                        return

        await self._tally.ask("follow a job", events())


# At the end


async def account(service: TrainingService, progress: Callable[[str], None]) -> dict[str, Any]:
    """Final states and causes of all jobs; the jobs that have an illegal history or an incomplete loss curve."""
    states: dict[str, Counter[str]] = {}
    causes: Counter[str] = Counter()
    illegal: list[str] = []
    torn: list[str] = []
    attempts = 0
    async for record in all_jobs(service):
        states.setdefault(record.spec.name, Counter())[record.state] += 1
        attempts += record.attempts
        if record.state is JobState.FAILED:
            causes[f"{record.spec.name}: {record.cause}"[:MOST_TEXT]] += 1
        history = await service.history(record.id)
        try:
            check_history(history)
            assert history[-1].to_state is record.state
        except AssertionError as error:
            illegal.append(f"{record.id}: {error}")
        if record.state is JobState.FINISHED and not await _is_whole(service, record):
            torn.append(record.id)
    progress(f"{sum(states[name].total() for name in states)} jobs checked")
    return {
        "states": {name: dict(sorted(counts.items())) for name, counts in sorted(states.items())},
        "attempts": attempts,
        "causes": dict(causes.most_common()),
        "illegal_histories": illegal,
        "torn_curves": torn,
    }


async def _is_whole(service: TrainingService, record: JobRecord) -> bool:
    """Whether the loss curve has every step exactly once, in order."""
    steps: list[int] = []
    while rows := await service.losses(record.id, after=steps[-1] if steps else 0):
        steps += [row.step for row in rows]
    training = record.spec.document["training"]
    assert isinstance(training, dict)
    return steps == list(range(1, int(str(training["steps"])) + 1))
