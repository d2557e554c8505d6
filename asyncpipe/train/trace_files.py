"""The files that a run leaves behind: a trace of its last steps and a picture of the very last.

They are there whole or not at all, and none of them can end a run: what cannot be written is one line in the log
and a count, as with any other observer that fails.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepFinished, StepRecord, TaskFailed
from asyncpipe.observe.pictures.svg import svg_timeline
from asyncpipe.observe.pictures.trace import write_trace
from asyncpipe.train.job_file import Job, job_file_error

__all__ = ["TraceRecorder", "WrittenFiles", "make_folders"]

_logger = logging.getLogger(__name__)


class WrittenFiles(NamedTuple):
    """The files that were written; ``None`` where one was not asked for, or could not be written."""

    trace: Path | None = None
    timeline: Path | None = None


class TraceRecorder:
    """An observer that keeps the records of the last ``steps`` steps, until they are written, and no tensor."""

    def __init__(self, steps: int) -> None:
        self._records: deque[StepRecord] = deque(maxlen=steps)

    def step_completed(self, record: StepRecord) -> None:
        """Keep ``record``, in the place of the oldest where there are enough."""
        self._records.append(record if record.outcome is Outcome.OK else _without_frames(record))

    def write(self, job: Job, failed: Callable[[], object]) -> WrittenFiles:
        """Write what the job asks for, if any step ran; returns what was written. Blocks; raises nothing.

        ``failed`` is called for each file that cannot be written.
        """
        records = list(self._records)
        self._records.clear()
        if not records:
            return WrittenFiles()

        def write_timeline(path: Path) -> None:
            path.write_text(svg_timeline(records[-1], title=job.name), encoding="utf-8")

        return WrittenFiles(
            _written("trace", job.observe.trace, lambda path: write_trace(records, path), failed),
            _written("timeline", job.observe.timeline, write_timeline, failed),
        )


def _without_frames(record: StepRecord) -> StepRecord:
    """``record``, whose errors are but their names: their frames hold the tensors of the step, which is tried again."""
    journal = [
        (at, replace(event, error=_named(event.error)))
        if isinstance(event, TaskFailed | StepFinished | StepCompleted) and event.error is not None
        else (at, event)
        for at, event in record.journal
    ]
    return replace(record, journal=journal)


def _named(error: BaseException) -> Exception:
    made: Exception = type(type(error).__name__, (Exception,), {})()
    return made


def make_folders(job: Job) -> None:
    """Make the folders of the files to write, so that a mistyped path ends the run before it begins.

    Raises ``JobFileError`` where a folder cannot be made, or a file to write is one.
    """
    for key in ("trace", "timeline"):
        path = getattr(job.observe, key)
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise job_file_error(job.path, f"observe.{key}: cannot make {path.parent}: {error.strerror}") from error
        if path.is_dir():
            raise job_file_error(job.path, f"observe.{key}: {path} is a folder; it must be the path of a file to write")


def _written(
    what: str, path: Path | None, write: Callable[[Path], object], failed: Callable[[], object]
) -> Path | None:
    """``path``, if ``write`` has made it."""
    if path is None:
        return None
    try:
        _write_whole(path, write)
    except OSError as error:
        _logger.error("the %s %s was not written: %s", what, path, error.strerror or error)
    except Exception:
        _logger.exception("the %s %s was not written", what, path)
    else:
        return path
    failed()
    return None


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Make the file at ``path`` whole or not at all: written beside it, then moved to its place.

    Nothing can be moved to the place of a device or a pipe, and a link (``/dev/stdout`` is one) stays what it is:
    these are written as they are.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        write(path)
        return
    beside = path.with_name(f"{path.name}.incomplete")
    try:
        write(beside)
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
