"""A job knows whether the code of its entry has changed since it was submitted."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from http_helpers import submission

from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.submission.submission import SubmissionError
from asyncpipe.service.training_service import TrainingService

pytestmark = [pytest.mark.usefixtures("no_leaks")]
CODE = "def build():\n    raise ValueError('a bug')\n"


@asynccontextmanager
async def opened(folder: Path, **settings: Any) -> AsyncIterator[tuple[TrainingService, Callable[[str], Any]]]:
    """A service with one entry, which fails, and a function that waits until a job of it has."""
    (folder / "pinned_entry.py").write_text(CODE)
    given = {"folder": folder / "state", "devices": ["cpu:0", "cpu:1"], "entries": ["pinned_entry:build"]}
    try:
        async with TrainingService(ServiceSettings(**given | {"entry_path": folder} | settings)) as service:
            service.entries.is_fresh = True  # As where each job has a process.

            async def ended(job: str) -> JobRecord:
                async for _ in service.follow(job):
                    pass
                return await service.get(job)

            yield service, ended
    finally:
        sys.modules.pop("pinned_entry", None)


def of_entry(**more: Any) -> dict[str, Any]:
    return submission(entry="pinned_entry:build", parameters={}, faults={"snapshot_retries": 0}) | more


async def test_a_begin_a_retry_and_a_fork_say_that_the_code_has_changed(tmp_path: Path) -> None:
    async with opened(tmp_path) as (service, ended):
        job, _ = await service.submit(of_entry())
        failed = await ended(job.id)
        assert failed.code == service.entries.code("pinned_entry:build")
        assert failed.root == "ValueError: a bug (pinned_entry.py:2 in build)"
        assert "changed" not in str(await service.history(job.id))
        (tmp_path / "pinned_entry.py").write_text(CODE.replace("a bug", "another"))
        changed = "its entry has changed since it was submitted: pinned_entry.py"
        assert (await service.retry(job.id)).cause == f"asked to be tried again; {changed}"
        await ended(job.id)
        causes = [change.cause for change in await service.history(job.id) if change.to_state is JobState.RUNNING]
        assert causes[1].endswith(f"; {changed}")
        said = [line.text async for page in service.said(job.id, 0) for line in page.lines]
        assert f"run 2 begins: {causes[1]}" in said
        fork = await service.fork(job.id, 0)
        assert fork.cause == f"forked from {job.id}; {changed.replace('since it', 'since that')}"
        assert fork.code == service.entries.code("pinned_entry:build") != failed.code
        await ended(fork.id)
        service.entries.is_fresh = False
        assert service.entries.code("pinned_entry:build") == failed.code, "threads run what was imported"


@pytest.mark.parametrize("how", ["the job names its code", "the operator refuses"])
async def test_a_job_whose_code_has_changed_does_not_begin_where_that_is_refused(tmp_path: Path, how: str) -> None:
    refuses = {"changed_code": "refuse"} if how == "the operator refuses" else {}
    async with opened(tmp_path, **refuses) as (service, ended):
        code = service.entries.code("pinned_entry:build") or ""
        job, _ = await service.submit(of_entry(**({} if refuses else {"code": code[:8]})))
        await ended(job.id)
        (tmp_path / "pinned_entry.py").write_text(CODE + "# later\n")
        await service.retry(job.id)
        refused = await ended(job.id)
        assert (refused.state, refused.attempts) == (JobState.FAILED, 1)
        assert refused.cause == (
            "cannot be built: its entry has changed since it was submitted: pinned_entry.py; fork it, or bring its"
            " code back"
        )
        with pytest.raises(SubmissionError, match=r"code: the content of the entry is [0-9a-f]{12} now"):
            await service.submit(of_entry(code=code[:8]))
        with pytest.raises(SubmissionError, match="code: must be at least 8 digits"):
            await service.submit(of_entry(code="nonsense"))
