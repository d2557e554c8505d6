"""Quotas: what is refused, what waits, what begins in its place, and that what they measure is true."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from manager_helpers import make_settings, opened, submission, until
from pydantic import ValidationError

from asyncpipe.service.job_states import JobState, JobStateError
from asyncpipe.service.jobs import quotas as quotas_module
from asyncpipe.service.jobs.quotas import Quotas, devices_wanted
from asyncpipe.service.settings.quota_settings import QuotaSettings
from asyncpipe.service.settings.service_settings import SettingsError
from asyncpipe.service.store.job_store import JobStore, QueueFullError, QuotaError
from asyncpipe.service.submission.submission import check_submission

DOCUMENT = {"name": "job", "entry": "m:f", "pipeline": {"devices": ["cpu:0"]}}


def quotas(store: JobStore, folder: Path, max_queued: int = 1000, **table: Any) -> Quotas:
    made = Quotas(make_settings(folder, quotas=table, max_queued=max_queued), store, folder)
    store.admit = made.admit
    return made


def test_a_user_has_the_default_but_for_what_is_his_own() -> None:
    table = QuotaSettings.model_validate({"default": {"queued": 5, "bytes": "1 KiB"}, "users": {"bob": {"queued": 9}}})
    assert table.of_user("alice") == table.default
    assert table.of_user("bob").model_dump() == {"running_devices": None, "queued": 9, "bytes": 1024}
    for wrong in ({"default": {"queued": 0}}, {"default": {"devices": 1}}, {"users": {"bob": {"bytes": "much"}}}):
        with pytest.raises(ValidationError):
            QuotaSettings.model_validate(wrong)


async def test_a_full_queue_takes_no_more_but_answers_for_what_it_has(tmp_path: Path) -> None:
    async with JobStore(tmp_path / "jobs.sqlite3") as store:
        quotas(store, tmp_path, max_queued=2)
        first, new = await store.add(DOCUMENT, "key")
        assert new
        await store.add(DOCUMENT)
        with pytest.raises(QueueFullError, match="the queue is full: 2 jobs wait"):
            await store.add(DOCUMENT)
        assert await store.add(DOCUMENT, "key") == (first, False)
        await store.transition(first.id, JobState.PAUSED, "because")
        assert (await store.add(DOCUMENT))[1]
        assert await store.count() == dict.fromkeys(JobState, 0) | {JobState.QUEUED: 2, JobState.PAUSED: 1}


async def test_a_full_queue_lets_no_paused_job_in(tmp_path: Path) -> None:
    async with JobStore(tmp_path / "jobs.sqlite3") as store:
        quotas(store, tmp_path, max_queued=2)
        first, second = [(await store.add(DOCUMENT))[0] for _ in range(2)]
        quotas(store, tmp_path, max_queued=1)
        await store.transition(first.id, JobState.PAUSED, "because")
        with pytest.raises(QueueFullError, match="the queue is full: 1 jobs wait; try again"):
            await store.transition(first.id, JobState.QUEUED, "because", admit=True)
        assert (await store.get(first.id)).state is JobState.PAUSED
        assert len(await store.history(first.id)) == 2
        with pytest.raises(JobStateError, match="cannot become queued"):
            await store.transition(second.id, JobState.QUEUED, "because", admit=True)
        await store.transition(second.id, JobState.RUNNING, "because")
        assert (await store.transition(first.id, JobState.QUEUED, "because", admit=True)).state is JobState.QUEUED
        # What ran has its place.
        assert (await store.transition(second.id, JobState.QUEUED, "because")).state is JobState.QUEUED


async def test_queued_jobs_are_refused_beyond_the_quota_however_they_come(tmp_path: Path) -> None:
    async with JobStore(tmp_path / "jobs.sqlite3") as store:
        quotas(store, tmp_path, default={"queued": 2}, teams={"vision": {"queued": 3}})
        first, _ = await store.add(DOCUMENT, "key", owner="alice", teams=("vision",))
        added = await asyncio.gather(
            *(store.add(DOCUMENT, owner="alice", teams=("vision",)) for _ in range(5)), return_exceptions=True
        )
        assert sum(isinstance(each, QuotaError) for each in added) == 4, "at once as well"
        text = "alice has 2 queued jobs, which is the quota: try again when some of them have begun"
        assert {str(each) for each in added if isinstance(each, QuotaError)} == {text}
        assert await store.add(DOCUMENT, "key", owner="alice", teams=("vision",)) == (first, False), "no new one"
        await store.add(DOCUMENT, owner="bob", teams=("vision", "nlp"))
        with pytest.raises(QuotaError, match=r"^the team vision has 3 queued jobs"):
            await store.add(DOCUMENT, owner="bob", teams=("vision", "nlp"))
        await store.add(DOCUMENT, owner="bob", teams=("nlp",))
        for _ in range(5):
            await store.add(DOCUMENT)  # Nobody's.
        # What is paused or has ended comes back only where there is room.
        await store.transition(first.id, JobState.PAUSED, "because")
        await store.add(DOCUMENT, owner="alice")
        with pytest.raises(QuotaError, match=r"^alice has 2"):
            await store.transition(first.id, JobState.QUEUED, "because", admit=True)
        await store.transition(first.id, JobState.CANCELLED, "because")
        with pytest.raises(QuotaError, match=r"^alice has 2"):
            await store.retry(first.id, "because")
        with pytest.raises(QuotaError, match=r"^alice has 2"):
            await store.fork("f" * 26, DOCUMENT, first.id, 0, owner="alice")
        await store.fork("f" * 26, DOCUMENT, first.id, 0, owner="carol")


async def test_bytes_on_disk_are_measured_and_only_what_has_changed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    real = quotas_module.files_of
    monkeypatch.setattr(quotas_module, "files_of", lambda folder: (measured.append(folder.name), real(folder))[1])
    async with JobStore(tmp_path / "jobs.sqlite3") as store:
        made = quotas(store, tmp_path, default={"bytes": 1000})
        jobs = [(await store.add(DOCUMENT, owner=owner))[0].id for owner in ("alice", "alice", "bob")]
        for job in jobs:
            (tmp_path / job / "snapshots").mkdir(parents=True)
            (tmp_path / job / "snapshots" / "file").write_bytes(b"x" * 600)
        await made.measure("alice", ())
        with pytest.raises(QuotaError) as caught:
            await store.add(DOCUMENT, owner="alice")
        text = "the jobs of alice have 1.172 KiB on disk, and the quota is 1000 B: delete some that have ended"
        assert str(caught.value) == text
        await made.measure("bob", ())
        await store.add(DOCUMENT, owner="bob")
        assert sorted(measured) == sorted(jobs)
        # Snapshots are removed, as the rules of retention do it.
        (tmp_path / jobs[0] / "snapshots").rename(tmp_path / "gone")
        await made.measure("alice", ())
        await store.add(DOCUMENT, owner="alice")
        assert measured[3:] == [jobs[0]]


async def test_devices_hold_jobs_back_and_nobody_else(tmp_path: Path) -> None:
    asked = (["cpu:0", "cpu:0"], ["cpu:0", "cpu:1"], {"count": 3})
    assert [devices_wanted({"pipeline": {"devices": each}}) for each in asked] == [1, 2, 3]
    table = {"default": {"running_devices": 2}, "teams": {"vision": {"running_devices": 3}}}
    settings = {"quotas": table, "max_running": 9, "devices": ["cpu:0", "cpu:1", "cpu:2"]}

    def wants(*devices: str) -> dict[str, Any]:
        return submission(pipeline={"devices": devices, "microbatches": 2})

    async with opened(tmp_path, **settings) as service:
        jobs = service.manager.jobs

        async def submit(owner: str | None, *devices: str, teams: tuple[str, ...] = ()) -> str:
            document = check_submission(wants(*devices), service.manager.settings, service.entries)
            return (await jobs.submit(document, None, owner=owner, teams=teams))[0].id

        with pytest.raises(
            QuotaError, match=r"^the job needs 3 devices, and alice may have 2 at a time: ask for fewer$"
        ):
            await submit("alice", "cpu:0", "cpu:1", "cpu:2")
        first = await submit("alice", "cpu:0", "cpu:1", teams=("vision",))
        more = [await submit("alice", "cpu:0") for _ in range(40)]  # More than are looked at.
        team = await submit("carol", "cpu:1", "cpu:2", teams=("vision",))
        other, nobodys = await submit("bob", "cpu:0"), await submit(None, "cpu:0", "cpu:1", "cpu:2")
        await until(lambda: {first, other, nobodys} == jobs.running.keys())
        outlook = service.manager.outlook
        assert outlook(more[0]).waits_for == "needs 1 devices, and alice has 2 of the 2 that its quota allows"
        assert outlook(team).waits_for == "needs 2 devices, and the team vision has 2 of the 3 that its quota allows"
        await jobs.cancel(first, "because")
        await until(lambda: {more[0], more[1], team, other, nobodys} == jobs.running.keys())
        assert outlook(more[2]).waits_for == "needs 1 devices, and alice has 2 of the 2 that its quota allows"


async def test_where_others_are_hidden_a_reason_names_no_job(tmp_path: Path) -> None:
    async with opened(tmp_path, others="none", share_devices=False) as service:
        running, waiting = await service.running("a"), await service.submit("b")
        reason = service.manager.outlook(waiting.id).waits_for or ""
        assert "another job" in reason
        assert running.id not in reason


def test_settings(tmp_path: Path) -> None:
    assert make_settings(tmp_path, quotas={"default": {"bytes": "2 KiB"}}).quotas.default.bytes == 2048
    with pytest.raises(SettingsError, match=r"quotas.default.queued: must be a number of jobs"):
        make_settings(tmp_path, quotas={"default": {"queued": "many"}})
