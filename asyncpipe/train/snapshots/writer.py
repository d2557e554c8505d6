"""Snapshots of a run on disk, written while it trains on.

Training waits for a copy of the state in the host's memory, never for the disk::

    loop      step N ─▶ copy ─▶ step N+1 ─▶ step N+2 ─▶ …        and, at the run's end, for the last snapshot
                          │
    a thread              └─▶ step-N.incomplete/ ─▶ fsync ─▶ rename: step-N/ ─▶ remove the oldest

What is in one is said in ``snapshot_files.py``, how a run goes on from one in ``resume.py``. One snapshot is in
flight at a time, so that at most one copy of the state is held: where the disk is slower than the training, the next
one is taken late, after the first step that finds the last one written. One that cannot be written costs a line in
the log, a note to whoever watches the run and a count, and the next one is tried when it is due.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncpipe import __version__
from asyncpipe.core.engine.events import FailureCounter
from asyncpipe.train.blocking_calls import in_thread, wait_to_end
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import NullProgress, ProgressSink
from asyncpipe.train.snapshots.format import write_snapshot
from asyncpipe.train.snapshots.resume import ResumePoint, is_for_good

__all__ = ["SnapshotListener", "SnapshotWriter", "Stateful"]

_logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """A part of a run that can be saved: a model, an optimizer, a pipeline."""

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and tuples of tensors and plain values."""


class SnapshotListener(FailureCounter, Protocol):
    """Counts snapshots; one that fails is a ``snapshot`` trouble, too. Called by the threads that copy and write."""

    def snapshot_taken(self, seconds: float, at: float) -> None:
        """A snapshot is on disk, ``seconds`` after its step; ``at`` is the Unix time."""

    def snapshot_failed(self) -> None:
        """A snapshot could not be taken."""


class SnapshotWriter:
    """Takes the snapshots of one run of ``job``: after every so many steps and after the last; none if it wants none.

    Used on one loop, as an async context manager, whose end waits for the snapshot in flight. ``progress`` is told of
    each that is on disk, and of each that failed. ``resume.open_folder`` goes before; ``resumed`` is what it found,
    where the run goes on from that.
    """

    def __init__(
        self,
        job: Job,
        listener: SnapshotListener | None = None,
        resumed: ResumePoint | None = None,
        progress: ProgressSink | None = None,
    ) -> None:
        self._table = job.snapshots
        self._about: dict[str, Any] = {
            "versions": {
                "asyncpipe": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        }
        self.describe(job)
        self._listener = listener
        self._progress: ProgressSink = progress if progress is not None else NullProgress()
        self._begun = 0 if resumed is None else resumed.step
        """The step of the newest snapshot that was begun."""
        self._number = 0 if resumed is None else resumed.number
        """How many were written, by earlier processes as well."""
        self._last = None if resumed is None else resumed.path
        self._writing: asyncio.Future[None] | None = None
        self._passing: deque[Path] = deque([] if resumed is None else resumed.passing)
        """Those that are there and not for good, the oldest first."""
        self._news: deque[Callable[[], None]] = deque()
        """What threads have to tell the sink, which the loop does."""
        self._raised: Exception | None = None
        """By the sink, where nobody waited."""

    @property
    def last(self) -> Path | None:
        """The newest one that is on disk."""
        return self._last

    def describe(self, job: Job, **about: Any) -> None:
        """Have ``snapshot.json`` say what ``job`` is now, and this too, from the next snapshot on; JSON values."""
        tables = job.model_dump(mode="json", include={"job", "pipeline", "training"})
        self._about |= {"job": job.name, "schedule": job.pipeline.schedule, "parameters": tables, **about}

    async def after_step(self, step: int, states: Mapping[str, Stateful]) -> None:
        """Take a snapshot if one is due after ``step`` steps and none is in flight; each of ``states`` makes a file.

        Returns when the states are copied. Nothing may change them meanwhile. Raises nothing of its own, but what the
        sink raised.
        """
        self._tell()
        in_flight = self._writing is not None and not self._writing.done()
        if self._table is not None and step - self._begun >= self._table.every and not in_flight:
            await self._take(step, states)

    async def after_last_step(self, step: int, states: Mapping[str, Stateful]) -> None:
        """Take a snapshot of the run's end, unless there is one; waits for the one in flight first."""
        if self._table is not None and step > self._begun:
            await self._finish()
            await self._take(step, states)

    async def __aenter__(self) -> SnapshotWriter:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            await self._finish()
        except Exception:
            # The sink's: where the run ends with an error already, that is the one to know.
            if error is None:
                raise

    async def _take(self, step: int, states: Mapping[str, Stateful]) -> None:
        self._begun = step
        started = time.perf_counter()
        copied = await in_thread(lambda: self._copy(step, states))
        if copied is not None:
            loop = asyncio.get_running_loop()
            self._writing = loop.run_in_executor(None, self._write, step, copied, {**self._about}, started)
            self._writing.add_done_callback(lambda _: self._tell_alone())
        self._tell()

    async def _finish(self) -> None:
        if self._writing is not None:
            await wait_to_end(self._writing)
        self._tell()

    def _tell(self) -> None:
        """Tell the sink what is new; raises what it raises, now or when nobody waited."""
        while self._news:
            self._news.popleft()()
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised

    def _tell_alone(self) -> None:
        try:
            self._tell()
        except Exception as error:  # noqa: BLE001 - the run ends with it as soon as it is asked
            self._raised = error

    # In threads

    def _copy(self, step: int, states: Mapping[str, Stateful]) -> dict[str, Any] | None:
        try:
            # All are there before the first is copied: no tensor may take the place of another one in memory.
            taken = {name: stateful.state_dict() for name, stateful in states.items()}
            copied: dict[str, Any] = _on_cpu(taken, {})
        except Exception as error:  # noqa: BLE001 - told and counted
            self._failed(step, error)
            return None
        return copied

    def _write(self, step: int, states: dict[str, Any], about: dict[str, Any], started: float) -> None:
        assert self._table is not None
        number = self._number + 1
        try:
            whole = {**about, "step": step, "number": number}
            self._last = write_snapshot(self._table.folder / f"step-{step}", states, whole)
        except Exception as error:  # noqa: BLE001 - told and counted
            self._failed(step, error)
            return
        self._number = number
        written = self._last
        self._news.append(lambda: self._progress.snapshot(step, written))
        if self._listener is not None:
            self._listener.snapshot_taken(time.perf_counter() - started, time.time())
        if not is_for_good(number, self._table):
            self._passing.append(self._last)
        while len(self._passing) > self._table.keep:
            _remove(self._passing.popleft())

    def _failed(self, step: int, error: Exception) -> None:
        assert self._table is not None
        cause = _cause(error)
        _logger.error("no snapshot of step %d in %s: %s", step, self._table.folder, cause)
        self._news.append(lambda: self._progress.noted(logging.ERROR, f"no snapshot of step {step}: {cause}"))
        if self._listener is not None:
            self._listener.snapshot_failed()
            self._listener.observer_failed("snapshot")


def _cause(error: BaseException) -> str:
    """In a few words, what the system said, else what ``error`` says itself."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link.strerror or str(link)
        link = link.__context__  # A file that cannot be finished hides why it could not be written.
    return f"{type(error).__name__}: {error}"


_Seen = dict[tuple[object, ...], Tensor]


def _on_cpu(value: Any, seen: _Seen) -> Any:
    """A copy of ``value`` that shares nothing with it, its tensors on the CPU; one under two names stays one."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return value.detach().to("cpu", copy=True)
        key = (value.device, value.dtype, value.data_ptr(), value.shape, value.stride())
        if key not in seen:
            seen[key] = value.detach().to("cpu", copy=True)
        return seen[key]
    if isinstance(value, dict):
        copied = copy(value)  # A module's state has its versions as an attribute.
        copied.update((key, _on_cpu(entry, seen)) for key, entry in value.items())
        return copied
    if isinstance(value, list):
        return [_on_cpu(entry, seen) for entry in value]
    if type(value) is tuple:
        return tuple(_on_cpu(entry, seen) for entry in value)
    return deepcopy(value)


# On disk


def _remove(snapshot: Path) -> None:
    """Remove a snapshot that is too old, so that at no instant a part of it looks like the whole."""
    doomed = snapshot.with_name(f"{snapshot.name}.incomplete")
    try:
        snapshot.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        _logger.warning("the old snapshot %s was not removed: %s", snapshot, error.strerror)
