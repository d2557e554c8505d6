"""Finding jobs in the store: lists against the same filters in Python, names and beginnings of ids, and new tags."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from store_helpers import CANCELLED, FAILED, FINISHED, PAUSED, QUEUED, RUNNING, SPEC, numbered, submitted, ticking

from asyncpipe.errors import OptionError
from asyncpipe.service.job_states import JobRecord
from asyncpipe.service.store.job_records import LossRow
from asyncpipe.service.store.job_store import AmbiguousJobError, JobFilter, JobStore, UnknownJobError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.sqlite"


async def filled(store: JobStore, chance: random.Random) -> list[JobRecord]:
    """Sixty jobs of every kind and state, in the order of submission."""
    ids = []
    for number in range(60):
        spec = {
            "name": chance.choice(["run 100%", "Run_1", "run\\1", "x"]),
            "entry": chance.choice(["m:a", "m:b"]),
            "tags": chance.sample(["a", "b", "lr=0.1"], chance.randrange(3)),
        }
        ids.append((await submitted(store, spec, str(number))).id)
    for job in ids:
        path = chance.choice([[], [RUNNING], [PAUSED], [RUNNING, FINISHED], [RUNNING, FAILED], [CANCELLED]])
        for to in path:
            await store.transition(job, to, f"made {to}")
    return [await store.get(job) for job in ids]


def meets(job: JobRecord, wanted: JobFilter) -> bool:
    texts = [job.name, job.entry, job.id, job.cause, *job.tags]
    return (
        (wanted.states is None or job.state in wanted.states)
        and wanted.entry in (None, job.entry)
        and set(wanted.tags) <= set(job.tags)
        and (wanted.since is None or job.updated >= wanted.since)
        and (wanted.text is None or any(wanted.text.lower() in text.lower() for text in texts))
    )


def drawn(chance: random.Random, times: list[float]) -> JobFilter:
    def maybe(*values):
        return chance.choice([None, *values])

    states = maybe(frozenset({QUEUED}), frozenset({FAILED, RUNNING}), frozenset({FINISHED, CANCELLED, PAUSED}))
    tags = chance.choice([(), ("a",), ("a", "lr=0.1")])
    text = maybe("RUN", "%", "_", "\\", "0.1", "job-3", "cancel")
    return JobFilter(states, maybe("m:a"), tags, text, maybe(chance.choice(times)))


@pytest.mark.promise(
    "The service", "A list has each job that matches once; a job is found by its name or a unique beginning of its id."
)
async def test_lists_have_what_meets_every_filter_page_by_page_in_both_directions(path):
    chance = random.Random(3)
    async with JobStore(path, clock=ticking(), make_id=numbered()) as store:
        jobs = await filled(store, chance)
        several = 0
        for _ in range(150):
            wanted = drawn(chance, [job.updated for job in jobs])
            newest_first = chance.random() < 0.5
            expected = [job for job in jobs if meets(job, wanted)]
            if newest_first:
                expected.reverse()
            limit, found = chance.randint(1, 9), list[JobRecord]()
            while page := await store.list(wanted, limit, found[-1].id if found else None, newest_first=newest_first):
                found += page
                assert len(page) <= limit
            assert found == expected, (wanted, newest_first)
            several += len(found) > 3
        assert several > 20


@pytest.mark.parametrize(
    "given",
    [{"text": ""}, {"text": "x" * 201}, {"entry": "\udcff"}, {"tags": ("a b",)}, {"since": float("nan")}],
)
def test_a_filter_that_cannot_be_is_refused(given):
    with pytest.raises(OptionError, match="a list's"):
        JobFilter(**given)


@pytest.mark.promise(
    "The service", "A list has each job that matches once; a job is found by its name or a unique beginning of its id."
)
async def test_a_job_is_meant_by_its_id_its_unique_beginning_or_its_name(path):
    ids = iter(["01ab1", "01ab2", "01cd", "02", "run"])
    async with JobStore(path, make_id=lambda _: next(ids)) as store:
        for name in ("run", "other", "ä b", "01cd", "third"):
            await submitted(store, {**SPEC, "name": name})
        meant = {"01ab1": "01ab1", "01c": "01cd", "01CD": "01cd", "other": "01ab2", "ä b": "01cd", "02": "02"}
        assert {text: await store.resolve(text) for text in meant} == meant
        assert await store.resolve("run") == "run"  # An id is itself, whatever other jobs are called.
        with pytest.raises(
            AmbiguousJobError, match=r"01ab2 \(other, queued\), 01ab1 \(run, queued\); name one"
        ) as caught:
            await store.resolve("01a")
        assert [each.id for each in caught.value.candidates] == ["01ab2", "01ab1"]
        for unknown in ("03", "", "%", "oth", "\udcff"):
            with pytest.raises(UnknownJobError):
                await store.resolve(unknown)


async def test_the_error_of_a_name_that_many_have_lists_the_newest_ten(path):
    async with JobStore(path, make_id=numbered()) as store:
        for _ in range(12):
            await submitted(store, SPEC)
        with pytest.raises(AmbiguousJobError, match="and others; name one of them") as caught:
            await store.resolve("job")
        assert [each.id for each in caught.value.candidates] == [f"job-{n}" for n in range(12, 2, -1)]


async def test_class_weight_and_tags_can_be_changed_and_the_submission_stays_what_a_key_means(path):
    async with JobStore(path, clock=ticking(), make_id=numbered()) as store:
        spec = {**SPEC, "tags": ["a"]}
        await submitted(store, spec, "key")
        await store.amend("job-1", priority_class="background", tags=["b", "c"])
        changed = await store.amend("job-1", weight=3.0)
        assert changed.document == spec | {"priority_class": "background", "weight": 3.0, "tags": ["b", "c"]}
        assert changed.is_background
        assert await submitted(store, spec, "key") == changed
        assert await store.list(JobFilter(tags=("a",))) == ()
        assert await store.list(JobFilter(tags=("b", "c"))) == (changed,)
        with pytest.raises(UnknownJobError):
            await store.amend("job-2", weight=2)
        assert await store.get("job-1") == changed


async def test_the_store_tells_how_long_jobs_have_run_and_whether_anything_changed(path):
    async with JobStore(path, clock=ticking(), make_id=numbered()) as store:
        assert await store.newest_change() == 0
        job, other = [(await submitted(store, SPEC, key)).id for key in "ab"]
        for to in (RUNNING, PAUSED, QUEUED, RUNNING):
            await store.transition(job, to, "because")
        times = [each.at for each in await store.history(job)]
        before = await store.newest_change()
        await store.write_records(job, [LossRow(1, 0.5, 0.1, 0.1, 1, 2.0), LossRow(2, 0.25, 0.1, 0.1, 1)], [])
        found = await store.figures([job, other, "nobody"])
        assert set(found) == {job, other}
        # It still runs, and the clock ticks whenever it is read.
        assert found[job].trained_seconds - (times[2] - times[1]) >= 1.0
        assert (found[job].waited_seconds, found[job].loss) == (times[1] - times[0] + times[4] - times[3], 0.25)
        assert (found[other].trained_seconds, found[other].loss) == (0, None)
        assert found[other].waited_seconds > found[job].waited_seconds
        assert await store.newest_change() == before
        await store.transition(other, CANCELLED, "because")
        assert await store.newest_change() == before + 1
