"""From what a client submits to what the store keeps: one job, or the many of a sweep.

A submission names the jobs that it comes after as people do; the store is asked which they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from asyncpipe.service.job_states import JobSpec
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.store.job_store import (
    AmbiguousJobError,
    AwaitedJobError,
    JobStore,
    PastDeadlineError,
    UnknownJobError,
)
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import Submission, SubmissionError, check_submission
from asyncpipe.service.submission.sweep import SweepInput, group_of, swept
from asyncpipe.train.blocking_calls import in_thread

__all__ = ["Submitting", "blaming_submission"]


@dataclass(frozen=True, slots=True)
class Submitting:
    """Checks submissions for one service."""

    settings: ServiceSettings
    entries: Entries
    store: JobStore

    async def check(self, submission: Submission | Mapping[str, Any]) -> JobSpec:
        """The specification. Raises ``SubmissionError``."""
        return await self._with_awaited(check_submission(submission, self.settings, self.entries))

    async def check_sweep(self, submission: Mapping[str, Any], sweep: SweepInput, key: str | None) -> list[JobSpec]:
        """The specifications of a sweep. Raises ``SubmissionError`` for the first job that is wrong, and names it."""
        group = group_of(str(submission.get("name")), key)
        # In a thread, since there may be a thousand.
        specs = await in_thread(lambda: self._check_all(swept(submission, sweep, group)))
        return [await self._with_awaited(spec) for spec in specs]

    def _check_all(self, submissions: list[dict[str, Any]]) -> list[JobSpec]:
        found = []
        for each in submissions:
            try:
                found.append(check_submission(each, self.settings, self.entries))
            except SubmissionError as error:
                whose = f"(of {each.get('name')!s:.100})"
                raise SubmissionError([(key, f"{text} {whose}") for key, text in error.problems]) from error
        return found

    async def _with_awaited(self, spec: JobSpec) -> JobSpec:
        if not spec.after:
            return spec
        try:
            ids = [await self.store.resolve(job) for job in spec.after]
        except (UnknownJobError, AmbiguousJobError) as error:
            raise SubmissionError([("after", str(error))]) from error
        return replace(spec, after=tuple(dict.fromkeys(ids)))


@contextmanager
def blaming_submission() -> Iterator[None]:
    """Turn the store's errors about what a job comes after, and about its deadline, into errors of the submission."""
    try:
        yield
    except (AwaitedJobError, UnknownJobError) as error:
        raise SubmissionError([("after", str(error))]) from error
    except PastDeadlineError as error:
        raise SubmissionError([("deadline", str(error))]) from error
