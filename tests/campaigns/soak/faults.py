"""The faults that the soak deals to its service: a deck that is shuffled, dealt one by one, and shuffled again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.training_service import TrainingService
from tests.campaigns.soak.jobs import EVERY, SMALL, Tally, unfinished
from tests.campaigns.soak.workload import FAULTS

__all__ = ["Chaos"]

TAKEN: Mapping[str, int] = {
    "stage raises": 1,
    "stage raises at every attempt": 2,
    "backward raises": 1,
    "out of memory": 1,
    "loss is NaN": 1,
    "slow loader": 1,
    "failing loader": 1,
    "hung task": 1,
    "state cannot be copied": 1,
}
"""Faults that a job takes at a fault point of ``workload.py``, and how often in a row."""
SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1")
REFUSED_SECONDS = 3.0
STREAM_BYTES = 400


class Chaos:
    """Deals faults to one service; faults that take a while run concurrently."""

    def __init__(
        self, service: TrainingService, settings: ServiceSettings, url: str, tally: Tally, random: Random
    ) -> None:
        self._service = service
        self._folder = settings.folder / "jobs"
        self._address = urlsplit(url)
        self._tally = tally
        self._random = random
        self.dealt: Counter[str] = Counter()
        self._deck: list[str] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._actions: Mapping[str, Callable[[], Awaitable[None]]] = {
            "pause, then resume": self._pause,
            "cancel": self._cancel,
            "schedule changed": self._change_schedule,
            "snapshots refused by the folder": self._refuse_snapshots,
            "client leaves a stream": self._leave_stream,
            "client leaves in its request": self._leave_request,
            "request that is wrong": self._wrong_request,
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of all faults."""
        return (*TAKEN, *self._actions)

    def deal(self) -> None:
        """Deal the next fault of the deck."""
        if not self._deck:
            self._deck = list(self.kinds)
            self._random.shuffle(self._deck)
        kind = self._deck.pop()
        self.dealt[kind] += 1
        if kind in TAKEN:
            FAULTS.arm(kind, TAKEN[kind])
            return
        task = asyncio.create_task(self._do(kind))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def counts(self) -> dict[str, dict[str, int]]:
        """How often each fault was dealt, and how often a job took it (once for each attempt that failed)."""
        return {
            kind: {"dealt": self.dealt[kind], "taken": FAULTS.taken[kind] if kind in TAKEN else self.dealt[kind]}
            for kind in self.kinds
        }

    async def close(self) -> None:
        """Disarm all faults, cancel those under way and wait until they have ended."""
        FAULTS.clear()
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def _do(self, kind: str) -> None:
        try:
            await self._actions[kind]()
        except Exception as error:  # noqa: BLE001 - a part of the report
            self._tally.surprises[f"{kind}: {type(error).__name__}: {error}"[:200]] += 1

    # Jobs

    async def _some(self, *, small: bool | None = None, states: tuple[JobState, ...] = ()) -> JobRecord | None:
        """A random unfinished job of the given size and states; ``None`` if there is none."""
        found = [
            record
            for record in await unfinished(self._service)
            if (small is None or (record.spec.name == SMALL) is small) and (not states or record.state in states)
        ]
        return self._random.choice(found) if found else None

    async def _pause(self) -> None:
        record = await self._some(states=(JobState.RUNNING, JobState.QUEUED))
        if record is None or await self._tally.ask("pause", self._service.pause(record.id)) is None:
            return
        try:
            await asyncio.sleep(self._random.uniform(0.0, 4.0))
        finally:
            await self._tally.ask("resume", self._service.resume(record.id))

    async def _cancel(self) -> None:
        record = await self._some(small=self._random.random() < 0.8)
        if record is not None:
            await self._tally.ask("cancel", self._service.cancel(record.id))

    async def _change_schedule(self) -> None:
        record = await self._some()
        if record is not None:
            schedule = self._random.choice(SCHEDULES)
            await self._tally.ask("change the schedule", self._service.change_schedule(record.id, schedule))

    async def _refuse_snapshots(self) -> None:
        """Make folders under the names of a job's next snapshots for a few seconds, so that writing those fails."""
        record = await self._some(small=False, states=(JobState.RUNNING,))
        if record is None:
            return
        folder = self._folder / record.id / "snapshots"
        nexts = [folder / f"step-{step}.incomplete" for step in range(record.step + 1, record.step + 4 * EVERY)]
        taken = await asyncio.to_thread(_occupy, nexts)
        try:
            await asyncio.sleep(REFUSED_SECONDS)
        finally:
            await asyncio.shield(asyncio.to_thread(_remove, taken))

    # Clients

    async def _leave_stream(self) -> None:
        """Read some of a job's events, from the API or as the live page does, and break the connection."""
        record = await self._some()
        if record is not None:
            path = self._random.choice(("/v1/jobs/{}/events", "/jobs/{}/events")).format(record.id)
            await self._exchange(self._head("GET", path, "Accept: text/event-stream"), STREAM_BYTES)

    async def _leave_request(self) -> None:
        """Break the connection in the middle of a request that submits a job."""
        head = self._head("POST", "/v1/jobs", "Content-Type: application/json", "Content-Length: 1000")
        await self._exchange(head + b'{"name": "half', 0)

    async def _wrong_request(self) -> None:
        """Submit an invalid job, whose entry nobody registered."""
        body = json.dumps({"name": "wrong", "entry": "os:system", "parameters": {"command": "true"}}).encode()
        head = self._head("POST", "/v1/jobs", "Content-Type: application/json", f"Content-Length: {len(body)}")
        answer = await self._exchange(head + body, 16)
        if answer and not answer.startswith(b"HTTP/1.1 4"):
            self._tally.surprises[f"a wrong request was answered with {answer[:16]!r}"] += 1

    def _head(self, method: str, path: str, *headers: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._address.netloc}", *headers, "", ""]
        return "\r\n".join(lines).encode()

    async def _exchange(self, request: bytes, wanted: int) -> bytes:
        """Send ``request``, read the first ``wanted`` bytes of the answer and reset the connection."""
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        answer = b""
        try:
            writer.write(request)
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(self._random.uniform(0.2, 2.0)):
                    await writer.drain()
                    while len(answer) < wanted and (more := await reader.read(wanted - len(answer))):
                        answer += more
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()
        return answer


def _occupy(paths: list[Path]) -> list[Path]:
    """Make a folder at each path that is free; returns those that were made."""
    made = []
    for path in paths:
        with suppress(OSError):
            path.mkdir()
            made.append(path)
    return made


def _remove(paths: list[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.rmdir()
