"""The job store's file: who may read it, what it is opened with, and what is said where it cannot be used."""

from __future__ import annotations

import asyncio
import os
import pickle
import sqlite3
import stat
import sys
from contextlib import closing
from pathlib import Path

import pytest
from store_helpers import SPEC, submitted

from asyncpipe.service.job_states import JobState
from asyncpipe.service.store.database import check_store, explain, open_beside, open_database
from asyncpipe.service.store.job_store import JobStore, StoreError, StoreProblem
from asyncpipe.service.store.schema import VERSION

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "jobs.sqlite"


async def refused(path: Path) -> StoreError:
    """Why the store at ``path`` does not open."""
    with pytest.raises(StoreError) as caught:
        async with JobStore(path, busy_seconds=0):
            pass
    assert str(path) in str(caught.value)
    assert caught.value.path == path
    return caught.value


async def filled(path: Path, jobs: int = 1) -> list[str]:
    """Ids of new jobs in a store that is closed again."""
    async with JobStore(path) as store:
        return [job.id for job in await asyncio.gather(*(submitted(store, SPEC) for _ in range(jobs)))]


async def pragma(store: JobStore, name: str) -> object:
    return await store._thread.run(lambda connection: connection.execute(f"PRAGMA {name}").fetchone()[0])


async def test_nobody_else_may_read_it(path):
    before = os.umask(0)
    try:
        async with JobStore(path) as store:
            await submitted(store, SPEC)
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (path.parent, *path.parent.iterdir())}
    finally:
        os.umask(before)
    assert modes.pop("state") == 0o700
    assert "jobs.sqlite-wal" in modes
    assert set(modes.values()) == {0o600}


async def test_a_folder_that_is_there_stays_as_it_is(path):
    path.parent.mkdir(mode=0o755)
    await filled(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    assert {file.name for file in path.parent.iterdir()} == {"jobs.sqlite", "jobs.sqlite.lock"}


async def test_what_is_acknowledged_is_on_disk_and_rows_hang_together(path):
    async with JobStore(path) as store:
        settings = {name: await pragma(store, name) for name in ("journal_mode", "synchronous", "foreign_keys")}
        assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
        assert await pragma(store, "user_version") == VERSION


SECOND = """
import asyncio, sys
from asyncpipe.service.store.job_store import JobStore
asyncio.run(JobStore(sys.argv[1], busy_seconds=0).__aenter__())
"""


@pytest.mark.promise(
    "The service", "A second service on a store is refused; a process that only reads delays no commit."
)
async def test_a_second_store_on_the_file_is_refused_and_the_first_goes_on(path):
    async with JobStore(path) as store:
        error = await refused(path)
        assert error.problem is StoreProblem.LOCKED
        assert "only one process can use a store" in str(error)
        # Nor did the refusal give up the first one's locks.
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SECOND, path, cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await child.communicate()
        assert b"only one process can use a store" in errors
        await submitted(store, SPEC)
    assert len(await filled(path)) == 1


SECOND_SCHEMA = """
DROP TABLE runs;
DROP INDEX jobs_by_owner;
DROP INDEX jobs_by_teams;
DROP INDEX jobs_by_root;
DROP INDEX jobs_searched;
ALTER TABLE jobs DROP COLUMN owner;
ALTER TABLE jobs DROP COLUMN teams;
ALTER TABLE jobs DROP COLUMN placed;
ALTER TABLE jobs DROP COLUMN code;
ALTER TABLE jobs DROP COLUMN root;
ALTER TABLE losses DROP COLUMN gradient_norm;
PRAGMA user_version = 2;
"""


def tables(path: Path) -> dict[str, list[str]]:
    with closing(sqlite3.connect(path)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master ORDER BY name").fetchall()]
        return {name: connection.execute(f"PRAGMA table_info({name})").fetchall() for name in names}


async def test_an_older_store_is_upgraded_with_its_jobs_when_it_is_opened(path):
    (job,) = await filled(path)
    new = tables(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SECOND_SCHEMA)
    with pytest.raises(StoreError, match="start its service once with this version"), open_beside(path):
        pass
    check_store(path)
    async with JobStore(path) as store:
        assert (await store.get(job)).owner is None
        assert await pragma(store, "user_version") == VERSION
    assert {name: {column[1:] for column in columns} for name, columns in tables(path).items()} == {
        name: {column[1:] for column in columns} for name, columns in new.items()
    }


async def test_the_file_is_as_it_was_after_a_refusal_to_open_another_version(path):
    await filled(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    error = await refused(path)
    assert error.problem is StoreProblem.OTHER_VERSION
    assert "another version of asyncpipe (schema 99; this one has" in str(error)
    assert path.read_bytes() == before


async def test_another_programs_database_is_left_alone(path):
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE jobs (id)")
    connection.close()
    before = path.read_bytes()
    assert (await refused(path)).problem is StoreProblem.FOREIGN
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"not a database" * 100, b"xy", b"SQLite format 3\0" + b"\xff" * 5000])
async def test_what_is_no_database_is_refused_and_left_alone(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    error = await refused(path)
    assert error.problem is StoreProblem.DAMAGED
    assert "restore it from a backup" in str(error)
    assert path.read_bytes() == content


@pytest.mark.parametrize("page", range(1, 8))
async def test_a_damaged_file_is_refused(path, page):
    await filled(path, 100)
    content = bytearray(path.read_bytes())
    content[4096 * page : 4096 * (page + 1)] = b"\xff" * 4096
    path.write_bytes(content)
    assert (await refused(path)).problem is StoreProblem.DAMAGED


async def test_damage_that_is_met_later_is_a_typed_error_and_the_store_closes(path):
    ids = await filled(path)
    async with JobStore(path) as store:
        damage = "UPDATE jobs SET document = '[1'"
        await store._thread.run(lambda connection: connection.execute(damage).rowcount)
        with pytest.raises(StoreError, match=f"job {ids[0]}: ") as caught:
            await store.get(ids[0])
        assert caught.value.problem is StoreProblem.DAMAGED
        assert (await submitted(store, SPEC)).state is JobState.QUEUED


async def test_a_place_where_no_file_can_be_is_refused(tmp_path, path):
    assert (await refused(tmp_path)).problem is StoreProblem.FORBIDDEN
    path.parent.write_text("a file in the place of the folder")
    assert (await refused(path)).problem is StoreProblem.FORBIDDEN


# A full disk


async def test_a_full_store_says_so_and_goes_on_when_there_is_room(path):
    large = {**SPEC, "x": "y" * 60_000}
    async with JobStore(path) as store:
        job = await submitted(store, SPEC)
        pages = await pragma(store, "page_count")
        await pragma(store, f"max_page_count = {pages + 4}")
        # In a group, one that does not fit leaves its neighbours alone.
        answers = await asyncio.gather(
            *(submitted(store, spec) for spec in (SPEC, large, SPEC, large)), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, StoreError)]
        assert [error.problem for error in errors] == [StoreProblem.FULL] * 2
        assert all(str(path) in str(error) and "free some space" in str(error) for error in errors)
        assert len(await store.list()) == 3
        await store.transition(job.id, JobState.RUNNING, "what fits is still done")
        await pragma(store, "max_page_count = 1000000")
        assert (await submitted(store, large)).document == large
    with closing(open_database(path, 0)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_errors_cross_processes_and_know_every_kind_of_trouble(path):
    error = pickle.loads(pickle.dumps(explain(path, sqlite3.OperationalError("unknown"))))
    assert (error.problem, error.path) == (StoreProblem.FAILED, path)
    assert "report" in str(error)
