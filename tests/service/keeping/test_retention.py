"""What is not kept of jobs that have ended: by age, count and bytes, shown first, and never of a job that may go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manager_helpers import Fakes, make_settings, opened, until

from asyncpipe import cli
from asyncpipe.service.job_states import JobState
from asyncpipe.service.keeping.disk_use import DiskUse
from asyncpipe.service.keeping.retainer import Retainer
from asyncpipe.service.keeping.retention import EndedJob, KeptBytes, Kind, removals
from asyncpipe.service.settings.retention_settings import RetentionSettings
from asyncpipe.service.store.keeping_queries import stored_jobs

NOW = 1e9
DAY = 86400.0
JOBS = [EndedJob(f"job-{age}", "job", NOW - age * DAY, KeptBytes(100, 10, 1)) for age in range(1, 6)]


def gone(**rules: object) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in removals(JOBS, RetentionSettings.model_validate(rules), NOW):
        found.setdefault(str(each.kind), []).append(each.job[4:])
    return found


def test_rules_keep_the_newest_by_age_count_and_bytes():
    assert gone() == {}
    assert gone(jobs={"days": 3.5}) == {"jobs": ["4", "5"]}
    assert gone(jobs={"count": 1}) == {"jobs": ["2", "3", "4", "5"]}
    assert gone(jobs={"bytes": 250}) == {"jobs": ["3", "4", "5"]}
    assert gone(snapshots={"count": 0}, losses={"bytes": 45}, logs={"days": 2.5}) == {
        "snapshots": ["1", "2", "3", "4", "5"], "losses": ["5"], "logs": ["3", "4", "5"],
    }  # fmt: skip
    # What goes as a whole does not count for its parts.
    assert gone(jobs={"days": 2.5}, snapshots={"count": 1}) == {"jobs": ["3", "4", "5"], "snapshots": ["2"]}
    left = [EndedJob("job", "job", NOW, KeptBytes(leftovers=5))]
    (leftover,) = removals(left, RetentionSettings(), NOW)
    assert leftover.kind is Kind.LEFTOVERS


def fill(folder: Path) -> None:
    """Give the job in ``folder`` files of each kind."""
    for step in (2, 4):
        (folder / "snapshots" / f"step-{step}").mkdir(parents=True, exist_ok=True)
        (folder / "snapshots" / f"step-{step}" / "model.pt").write_bytes(bytes(1000))
    (folder / "snapshots" / "step-6.incomplete").mkdir(exist_ok=True)
    (folder / "snapshots" / "step-6.incomplete" / "model.pt").write_bytes(bytes(10))
    (folder / "losses.jsonl").write_bytes(bytes(100))
    (folder / "trace.json").write_bytes(bytes(10))


@pytest.mark.usefixtures("no_leaks")
async def test_a_service_removes_what_its_rules_say_and_the_command_says_the_same_before(tmp_path, capsys):
    fakes = Fakes()
    fakes.free = True
    rules = {"jobs": {"count": 4}, "snapshots": {"count": 2}, "losses": {"count": 1}, "logs": {"count": 1}}
    async with opened(tmp_path, fakes, max_running=1) as service:
        ids = []
        for _ in range(6):
            ids.append((await service.submit()).id)
            await service.comes(ids[-1], JobState.FINISHED)
            await until(lambda: not service.control.running and service.manager.logs.of(ids[-1]) is None)
            fill(tmp_path / "jobs" / ids[-1])
        fakes.free = False
        runs = (await service.running("runs")).id
        fill(tmp_path / "jobs" / runs)
        settings = make_settings(tmp_path, retention=rules)
        config = tmp_path / "service.toml"
        lines = [f"[retention.{kind}]\ncount = {rule['count']}" for kind, rule in rules.items()]
        config.write_text("\n".join(lines))
        assert cli.main(["service", "retention", "--config", str(config), "--folder", str(tmp_path), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        retainer = Retainer(settings, service.manager)
        removed = await retainer.apply()
        assert [each.job for each in removed] == [each["job"] for each in shown["removals"]]
        assert sum(each.bytes for each in removed) == sum(each["bytes"] for each in shown["removals"])
        assert [record.id for record in await service.store.list()] == [*ids[2:], runs]
        there = {job: sorted(path.name for path in (tmp_path / "jobs" / job).iterdir()) for job in [*ids[2:], runs]}
        assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == sorted(there)
        assert there[ids[2]] == []
        assert there[ids[4]] == ["snapshots"]
        assert there[ids[5]] == ["events.jsonl", "losses.jsonl", "snapshots", "trace.json"]
        assert not (tmp_path / "jobs" / ids[5] / "snapshots" / "step-6.incomplete").exists()
        # A job that may go on keeps all that it has, also what it may just be writing.
        assert (tmp_path / "jobs" / runs / "snapshots" / "step-6.incomplete").exists()
        assert not await retainer.apply()
        # Its numbers are those of a list that is read anew.
        assert DiskUse(tmp_path).ended(await service.store.thread.run(stored_jobs, writes=False))
        assert cli.main(["service", "retention", "--config", str(config), "--folder", str(tmp_path)]) == 0
        assert "would delete 0 B of" in capsys.readouterr().out
        config.write_text("[retention.jobs]\ndays = -1\n")
        assert cli.main(["service", "retention", "--config", str(config), "--folder", str(tmp_path)]) == 2
        assert "retention.jobs.days: must be a number of days above 0" in capsys.readouterr().err
