"""The trace of a run's last steps and the timeline picture of the last one.

Each file is written as a whole or not at all. A file that cannot be written is logged and counted, but does not end the
run.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from asyncpipe.core.engine.events import Outcome, StepCompleted, StepFinished, TaskFailed
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.observe.pictures.svg import svg_timeline
from asyncpipe.observe.pictures.trace import write_trace
from asyncpipe.train.job_file import Job, job_file_error

__all__ = ["TraceRecorder", "WrittenFiles", "make_folders", "with_errors"]

_logger = logging.getLogger(__name__)


class WrittenFiles(NamedTuple):
    """The files that were written; ``None`` for one that was not wanted or could not be written."""

    trace: Path | None = None
    timeline: Path | None = None


class TraceRecorder:
    """An observer that keeps the records of the last ``steps`` steps until they are written. It keeps no tensors.

    Several records have at most ``most_tasks`` tasks together, if it is given; one is kept in any case.
    """

    def __init__(self, steps: int, most_tasks: int | None = None) -> None:
        self._records: deque[StepRecord] = deque(maxlen=steps)
        self._most_tasks = most_tasks

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The records of the last steps, oldest first. From any thread."""
        return tuple(self._records.copy())

    def step_completed(self, record: StepRecord) -> None:
        """Keep ``record``, and drop the oldest if there are enough."""
        self._records.append(record if record.outcome is Outcome.OK else with_errors(record, _named))
        if self._most_tasks is not None:
            while len(self._records) > 1 and sum(len(each.graph.tasks) for each in self._records) > self._most_tasks:
                self._records.popleft()

    def write(self, job: Job, failed: Callable[[], object]) -> WrittenFiles:
        """Write the files that the job asks for, if any step ran. Blocks; raises nothing.

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


def with_errors(record: StepRecord, told: Callable[[BaseException], BaseException]) -> StepRecord:
    """``record``, with what ``told`` makes of each of its errors in the place of the error."""
    journal = [
        (at, replace(event, error=told(event.error)))
        if isinstance(event, TaskFailed | StepFinished | StepCompleted) and event.error is not None
        else (at, event)
        for at, event in record.journal
    ]
    return replace(record, journal=journal)


def _named(error: BaseException) -> Exception:
    """An error called like ``error``, without its traceback, which keeps tensors of the step alive."""
    made: Exception = type(type(error).__name__, (Exception,), {})()
    return made


def make_folders(job: Job) -> None:
    """Create the folders of the files to write, so that a wrong path is found before the run begins.

    Raises ``JobFileError`` if a folder cannot be created, or a path is that of a folder.
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
    """``path`` if the file could be written, else ``None``."""
    if path is None:
        return None
    try:
        _write_atomically(path, write)
    except OSError as error:
        _logger.error("the %s %s was not written: %s", what, path, error.strerror or error)
    except Exception:
        _logger.exception("the %s %s was not written", what, path)
    else:
        return path
    failed()
    return None


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file next to ``path`` and rename it, so that the file at ``path`` is always complete.

    Devices, pipes and links (``/dev/stdout`` is one) must not be replaced and are written directly.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        write(path)
        return
    temporary = path.with_name(f"{path.name}.incomplete")
    try:
        write(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
