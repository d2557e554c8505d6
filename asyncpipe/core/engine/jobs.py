"""Who uses which lanes: the jobs that the scheduler knows, and every lane that any of their steps has used.

What is known of a job (its charges, how long its tasks take) outlives its steps, since the next one builds on it. So
somebody has to say when a job is gone: ``forget``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from asyncpipe.core.engine.lanes import Claim, LaneState
from asyncpipe.core.engine.share import JobState, Share
from asyncpipe.core.graph.task import Lane

__all__ = ["Jobs"]


class Jobs:
    """Jobs and lanes. Mutated by the scheduler alone."""

    def __init__(self) -> None:
        self._known: dict[str, JobState] = {}
        self._gone: set[str] = set()
        """To be forgotten once their last step is over."""
        self._lanes: dict[Lane, LaneState] = {}

    @property
    def lanes(self) -> Iterable[LaneState]:
        """Every lane that was ever used."""
        return self._lanes.values()

    def claims(self) -> Iterator[Claim]:
        """All claims of all jobs."""
        return (claim for lane in self._lanes.values() for claim in lane.claims)

    def begin(self, share: Share, lanes: Sequence[Lane]) -> tuple[JobState, list[Claim]]:
        """The job of a step that begins, with the share that it has from now on, and its claim on each of ``lanes``."""
        job = self._known.setdefault(share.job, JobState(share))
        self._gone.discard(share.job)
        job.steps += 1
        if job.share != share:
            moved, job.share = job.share.background != share.background, share
            for lane in self._lanes.values() if moved else ():
                lane.change_class(job)
        return job, [self._lanes.setdefault(lane, LaneState(lane)).claim(job) for lane in lanes]

    def end(self, job: JobState) -> None:
        """A step of ``job`` is over."""
        job.steps -= 1
        if job.share.job in self._gone:
            self._drop(job)

    def forget(self, name: str) -> None:
        """Drop the job called ``name``, now or with the end of its last step."""
        job = self._known.get(name)
        if job is not None:
            self._gone.add(name)
            self._drop(job)

    def _drop(self, job: JobState) -> None:
        if job.steps:
            return
        self._gone.discard(job.share.job)
        del self._known[job.share.job]
        for lane in self._lanes.values():
            lane.drop(job)
