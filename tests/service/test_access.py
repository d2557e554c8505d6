"""Whose jobs one sees and changes, over all cases; and that the store's lists say the same."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from asyncpipe.service.access import Access, NotYoursError, Whose
from asyncpipe.service.store.job_store import JobFilter, JobStore
from asyncpipe.service.token_roles import TokenRole

TEAMS = [*((),), *(tuple(each) for size in (1, 2) for each in combinations(("vision", "nlp"), size))]
OWNERS = (None, "alice", "bob")


async def test_every_case(tmp_path: Path) -> None:
    async with JobStore(tmp_path / "jobs.sqlite3") as store:
        for owner, teams in product(OWNERS, TEAMS):
            await store.add({"name": "same", "entry": "m:f"}, owner=owner, teams=teams if owner else ())
        jobs = await store.list()
        for role, teams, team_access, others in product(TokenRole, TEAMS, ("none", "read", "change"), ("none", "read")):
            access = Access("alice", role, teams, team_access, others)
            operates = role is TokenRole.OPERATE
            for job in jobs:
                own, of_team = job.owner == "alice", bool({*teams} & {*job.teams})
                sees = operates or others == "read" or own or (of_team and team_access != "none")
                assert access.may_see(job) == sees
                for deed, by_team in (("cancel", team_access == "change"), ("delete", False)):
                    if operates or own or (of_team and by_team):
                        access.check(job, deed)
                    else:
                        with pytest.raises(NotYoursError, match=rf"you are alice: only .*operators may {deed} it$"):
                            access.check(job, deed)
            seen = [job.id for job in jobs if access.may_see(job)]
            assert [job.id for job in await store.list(JobFilter(whose=access.seen))] == seen
            assert sum((await store.count(access.seen)).values()) == len(seen)


async def test_a_change_is_news_to_those_who_see_the_job(tmp_path: Path) -> None:
    async with JobStore(tmp_path / "jobs.sqlite3") as store:
        news = []
        for owner, teams in (("alice", ()), ("bob", ("vision",)), (None, ())):
            await store.add({"name": "a", "entry": "m:f"}, owner=owner, teams=teams)
            whose = (None, Whose("alice"), Whose("bob"), Whose("carol", ("vision",)), Whose("carol"))
            news.append([await store.newest_change(each) for each in whose])
    assert news == [[1, 1, 0, 0, 0], [2, 1, 2, 2, 0], [3, 1, 2, 2, 0]]


def test_a_refusal_says_whose_the_job_is_and_who_may() -> None:
    from asyncpipe.service.job_states import JobRecord, JobState

    job = JobRecord("7", {}, JobState.QUEUED, "", 0, 0, owner="bob", teams=("vision",))
    with pytest.raises(NotYoursError) as caught:
        Access("alice", TokenRole.SUBMIT, (), "change", "read").check(job, "cancel")
    text = "job 7 belongs to bob; you are alice: only bob, the team vision and operators may cancel it"
    assert str(caught.value) == text
