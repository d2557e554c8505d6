"""Rules of retention: which of ended jobs' data goes, decided purely, and removed by a service as the command says."""

from __future__ import annotations

import json

import pytest
from manager_helpers import Fakes, make_settings, opened, until

from asyncpipe import cli
from asyncpipe.service.job_states import JobState
from asyncpipe.service.keeping.retention import Retainer, removals
from asyncpipe.service.settings.retention_settings import RetentionSettings
from asyncpipe.service.store.finding import JobHead

NOW = 1e9
DAY = 86400.0
JOBS = [JobHead(f"job-{age}", "job", JobState.FINISHED, NOW - age * DAY, None) for age in range(1, 6)]
GOING_ON = JobHead("job-9", "job", JobState.PAUSED, NOW - 9 * DAY, None)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, {}),
        ({"jobs": {"days": 3.5}}, {"job": "45"}),
        ({"jobs": {"count": 1}}, {"job": "2345"}),
        ({"jobs": {"count": 4, "days": 2.5}}, {"job": "345"}),
        ({"snapshots": {"count": 0}}, {"snapshots": "1234"}),
        # What goes as a whole does not count for its parts.
        ({"jobs": {"days": 3.5}, "snapshots": {"count": 2}}, {"job": "45", "snapshots": "3"}),
    ],
)
def test_rules_keep_the_newest_by_age_and_count(rules, expected):
    found: dict[str, str] = {}
    settings = RetentionSettings.model_validate(rules)
    for each in removals([*JOBS, GOING_ON], settings, NOW, lambda job: job != "job-5"):
        found[each.what] = found.get(each.what, "") + each.job[4:]
    assert found == expected


@pytest.mark.promise("The service", "Rules of retention delete exactly what the command shows beforehand.")
@pytest.mark.usefixtures("no_leaks")
async def test_a_service_removes_what_its_rules_say_and_the_command_says_the_same_before(tmp_path, capsys):
    fakes = Fakes()
    fakes.free = True
    rules = {"jobs": {"count": 4}, "snapshots": {"count": 2}}
    async with opened(tmp_path, fakes, max_running=1) as service:
        ids = []
        for _ in range(6):
            ids.append((await service.submit()).id)
            await service.comes(ids[-1], JobState.FINISHED)
            await until(lambda: not service.control.running and service.manager.logs.of(ids[-1]) is None)
        fakes.free = False
        runs = (await service.running("runs")).id
        for job in (*ids, runs):
            (tmp_path / "jobs" / job / "snapshots" / "step-2").mkdir(parents=True, exist_ok=True)
        settings = make_settings(tmp_path, retention=rules)
        config = tmp_path / "service.toml"
        config.write_text("\n".join(f"[retention.{what}]\ncount = {rule['count']}" for what, rule in rules.items()))
        command = ["service", "retention", "--config", str(config), "--folder", str(tmp_path)]
        assert cli.main([*command, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        retainer = Retainer(settings, service.manager)
        removed = await retainer.apply()
        assert [each._asdict() for each in removed] == shown["removals"]
        assert [record.id for record in await service.store.list()] == [*ids[2:], runs]
        assert {path.name for path in (tmp_path / "jobs").iterdir()} == {*ids[2:], runs}
        left = [job for job in (*ids, runs) if (tmp_path / "jobs" / job / "snapshots").exists()]
        assert left == [*ids[4:], runs]
        assert not await retainer.apply()
        assert cli.main(command) == 0
        assert "would delete 0 jobs, and the snapshots of 0 others" in capsys.readouterr().out
        config.write_text("[retention.jobs]\ndays = -1\n")
        assert cli.main(command) == 2
        assert "retention.jobs.days: must be a number of days above 0" in capsys.readouterr().err
