"""Writes snapshots of a run to disk while training continues.

Training waits for a copy of the state in host memory, but not for the disk::

    loop      step N ─▶ copy ─▶ step N+1 ─▶ step N+2 ─▶ …        and, at the end of the run, for the last snapshot
                          │
    a thread              └─▶ step-N.incomplete/ ─▶ fsync ─▶ rename: step-N/ ─▶ remove the oldest

Where stages live in workers, each worker copies and writes what it has; here the rest is written, the manifest last.

Only one snapshot is written at a time, so that there is at most one copy of the state. If the disk is slower than the
interval, the next snapshot is taken after the first step that finds the previous one finished. A snapshot that cannot
be written is logged, reported to the progress sink and counted; the next one is tried when it is due.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncpipe import __version__
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.ops.model.state_files import copied_to_cpu
from asyncpipe.runtime.thread_calls import wait_to_end
from asyncpipe.train.blocking_calls import in_thread
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import ProgressSink
from asyncpipe.train.snapshots.format import Manifest, write_snapshot
from asyncpipe.train.snapshots.resume import ResumePoint, is_kept_forever
from asyncpipe.train.snapshots.stages_in_workers import StagesInWorkers
from asyncpipe.train.workload import Resumable

__all__ = ["SnapshotWriter"]

_logger = logging.getLogger(__name__)


class SnapshotWriter:
    """Takes the snapshots of one run of ``job``: at an interval of steps and after the last; none if it wants none.

    An async context manager for one loop; leaving it waits for the snapshot that is being written. ``progress`` and
    ``collector`` are told of each snapshot that is on disk and of each failure. Call ``resume.open_folder`` before;
    ``resumed`` is its result.
    """

    def __init__(
        self,
        job: Job,
        collector: PipelineCollector | None = None,
        resumed: ResumePoint | None = None,
        progress: ProgressSink | None = None,
        saved: Callable[[], object] = lambda: None,
    ) -> None:
        """``saved`` is called behind each snapshot that is on disk, as ``progress`` is."""
        self._table = job.snapshots
        self._job = job
        self._schedule_sha256: str | None = None
        self._stages: StagesInWorkers | None = None
        self._collector = collector
        self._progress = progress if progress is not None else ProgressSink()
        self._saved = saved
        self._begun = 0 if resumed is None else resumed.step
        """The step of the newest snapshot that was begun."""
        self._number = 0 if resumed is None else resumed.manifest.number
        """How many snapshots were written, including those of earlier processes."""
        self._last = None if resumed is None else resumed.path
        self._saving: asyncio.Task[None] | None = None
        self._removable: deque[Path] = deque([] if resumed is None else resumed.removable)
        """The snapshots on disk that are not kept forever, oldest first."""

    @property
    def last(self) -> Path | None:
        """The newest snapshot on disk."""
        return self._last

    def describe(self, job: Job, schedule_sha256: str) -> None:
        """Write this description into the manifest of each snapshot from now on."""
        self._job, self._schedule_sha256 = job, schedule_sha256

    def leave_to(self, stages: StagesInWorkers) -> None:
        """Let workers write the states of model and optimizer, which are then not among those that are given here.

        They must live until this is left.
        """
        self._stages = stages

    async def after_step(self, step: int, states: Mapping[str, Resumable]) -> None:
        """Take a snapshot if one is due after ``step`` steps and none is being written; each of ``states`` is a file.

        Returns when the states are copied; they must not change meanwhile. Raises only what ``progress`` has raised.
        """
        if await self.is_due(step):
            await self._take(step, states)

    async def is_due(self, step: int) -> bool:
        """Whether ``after_step`` would take one now. Raises only what ``progress`` has raised."""
        if self._saving is not None and self._saving.done():
            await self.finish()
        return self._table is not None and step - self._begun >= self._table.every and self._saving is None

    async def after_last_step(self, step: int, states: Mapping[str, Resumable]) -> None:
        """Take a snapshot of the end of the run, unless there is one; first waits for the one that is being written."""
        if self._table is not None and step > self._begun:
            await self.finish()
            await self._take(step, states)

    async def after_loss(self, step: int, states: Mapping[str, Resumable]) -> None:
        """A worker is lost: take one of what others have, as it was after ``step`` steps, and wait until it is on disk.

        None if there is one already.
        """
        await self.finish()
        if self._table is not None and (self._last is None or self._last.name != f"step-{step}"):
            await self._take(step, states)
            await self.finish()

    async def finish(self) -> None:
        """Wait until the snapshot that is being written, if any, is on disk or has failed."""
        if self._saving is not None:
            try:
                await wait_to_end(self._saving)
            finally:
                self._saving = None

    async def __aenter__(self) -> SnapshotWriter:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            await self.finish()
        except Exception:
            # Raised by the progress sink; if the run already ends with an error, that one matters more.
            if error is None:
                raise

    async def _take(self, step: int, states: Mapping[str, Resumable]) -> None:
        assert self._table is not None
        self._begun = step
        started = time.perf_counter()
        try:
            copied = await in_thread(lambda: _copy_states(states, self._stages))
        except Exception as error:  # noqa: BLE001 - reported and counted
            self._report_failure(step, self._table.folder, error)
            return
        tables = self._job.model_dump(mode="json", include={"job", "pipeline", "training"})
        manifest = Manifest(
            step=step,
            number=self._number + 1,
            job=self._job.name,
            schedule=self._job.pipeline.schedule,
            schedule_sha256=self._schedule_sha256,
            parameters=tables,
            versions={
                "asyncpipe": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        )
        self._saving = asyncio.create_task(self._save(self._table.folder / f"step-{step}", copied, manifest, started))

    async def _save(self, path: Path, states: dict[str, Any], manifest: Manifest, started: float) -> None:
        assert self._table is not None
        try:
            stages = self._stages
            await self._progress.keep()
            await in_thread(lambda: write_snapshot(path, states, manifest, stages.write if stages else None))
        except Exception as error:  # noqa: BLE001 - reported and counted
            self._report_failure(manifest.step, path.parent, error)
            return
        self._last, self._number = path, manifest.number
        if self._collector is not None:
            self._collector.snapshot_taken(time.perf_counter() - started, time.time())
        if not is_kept_forever(manifest.number, self._table):
            self._removable.append(path)
        while len(self._removable) > self._table.keep:
            await in_thread(partial(_remove, self._removable.popleft()))
        self._saved()
        self._progress.snapshot(manifest.step, path)

    def _report_failure(self, step: int, folder: Path, error: Exception) -> None:
        cause = _cause(error)
        _logger.error("no snapshot of step %d in %s: %s", step, folder, cause)
        if self._collector is not None:
            self._collector.snapshot_failed()
            self._collector.observer_failed("snapshot")
        self._progress.noted(logging.ERROR, f"no snapshot of step {step}: {cause}")


def _cause(error: BaseException) -> str:
    """The system's own description of the failure if there is one, else that of ``error``."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link.strerror or str(link)
        link = link.__context__  # torch raises another error when it cannot close a file that could not be written.
    return f"{type(error).__name__}: {error}"


def _copy_states(states: Mapping[str, Resumable], stages: StagesInWorkers | None) -> dict[str, Any]:
    """The states, copied to the CPU. Blocks."""
    # All states are collected before the first is copied, so that no two tensors can have the same address in turn.
    collected = {name: state.state_dict() for name, state in states.items()}
    if stages is not None:
        collected["optimizer"] = stages.copy()
    copied: dict[str, Any] = copied_to_cpu(collected)
    return copied


def _remove(snapshot: Path) -> None:
    """Remove an old snapshot; renamed first, so that a partly removed one never looks complete."""
    incomplete = snapshot.with_name(f"{snapshot.name}.incomplete")
    try:
        snapshot.rename(incomplete)
        shutil.rmtree(incomplete)
    except OSError as error:
        _logger.warning("the old snapshot %s was not removed: %s", snapshot, error.strerror)
