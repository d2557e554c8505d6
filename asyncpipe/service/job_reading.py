"""What can be asked about the jobs of a service: their records, events, losses, pages and files."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from asyncpipe.observe.live import LiveView
from asyncpipe.service.access import Whose
from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobState, Transition
from asyncpipe.service.jobs.artifacts import Artifact, JobFiles, OpenArtifact, event_lines, loss_lines
from asyncpipe.service.jobs.job_log import JobLog
from asyncpipe.service.jobs.last_view import MOST, RECENT, past_view
from asyncpipe.service.jobs.manager import Manager
from asyncpipe.service.jobs.outlook import Outlook
from asyncpipe.service.jobs.run_log import SaidPage, last_said, read_said, runs_in
from asyncpipe.service.service_loop import ServiceDrainingError, ServiceLoop
from asyncpipe.service.store.device_runs import DeviceRun
from asyncpipe.service.store.failures import FailureGroup
from asyncpipe.service.store.finding import JobFigures
from asyncpipe.service.store.job_records import JobEvent, LossRow
from asyncpipe.service.store.job_store import ALL_JOBS, JobFilter
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["JobReading"]

MOST_LOSSES = 10_000
"""The most rows of a loss curve that one call returns."""
FOLLOW_SECONDS = 0.2
"""Between two looks at whether a job has said something."""


class JobReading(ABC):
    """The half of ``TrainingService`` that changes nothing. Methods may be called from any loop."""

    loop: ServiceLoop

    @property
    @abstractmethod
    def manager(self) -> Manager:
        """The manager of the jobs, while the service is open."""

    async def get(self, job: str) -> JobRecord:
        """The job of this id. Raises ``UnknownJobError``."""
        jobs = self.manager.jobs
        return jobs.as_asked(await jobs.store.get(job))

    async def resolve(self, text: str, whose: Whose | None = None) -> str:
        """The id of the job that ``text`` means: its id, the unique beginning of it, or its name if no other has it.

        Jobs that are not of ``whose`` do not count. Raises ``UnknownJobError``, and ``AmbiguousJobError``, which lists
        candidates.
        """
        return await self.manager.jobs.store.resolve(text, whose)

    async def list(
        self,
        wanted: JobFilter = ALL_JOBS,
        limit: int = 100,
        after: str | None = None,
        *,
        newest_first: bool = True,
    ) -> tuple[JobRecord, ...]:
        """At most ``limit`` of the ``wanted`` jobs, the newest first, that come after job ``after`` in this list.

        To read page by page, pass the id of the last job as the next call's ``after``.
        """
        return await self.manager.jobs.store.list(wanted, limit, after, newest_first=newest_first)

    async def history(self, job: str) -> tuple[Transition, ...]:
        """Every transition of ``job``, its submission first. Raises ``UnknownJobError``."""
        return await self.manager.jobs.store.history(job)

    async def outlooks(self, jobs: Sequence[str]) -> Mapping[str, Outlook]:
        """What is known of each of ``jobs`` now beside its record: its speed, its place in the queue."""
        manager = self.manager
        known = await manager.jobs.store.figures(jobs)

        async def ask() -> Mapping[str, Outlook]:
            outlooks = manager.outlooks(jobs).items()
            return {job: replace(each, **known.get(job, JobFigures())._asdict()) for job, each in outlooks}

        return await self.loop.hop(ask())

    async def changes(self, whose: Whose | None = None) -> tuple[Mapping[JobState, int], int]:
        """How many jobs are in each state, and a number that goes up whenever a job changes its state.

        Of the jobs of ``whose``, or of all.
        """
        store = self.manager.jobs.store
        return await store.count(whose), await store.newest_change(whose)

    async def runs(self, since: float) -> Sequence[DeviceRun]:
        """The runs, also of deleted jobs, that ended at ``since`` or later, or have not ended; the oldest first."""
        return await self.manager.jobs.store.runs(since)

    async def past_view(self, job: str) -> LiveView:
        """What the live page of a job shows that does not run. Raises ``UnknownJobError``."""
        manager = self.manager
        record = await manager.jobs.store.get(job)
        rows = await manager.jobs.store.spread_losses(job, MOST)
        recent = await manager.jobs.store.losses(job, max(rows[-1].step - RECENT, 0) if rows else 0, RECENT)
        return await in_thread(lambda: past_view(record, manager.logs.folder / record.id, rows, recent))

    async def follow(self, job: str, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """The past events of ``job`` after event ``after``, then new ones as they happen; steps from now on only.

        Ends when the job has reached a final state, or the service closes. A slow reader misses steps, never a state.
        Raises ``UnknownJobError``.
        """
        manager = self.manager
        store = manager.jobs.store
        await store.get(job)
        use = manager.logs.use(job)
        log: JobLog = await self.loop.hop(use.__aenter__())
        try:
            batches = log.follow(after)
            while events := await self.loop.hop(_next_of(batches)):
                for event in events:
                    yield event
        finally:
            with suppress(ServiceDrainingError):  # The service was closed meanwhile.
                await self.loop.hop(use.__aexit__(None, None, None))

    async def runs_said(self, job: str) -> Sequence[int]:
        """The runs of ``job`` of which it is kept what they said, oldest first. Raises ``UnknownJobError``."""
        folder = self.manager.logs.folder / (await self.get(job)).id
        return await in_thread(partial(runs_in, folder))

    async def said(
        self,
        job: str,
        place: int,
        *,
        tail: int | None = None,
        run: int | None = None,
        stream: str | None = None,
        follow: bool = False,
    ) -> AsyncGenerator[SaidPage, None]:
        """What ``job`` said from ``place`` on, in pages that have lines; with ``tail``, the last lines of that run.

        Only of one ``run`` or ``stream`` if they are given. With ``follow`` it goes on until the job, or that run, has
        ended. Raises ``UnknownJobError``.
        """
        folder = self.manager.logs.folder / (await self.get(job)).id
        if tail is not None:
            page = await in_thread(partial(last_said, folder, place >> 40, tail, stream))
            place = page.next
            yield page
        while follow or tail is None:
            has_ended = not follow or (await self.get(job)).state in FINAL_STATES  # All that it said is there then.
            page = await in_thread(partial(read_said, folder, place))
            if page.lines and run in (None, page.run):
                place = page.next
                if lines := [line for line in page.lines if stream in (None, line.stream)]:
                    yield page._replace(lines=lines)
            elif has_ended or page.lines:
                return
            else:
                await asyncio.sleep(FOLLOW_SECONDS)

    async def failures(self, wanted: JobFilter = ALL_JOBS, limit: int = 100) -> Sequence[FailureGroup]:
        """At most ``limit`` groups of the ``wanted`` jobs that have failed in the same way, the newest first."""
        return await self.manager.jobs.store.failures(wanted, limit)

    async def losses(self, job: str, after: int = 0, limit: int = 1000) -> Sequence[LossRow]:
        """At most ``limit`` steps of the job's loss curve, after step ``after``.

        Each step is there once, with the numbers of a run without interruption. Raises ``UnknownJobError``.
        """
        manager = self.manager
        await self.loop.hop(manager.logs.flush(job))
        return await manager.jobs.store.losses(job, after, min(limit, MOST_LOSSES))

    async def spread_losses(self, job: str, points: int) -> Sequence[LossRow]:
        """At most ``points`` steps of the job's loss curve, evenly spread over it. Raises ``UnknownJobError``."""
        manager = self.manager
        await self.loop.hop(manager.logs.flush(job))
        return await manager.jobs.store.spread_losses(job, min(points, MOST_LOSSES))

    async def artifacts(self, job: str) -> Sequence[Artifact]:
        """What of ``job`` can be downloaded: models, newest first, losses, log, trace.

        Raises ``UnknownJobError``, and ``ArtifactError`` if the disk fails.
        """
        files = await self._files(job)
        return await in_thread(files.found)

    async def open_artifact(self, job: str, name: str, step: int | None = None) -> OpenArtifact:
        """The artifact ``name`` of ``job``, open; of a model, that of the snapshot after ``step``, or of the newest.

        The caller closes it. Raises ``UnknownJobError``,
        ``UnknownArtifactError``, and ``ArtifactError`` if the disk fails.
        """
        files = await self._files(job)
        parts = [part async for part in self._parts(job, name)]
        opened: list[OpenArtifact] = []
        try:
            await in_thread(lambda: opened.append(files.open(name, step, parts)))
        except BaseException:  # Cancelled, though it is open.
            for each in opened:
                each.file.close()
            raise
        return opened[0]

    async def _parts(self, job: str, name: str) -> AsyncIterator[bytes]:
        """The content of an artifact whose rows are in the store, some rows at a time; nothing for any other."""
        store, last = self.manager.jobs.store, 0
        if name == "losses.csv":
            yield f"{','.join(LossRow._fields)}\r\n".encode()
        if name in ("losses.jsonl", "losses.csv"):
            while rows := await self.losses(job, last, MOST_LOSSES):
                last = rows[-1].step
                yield await in_thread(partial(loss_lines, rows, as_csv=name == "losses.csv"))
        elif name == "log.jsonl":
            await self.loop.hop(self.manager.logs.flush(job))
            yield event_lines(await store.events(job))

    async def _files(self, job: str) -> JobFiles:
        manager = self.manager
        record = await manager.jobs.store.get(job)
        run = manager.jobs.running.get(record.id)
        records = () if run is None else run.trace.records
        has_losses = bool(await self.losses(job, 0, 1))
        return JobFiles(manager.logs.folder / record.id, records, record.name, has_losses)


async def _next_of(batches: AsyncGenerator[list[JobEvent], None]) -> list[JobEvent]:
    return await anext(batches, [])
