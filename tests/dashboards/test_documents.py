"""The README and the runbook: every panel, metric and query that they name exists."""

from __future__ import annotations

import json
import re
import shlex

import promql_parser
import pytest
import yaml
from contract import CONTRACT, HISTOGRAMS, nodes

from asyncpipe.cli import _parser
from asyncpipe.errors import OptionError
from dashboards import build, runbook
from dashboards.build import FOLDER
from dashboards.panels import panel_id
from dashboards.rules import ALERTS

README = (FOLDER / "README.md").read_text(encoding="utf-8")
RUNBOOK = runbook.RUNBOOK.read_text(encoding="utf-8")
BOARDS = {name: json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in ("pipeline", "service")}


def test_the_readme_lists_every_metric_with_its_labels():
    table = README.split("## The metrics")[1].split("## Queries")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in table.splitlines() if line.startswith("| `")]
    listed = {name: (kind, tuple(labels.split(", ")) if labels else ()) for _, name, kind, labels, *_ in rows}
    wanted = {name: ("histogram", labels) for name, labels in HISTOGRAMS.items()}
    for name, labels in CONTRACT.items():
        if not name.endswith(("_bucket", "_sum", "_count")):
            kind = "counter" if name.endswith("_total") else "info" if name.endswith("_info") else "gauge"
            wanted[name] = (kind, labels)
    assert listed == wanted


@pytest.mark.parametrize(("page", "least"), [(README, 15), (RUNBOOK, 1)], ids=["README", "RUNBOOK"])
def test_its_queries_can_be_asked(page, least):
    spans = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```$", "", page, flags=re.DOTALL | re.MULTILINE))
    queries = [" ".join(span.split()) for span in spans if re.search(r"asyncpipe_\w", span)]
    assert len(queries) >= least
    for query in queries:
        for node in nodes(promql_parser.parse(query)):
            if isinstance(node, promql_parser.VectorSelector):
                labels = CONTRACT[node.name.removeprefix("asyncpipe_")]
                assert {matcher.name for matcher in node.matchers.matchers} <= {"job", *labels}


def test_the_files_and_panels_that_the_readme_names_are_there():
    for name in re.findall(r"`([\w./]+\.(?:py|json|md|yml))`", README):
        assert (FOLDER / name).exists(), name
    titles = {panel["title"] for board in BOARDS.values() for panel in board["panels"]}
    for title in ("Bubble and its ideal", "Imbalance", "Stage utilization", "Most idle time", "State timeline"):
        assert f"*{title}*" in README
        assert title in titles


def test_the_runbook_is_shown_whole():
    written = runbook.entries(RUNBOOK)
    panels = BOARDS["service"]["panels"]
    shown = {panel["title"]: panel["options"]["content"] for panel in panels if panel["type"] == "text"}
    assert shown.keys() == written.keys()
    assert all(shown[heading].startswith(body[:40]) for heading, body in written.items())


def test_the_panels_that_the_runbook_names_are_there():
    titles = {name: {panel["title"] for panel in board["panels"]} for name, board in BOARDS.items()}
    named = re.findall(r"\*([A-Z][^*]+)\*(?: by \w+)? \((Pipeline|Service)\)", RUNBOOK)
    assert len(named) > 10
    assert [(title, board) for title, board in named if title not in titles[board.lower()]] == []
    words = {" ".join(title.split()) for title in re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", RUNBOOK)}
    assert words - titles["pipeline"] - titles["service"] <= {"Pipeline", "Service", "Explore"}


def test_the_commands_that_the_runbook_gives_are_there():
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", RUNBOOK)]
    commands = [span for span in spans if span.startswith("asyncpipe jobs ")]
    assert len(set(commands)) > 6
    for command in commands:
        assert _parser().parse_args(shlex.split(command)[1:]).run
    with pytest.raises(SystemExit):
        _parser().parse_args(["jobs", "explain", "JOB"])


def test_a_link_within_the_runbook_leads_to_its_panel():
    bands = runbook.bands("# Title\n\nIntroduction.\n\n## One thing\n\nSee [that](#other).\n\n## Other\n\n[No](#where)")
    first, second = (panel for panel, _ in bands[0].panels)
    assert f"[that](/d/asyncpipe-service?viewPanel=panel-{panel_id('Other')}&" in first.options.content
    assert second.options.content == "[No](#where)"


def test_a_link_to_an_entry_that_the_runbook_lacks_is_an_error(tmp_path, monkeypatch):
    shorter = tmp_path / "RUNBOOK.md"
    shorter.write_text(RUNBOOK.replace("## Drain", "## Something else"))
    monkeypatch.setattr(runbook, "RUNBOOK", shorter)
    with pytest.raises(OptionError, match=r"links to 'Runbook: Drain', which is not in RUNBOOK.md"):
        build.built()


def test_mail_is_configured_for_alerts_that_there_are():
    page = (FOLDER.parent / "docs" / "operating.md").read_text(encoding="utf-8")
    [alertmanager] = [
        yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "smtp" in block
    ]
    names = {receiver["name"] for receiver in alertmanager["receivers"]}
    assert {route["receiver"] for route in [alertmanager["route"], *alertmanager["route"]["routes"]]} == names
    [matcher] = alertmanager["route"]["routes"][0]["matchers"]
    pattern = re.fullmatch(r'alertname =~ "(.+)"', matcher)[1]
    assert {alert.name for alert in ALERTS if re.fullmatch(pattern, alert.name)} == {
        "AsyncpipeJobFailed", "AsyncpipeJobQuarantined"
    }  # fmt: skip
