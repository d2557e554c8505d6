"""The job store against a model in memory: whatever is asked in whatever order, both say the same."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_helpers import CANCELLED, LEGAL, PAUSED, QUEUED, RUNNING, SPEC, progress, submitted

from asyncpipe.service.job_states import FINAL_STATES, JobRecord, JobState, JobStateError
from asyncpipe.service.store.job_store import IdempotencyConflictError, JobFilter, JobStore, PastDeadlineError

_STATES = st.sampled_from(JobState)
_SPECS = st.sampled_from(
    [
        SPEC,
        {**SPEC, "priority_class": "background"},
        {"name": "ä", "entry": "m:f", "x": [1], "tags": ["a"], "deadline": 9.0},
    ]
)


@settings(max_examples=12, stateful_step_count=40)
class StoreMachine(RuleBasedStateMachine):
    """The store, and the same in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.now = 0.0
        self.jobs: dict[str, JobRecord] = {}
        self.paths: dict[str, list[tuple[JobState | None, JobState, float, str]]] = {}
        self.keys: dict[str, str] = {}
        self.specs: dict[str, dict[str, Any]] = {}
        """As submitted."""
        self.numbers = count(1)
        self.open()

    def open(self) -> None:
        self.store = JobStore(
            self.folder / "jobs", clock=lambda: self.now, make_id=lambda at: f"job-{next(self.numbers)}"
        )
        self.runner.run(self.store.__aenter__())

    def close(self) -> None:
        self.runner.run(self.store.__aexit__(None, None, None))

    def move(self, job: str, to: JobState, cause: str) -> None:
        old = self.jobs[job]
        self.paths[job].append((old.state, to, self.now, cause))
        attempts = old.attempts + (to is RUNNING)
        is_past = old.state in FINAL_STATES and self.now >= (old.deadline or self.now + 1)
        self.jobs[job] = replace(
            old, state=to, cause=cause, updated=self.now, attempts=attempts, asked=None, asked_cause=None,
            document={**old.document, "deadline": None} if is_past else old.document,
            crashes=0 if old.state in FINAL_STATES else old.crashes,
        )  # fmt: skip

    @rule(spec=_SPECS, key=st.sampled_from([None, None, "a", "b"]))
    def submit(self, spec: dict[str, Any], key: str | None) -> None:
        self.now += 1
        if (there := self.keys.get(key)) is not None:
            if self.specs[there] == spec:
                assert self.runner.run(submitted(self.store, spec, key)) == self.jobs[there]
            else:
                with pytest.raises(IdempotencyConflictError):
                    self.runner.run(submitted(self.store, spec, key))
            return
        if spec.get("deadline", 1e9) <= self.now:
            with pytest.raises(PastDeadlineError):
                self.runner.run(submitted(self.store, spec, key))
            return
        job = self.runner.run(submitted(self.store, spec, key))
        assert job.id not in self.jobs
        self.jobs[job.id] = JobRecord(job.id, spec, QUEUED, "submitted", self.now, self.now)
        self.paths[job.id] = [(None, QUEUED, self.now, "submitted")]
        if key is not None:
            self.keys[key] = job.id
        self.specs[job.id] = spec

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), to=_STATES, expect=st.none() | _STATES, cause=st.text(min_size=1).filter(str.strip))
    def transition(self, data: st.DataObject, to: JobState, expect: JobState | None, cause: str) -> None:
        self.now += 1
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        state = self.jobs[job].state
        asking = self.store.transition(job, to, cause, expect=expect)
        if to in LEGAL[state] and expect in (None, state):
            answer = self.runner.run(asking)
            self.move(job, to, cause)
            assert answer == self.jobs[job]
        else:
            with pytest.raises(JobStateError):
                self.runner.run(asking)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), step=st.integers(0, 100), snapshot=st.none() | st.text(min_size=1, max_size=9))
    def progress(self, data: st.DataObject, step: int, snapshot: str | None) -> None:
        self.now += 1
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        old = self.jobs[job]
        if old.state is RUNNING:
            self.runner.run(progress(self.store, job, step, snapshot))
            crashes = old.crashes if snapshot is None else 0
            snapshot = snapshot or old.snapshot
            self.jobs[job] = replace(old, step=step, snapshot=snapshot, crashes=crashes, updated=self.now)
        else:
            self.runner.run(progress(self.store, job, step, snapshot))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), to=st.none() | _STATES, cause=st.text(min_size=1).filter(str.strip))
    def ask(self, data: st.DataObject, to: JobState | None, cause: str) -> None:
        self.now += 1
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        old = self.jobs[job]
        asking = self.store.ask(job, to, cause)
        may_follow = {None: (PAUSED, CANCELLED), PAUSED: (None, PAUSED, CANCELLED), CANCELLED: (CANCELLED,)}
        if old.state is not RUNNING or to not in may_follow[old.asked]:
            with pytest.raises(JobStateError):
                self.runner.run(asking)
            return
        if to is not old.asked:
            cause = None if to is None else cause
            self.jobs[job] = replace(old, asked=to, asked_cause=cause, updated=self.now)
        assert self.runner.run(asking) == self.jobs[job]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), schedule=st.sampled_from(["gpipe", "eager-1f1b(cap=5)"]))
    def change_schedule(self, data: st.DataObject, schedule: str) -> None:
        self.now += 1
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        old = self.jobs[job]
        change = {"pipeline": {"schedule": schedule}}
        if old.state not in FINAL_STATES:
            self.jobs[job] = replace(old, document={**old.document, **change}, updated=self.now)
            assert self.runner.run(self.store.amend(job, **change)) == self.jobs[job]
        else:
            with pytest.raises(JobStateError):
                self.runner.run(self.store.amend(job, **change))

    @rule(recovers=st.booleans())
    def reopen(self, recovers: bool) -> None:
        self.close()
        self.open()
        if recovers:
            self.now += 1
            running = [job for job, record in self.jobs.items() if record.state is RUNNING]
            running.sort(key=lambda job: self.jobs[job].is_background)
            for job in running:
                old = self.jobs[job] = replace(self.jobs[job], crashes=self.jobs[job].crashes + 1)
                self.move(job, old.asked or QUEUED, old.asked_cause or "the service was restarted")
            assert self.runner.run(self.store.recover()) == tuple(self.jobs[job] for job in running)

    @invariant()
    def agrees(self) -> None:
        async def look() -> None:
            assert await self.store.list() == tuple(self.jobs.values())
            for job, states in self.paths.items():
                history = await self.store.history(job)
                assert [(step.from_state, step.to_state, step.at, step.cause) for step in history] == states
            living = await self.store.list(JobFilter(frozenset({QUEUED, RUNNING})), limit=2)
            counts = {state: sum(job.state is state for job in self.jobs.values()) for state in JobState}
            assert await self.store.count() == counts
            assert living == tuple(job for job in self.jobs.values() if job.state in (QUEUED, RUNNING))[:2]

        self.runner.run(look())

    def teardown(self) -> None:
        self.close()
        self.runner.close()
        shutil.rmtree(self.folder)


TestStoreAgainstModel = StoreMachine.TestCase
