"""The jobs that the scheduler knows: the share of each, its steps under way, and how long its tasks take.

What was measured of a job outlives its steps, since the next one builds on it. So somebody has to say when a job is
over: ``Jobs.forget``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncpipe.core.graph.task import Task
from asyncpipe.core.policies.share import Share

__all__ = ["JobAccount", "Jobs"]

_LAST = 8


@dataclass(slots=True, eq=False)
class JobAccount:
    """One job on the scheduler's lanes. Mutated by the scheduler alone."""

    name: str
    """What its steps call it; empty for a pipeline that has its devices for itself."""
    is_named: bool
    """Whether it has a name: then its tasks are measured."""
    share: Share
    """That of the step that it submitted last."""
    steps: int = 0
    """Under way."""
    means: dict[tuple[str, int, int | None], tuple[int, float]] = field(default_factory=dict)
    """(tasks measured, mean seconds) by letter and stage, and for a copy by its source."""

    def measured(self, task: Task, seconds: float) -> None:
        """Take in that ``task`` took ``seconds``."""
        key = (task.kind.value, task.stage, task.source)
        count, mean = self.means.get(key, (0, 0.0))
        count = min(count + 1, _LAST)
        self.means[key] = (count, mean + (seconds - mean) / count)

    def expected(self, task: Task) -> float | None:
        """The mean seconds of such tasks; ``None`` before the first.

        The mean of all until there are eight; from then on each new one weighs an eighth.
        """
        found = self.means.get((task.kind.value, task.stage, task.source))
        return None if found is None else found[1]


class Jobs:
    """Every job by its name. Mutated by the scheduler alone."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobAccount] = {}
        self._forgotten: set[str] = set()
        """To be dropped once their last step is over."""

    def begin(self, share: Share) -> JobAccount:
        """The job of a step that begins; ``share`` is what it has from now on."""
        job = self._jobs.setdefault(share.job, JobAccount(share.job, share.job != "", share))
        self._forgotten.discard(share.job)
        job.steps += 1
        job.share = share
        return job

    def end(self, job: JobAccount) -> bool:
        """A step of ``job`` is over; whether the job is over with it, since it was to be forgotten."""
        job.steps -= 1
        return job.name in self._forgotten and self._drop(job)

    def forget(self, name: str) -> JobAccount | None:
        """Drop the job called ``name``, now or with the end of its last step; the job, if it is dropped now."""
        job = self._jobs.get(name)
        if job is None:
            return None
        self._forgotten.add(name)
        return job if self._drop(job) else None

    def _drop(self, job: JobAccount) -> bool:
        if job.steps:
            return False
        self._forgotten.discard(job.name)
        del self._jobs[job.name]
        return True
