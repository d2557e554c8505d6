"""The rules: their own tests by promtool, and their agreement with metrics, runbook and dashboards."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from contract import nodes
from dashboard_queries import rule_expressions

from dashboards import queries
from dashboards.rules import ALERTS, RECORDINGS, WINDOW, rates_over, rules_yaml

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
RULES = DASHBOARDS / "rules"
DOCKER = DASHBOARDS.parent / "docker" / "prometheus"

NAMES = {
    "AsyncpipeStalled",
    "AsyncpipeStarvedStage",
    "AsyncpipeUnbalancedStages",
    "AsyncpipeLoopLag",
    "AsyncpipeTaskFailures",
    "AsyncpipeMemoryNearLimit",
    "AsyncpipeSnapshotTooOld",
    "AsyncpipeObserverFailing",
    "AsyncpipeJobFailed",
    "AsyncpipeJobQuarantined",
    "AsyncpipeServiceNotReady",
    "AsyncpipeJobsWaitTooLong",
    "AsyncpipeJobRetries",
    "AsyncpipeHungTasks",
    "AsyncpipeWorkerLost",
}
PLACES = (
    "Waiting for data",
    "Waiting for an edge",
    "Waiting for a copy",
    "Waiting for another job",
    "Waiting for the scheduler",
    "Unbalanced stages",
    "Drain",
    "Bubble",
)
ADDED = {"job", "instance"}
"""Labels that every series has: one by asyncpipe, one by Prometheus."""
SERVED = {f"asyncpipe_{name}": {*labels} for name, labels in queries.SERVED.items()}
LEVELS = {"job": set(), "device": {"device", "reason"}, "stage": {"stage", "device", "reason"}}
RECORDED = {name: LEVELS[name.split(":")[0]] for name in RECORDINGS}


def labels_of(node: Any) -> set[str]:
    """Labels that a node groups, matches or copies by."""
    modifier = getattr(node, "modifier", None)
    if modifier is None:
        return set()
    matching = getattr(modifier, "matching", None)
    found = {*getattr(modifier, "labels", ()), *(matching.labels if matching is not None else ())}
    return found | {*(getattr(modifier, "group_labels", None) or ())}


# The table


def test_there_is_a_rule_for_every_alert_and_an_entry_in_the_runbook() -> None:
    headings = re.findall(r"^## (.+)$", (DASHBOARDS / "RUNBOOK.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {alert.name for alert in ALERTS} == NAMES
    assert sorted(headings) == sorted([*NAMES, *PLACES])
    for alert in ALERTS:
        assert alert.anchor == f"dashboards/RUNBOOK.md#{alert.name.lower()}"


def test_each_entry_says_what_it_means_where_to_look_and_what_to_do() -> None:
    text = (DASHBOARDS / "RUNBOOK.md").read_text(encoding="utf-8")
    anchors = {heading.lower().replace(" ", "-") for heading in (*NAMES, *PLACES)}
    for entry in text.split("\n## ")[1:]:
        for part in ("**What it means.**", "**What to look at.**", "**What to do.**"):
            assert entry.count(part) == 1, (entry.splitlines()[0], part)
    assert {*re.findall(r"\]\(#([^)]+)\)", text)} <= anchors


def test_recordings_are_named_by_level_metric_and_operation() -> None:
    for name in RECORDED:
        assert re.fullmatch(r"(job|device|stage):asyncpipe_[a-z_]+:[a-z0-9]+", name), name


@pytest.mark.parametrize("name", rule_expressions())
def test_expressions_use_metrics_and_labels_that_are_served(name: str) -> None:
    allowed: set[str] = set(ADDED)
    found = list(nodes(promql_parser.parse(rule_expressions()[name])))
    selectors = [node for node in found if isinstance(node, promql_parser.VectorSelector)]
    assert selectors
    for selector in selectors:
        labels = SERVED[selector.name] if selector.name in SERVED else RECORDED[selector.name]
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels | ADDED, selector.name
        allowed |= labels
    assert {label for node in found for label in labels_of(node)} <= allowed


def test_rules_come_after_those_that_they_use() -> None:
    known: set[str] = set()
    for name, expression in rule_expressions().items():
        used = {
            node.name
            for node in nodes(promql_parser.parse(expression))
            if isinstance(node, promql_parser.VectorSelector)
        }
        assert {metric for metric in used if ":" in metric} <= known, name
        known.add(name)


def test_an_alerts_condition_is_its_value_and_its_threshold() -> None:
    for alert in ALERTS:
        condition = promql_parser.parse(rates_over(WINDOW, alert.condition))
        assert isinstance(condition, promql_parser.BinaryExpr)
        value = condition.lhs.expr if isinstance(condition.lhs, promql_parser.ParenExpr) else condition.lhs
        assert value.prettify() == promql_parser.parse(rates_over(WINDOW, alert.value)).prettify()
        assert condition.rhs.val == alert.threshold


# The file


def test_the_file_has_every_rule_with_what_alertmanager_and_people_need() -> None:
    (group,) = yaml.safe_load(rules_yaml())["groups"]
    recorded = [rule for rule in group["rules"] if "record" in rule]
    alerts = [rule for rule in group["rules"] if "alert" in rule]
    assert [rule["record"] for rule in recorded] == [*RECORDINGS]
    assert [rule["alert"] for rule in alerts] == [alert.name for alert in ALERTS]
    assert all(rule["labels"]["severity"] in ("critical", "warning") for rule in alerts)
    assert all(rule["annotations"].keys() == {"summary", "description", "runbook"} for rule in alerts)
    assert not any(line != line.rstrip() or "\t" in line for line in rules_yaml().splitlines())


def test_windows_and_holds_scale() -> None:
    fast = yaml.safe_load(rules_yaml(window="5s", hold=0.005))["groups"][0]["rules"]
    usual = yaml.safe_load(rules_yaml())["groups"][0]["rules"]
    holds = {rule.get("alert"): (rule.get("for"), other.get("for")) for rule, other in zip(fast, usual, strict=True)}
    assert holds["AsyncpipeStarvedStage"] == ("1500ms", "5m")
    assert holds["AsyncpipeStalled"] == ("300ms", "1m")
    assert holds["AsyncpipeTaskFailures"] == (None, None)
    for rule, other in zip(fast, usual, strict=True):
        assert rule["expr"].replace("[5s]", f"[{WINDOW}]") == other["expr"]
        assert "WINDOW" not in rule["expr"]
    slow = {rule.get("alert"): rule.get("for") for rule in yaml.safe_load(rules_yaml(hold=2))["groups"][0]["rules"]}
    assert (slow["AsyncpipeMemoryNearLimit"], slow["AsyncpipeJobsWaitTooLong"]) == ("2m", "120m")


# promtool


def passes(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["recordings", "alerts"])
def test_promtool_finds_that_rules_do_what_they_should(promtool: str, name: str) -> None:
    passes(promtool, "test", "rules", RULES / f"{name}.test.yml")


def test_each_alert_and_recording_is_tested() -> None:
    text = {name: yaml.safe_load((RULES / f"{name}.test.yml").read_text("utf-8")) for name in ("recordings", "alerts")}
    tested = [test for group in text["alerts"]["tests"] for test in group["alert_rule_test"]]
    assert {test["alertname"] for test in tested if test["exp_alerts"]} == NAMES
    assert {test["alertname"] for test in tested if not test["exp_alerts"]} == NAMES
    asked = " ".join(test["expr"] for group in text["recordings"]["tests"] for test in group["promql_expr_test"])
    assert [name for name in RECORDED if name not in asked] == []


@pytest.mark.parametrize("wrong", ["> 1e12", pytest.param("> -1e12", marks=pytest.mark.long)])
def test_a_wrong_threshold_would_be_noticed(promtool: str, tmp_path: Path, wrong: str) -> None:
    """Promtool's tests do tell: with thresholds that nothing reaches, or everything, they fail for each alert."""
    tests = (RULES / "alerts.test.yml").read_text(encoding="utf-8")
    rarely = tests.replace("evaluation_interval: 30s", "evaluation_interval: 1m")
    (tmp_path / "alerts.test.yml").write_text(rarely, encoding="utf-8")
    rules = yaml.safe_load(rules_yaml())
    for rule, alert in zip(rules["groups"][0]["rules"][len(RECORDINGS) :], ALERTS, strict=True):
        condition = f"{alert.comparison} {alert.threshold:g}"
        assert rule["expr"].endswith(condition)
        rule["expr"] = rule["expr"].removesuffix(condition) + wrong
    (tmp_path / "asyncpipe.rules.yml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    with pytest.raises(AssertionError) as failure:
        passes(promtool, "test", "rules", tmp_path / "alerts.test.yml")
    assert {*re.findall(r"alertname: (\w+)", str(failure.value))} == NAMES


def test_promtool_takes_the_containers_configuration_with_these_rules(promtool: str, tmp_path: Path) -> None:
    configuration = DOCKER / "prometheus.yml"
    wanted = yaml.safe_load(configuration.read_text(encoding="utf-8"))
    assert all(job["honor_labels"] for job in wanted["scrape_configs"])
    shutil.copy(configuration, tmp_path)
    for pattern in wanted["rule_files"]:
        folder = (tmp_path / pattern).parent
        folder.mkdir(parents=True, exist_ok=True)
        for path in RULES.glob(Path(pattern).name):
            shutil.copy(path, folder)
            assert path.name == "asyncpipe.rules.yml"
        assert list(tmp_path.glob(pattern))
    passes(promtool, "check", "config", tmp_path / "prometheus.yml")
