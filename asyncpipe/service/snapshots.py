"""Snapshots of a run on disk, written while it trains on.

Training waits for a copy of the state in the host's memory, never for the disk::

    loop      step N ─▶ copy ─▶ step N+1 ─▶ step N+2 ─▶ …        and, at the run's end, for the last snapshot
                          │
    a thread              └─▶ step-N.incomplete/ ─▶ fsync ─▶ rename: step-N/ ─▶ remove the oldest

    step-N/   model.pt        the model's state, under the unsplit model's keys
              optimizer.pt    the optimizer's
              snapshot.json   what it is, and the SHA-256 of each of the other files

A folder that is called ``step-N`` is therefore whole, whenever the process or the machine ended. One snapshot is in
flight at a time, so that at most one copy of the state is held: where the disk is slower than the training, the next
one is taken late, after the first step that finds the last one written. ``torch.load(weights_only=True)`` reads the
files. One that cannot be written costs a line in the log and a count, and the next one is tried when it is due.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import time
from collections import deque
from collections.abc import Mapping
from copy import copy, deepcopy
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncpipe import __version__
from asyncpipe.service.settings import Job, job_file_error
from asyncpipe.service.threads import ended, in_thread

__all__ = ["SnapshotListener", "Snapshots", "Stateful", "open_folder"]

_logger = logging.getLogger(__name__)

FORMAT = 1
"""Of ``snapshot.json``; another number where a reader of this one would be misled."""

_WHOLE = re.compile(r"step-\d+")
_LEFT_OVER = re.compile(r"step-\d+\.incomplete")


class Stateful(Protocol):
    """A part of a run that can be saved: a model, an optimizer, a pipeline."""

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and tuples of tensors and plain values."""


class SnapshotListener(Protocol):
    """Counts snapshots. Called by the threads that copy and write."""

    def snapshot_taken(self, seconds: float, at: float) -> None:
        """A snapshot is on disk, ``seconds`` after its step; ``at`` is the Unix time."""

    def snapshot_failed(self) -> None:
        """A snapshot could not be taken."""

    def observer_failed(self, reason: str) -> None:
        """Something beside the training went wrong: ``"snapshot"``, as above."""


def open_folder(job: Job) -> None:
    """Make the folder for the job's snapshots, if it wants some, and remove what a killed process left unfinished.

    Raises ``JobFileError`` where it cannot be used, or holds snapshots: a run adds to none but its own, and replaces
    none. Blocks.
    """
    if job.snapshots is None:
        return
    folder = job.snapshots.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in folder.iterdir()]
        if there := sorted((name for name in names if _WHOLE.fullmatch(name)), key=_step_of):
            problem = f"{folder} holds snapshots of another run, up to {there[-1]}; move them away or name another one"
            raise job_file_error(job.path, f"snapshots.folder: {problem}")
        for name in filter(_LEFT_OVER.fullmatch, names):
            shutil.rmtree(folder / name)
    except OSError as error:
        raise job_file_error(job.path, f"snapshots.folder: cannot use {folder}: {error.strerror}") from error


class Snapshots:
    """Takes the snapshots of one run of ``job``: after every so many steps and after the last; none if it wants none.

    Used on one loop, as an async context manager, whose end waits for the snapshot in flight. ``open_folder`` goes
    before.
    """

    def __init__(self, job: Job, listener: SnapshotListener | None = None) -> None:
        self._table = job.snapshots
        self._about = {
            "format": FORMAT,
            "job": job.name,
            "schedule": job.pipeline.schedule,
            "versions": {
                "asyncpipe": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        }
        self._listener = listener
        self._begun = 0
        """The step of the newest snapshot that was begun."""
        self._writing: asyncio.Future[None] | None = None
        self._written: deque[Path] = deque()
        """Those of this run that are there, the oldest first."""

    @property
    def last(self) -> Path | None:
        """The newest one that is on disk."""
        return self._written[-1] if self._written else None

    async def after_step(self, step: int, states: Mapping[str, Stateful]) -> None:
        """Take a snapshot if one is due after ``step`` steps and none is in flight; each of ``states`` makes a file.

        Returns when the states are copied. Nothing may change them meanwhile. Raises nothing of its own.
        """
        in_flight = self._writing is not None and not self._writing.done()
        if self._table is not None and step - self._begun >= self._table.every and not in_flight:
            await self._take(step, states)

    async def after_last_step(self, step: int, states: Mapping[str, Stateful]) -> None:
        """Take a snapshot of the run's end, unless there is one; waits for the one in flight first."""
        if self._table is not None and step > self._begun:
            await self._finish()
            await self._take(step, states)

    async def __aenter__(self) -> Snapshots:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._finish()

    async def _take(self, step: int, states: Mapping[str, Stateful]) -> None:
        self._begun = step
        started = time.perf_counter()
        copied = await in_thread(lambda: self._copy(step, states))
        if copied is not None:
            loop = asyncio.get_running_loop()
            self._writing = loop.run_in_executor(None, self._write, step, copied, started)

    async def _finish(self) -> None:
        if self._writing is not None:
            await ended(self._writing)

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

    def _write(self, step: int, states: dict[str, Any], started: float) -> None:
        assert self._table is not None
        folder = self._table.folder
        try:
            self._written.append(_write_folder(folder / f"step-{step}", states, {**self._about, "step": step}))
        except Exception as error:  # noqa: BLE001 - told and counted
            self._failed(step, error)
            return
        if self._listener is not None:
            self._listener.snapshot_taken(time.perf_counter() - started, time.time())
        while len(self._written) > self._table.keep:
            _remove(self._written.popleft())

    def _failed(self, step: int, error: Exception) -> None:
        assert self._table is not None
        _logger.error("no snapshot of step %d in %s: %s", step, self._table.folder, _cause(error))
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


class _HashedFile(BufferedWriter):
    """A new file that knows the SHA-256 of what was written. Neither that nor writing holds the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        super().__init__(FileIO(path, "xb"))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        """Write ``data``, all of it."""
        self.sha256.update(data)
        return super().write(data)


def _write_folder(final: Path, states: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    """``final``, in which there is one file for each state, and all of it on disk."""
    incomplete = final.with_name(f"{final.name}.incomplete")
    incomplete.mkdir()
    try:
        sums = {f"{name}.pt": _write_state(incomplete / f"{name}.pt", state) for name, state in states.items()}
        with (incomplete / "snapshot.json").open("x", encoding="utf-8") as file:
            json.dump({**about, "sha256": sums}, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(incomplete)
        incomplete.rename(final)
        _sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(incomplete, ignore_errors=True)
        raise
    return final


def _write_state(path: Path, state: Any) -> str:
    """The SHA-256 of the file at ``path``, which holds ``state`` and is on disk."""
    with _HashedFile(path) as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
        return file.sha256.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(snapshot: Path) -> None:
    """Remove a snapshot that is too old, so that at no instant a part of it looks like the whole."""
    doomed = snapshot.with_name(f"{snapshot.name}.incomplete")
    try:
        snapshot.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        _logger.warning("the old snapshot %s was not removed: %s", snapshot, error.strerror)


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))
