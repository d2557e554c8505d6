"""The committed dashboards: they are what the code builds, complete, and query only metrics that are served."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from contract import CONTRACT, SERVICE, nodes
from dashboard_queries import Expression, panel_expressions, substituted

from asyncpipe.errors import OptionError
from dashboards.build import FOLDER, rendered
from dashboards.queries import OF_SERVICE, SERVED, series
from dashboards.states import STATES, dominating_code, share

BOARDS = {name: json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in ("pipeline", "service")}
PANELS = [(name, panel) for name, found in BOARDS.items() for panel in found["panels"] if panel["type"] != "row"]
EXPRESSIONS = panel_expressions()


def selectors(expression: Expression) -> list[promql_parser.VectorSelector]:
    parsed = promql_parser.parse(substituted(expression.expr, job="$job", device="$device", kind="$kind"))
    return [node for node in nodes(parsed) if isinstance(node, promql_parser.VectorSelector)]


def texts(value: object) -> Iterator[str]:
    """Every text in a dashboard's JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts(part)


def test_the_files_are_those_that_the_code_makes():
    stale = [name for name, made in rendered().items() if (FOLDER / name).read_text(encoding="utf-8") != made]
    assert not stale, "run python -m dashboards.build"


def test_the_metrics_are_those_that_were_promised():
    assert SERVED.keys() == CONTRACT.keys()
    assert {name: set(labels) for name, labels in SERVED.items()} == {n: set(labels) for n, labels in CONTRACT.items()}
    assert OF_SERVICE.keys() == SERVICE.keys()


def test_every_metric_of_the_service_is_shown():
    asked = {selector.name.removeprefix("asyncpipe_") for found in EXPRESSIONS for selector in selectors(found)}
    assert {name for name in SERVICE if not name.endswith(("_sum", "_count"))} <= asked


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda found: f"{found.panel} {found.ref}")
def test_every_expression_asks_for_what_is_served(expression):
    asked = selectors(expression)
    assert asked
    for selector in asked:
        name = selector.name.removeprefix("asyncpipe_")
        labels = CONTRACT[name]
        matched = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        assert matched.get("job") == (None if name in SERVICE else "$job")
        assert set(matched) <= {"job", *labels}
        if "device" in labels and not name.startswith(("memory_", "streams")):  # Those have physical devices.
            assert matched["device"] == "$device"


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda found: f"{found.panel} {found.ref}")
def test_sums_are_by_labels_that_are_there(expression):
    there = {
        "job",
        "instance",
        "reason",
        *(label for s in selectors(expression) for label in CONTRACT[s.name[len("asyncpipe_") :]]),
    }
    if any(selector.name.removeprefix("asyncpipe_") in SERVICE for selector in selectors(expression)):
        # Prometheus gives these the name of its scrape configuration for a job.
        there.remove("job")
    for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression.expr):
        assert set(labels.split(", ")) <= there
    assert re.search(r"\bby \(", expression.expr)


def test_rates_are_of_counters_over_the_interval_of_the_panel():
    for expression in EXPRESSIONS:
        for metric, window in re.findall(r"asyncpipe_(\w+)(?:\{[^}]*\})?\[(.*?)\]", expression.expr):
            assert metric.endswith(("_total", "_bucket", "_sum", "_count"))
            assert window in ("$__rate_interval", "$__range")


@pytest.mark.parametrize(
    ("board", "panel"), PANELS, ids=lambda value: value if isinstance(value, str) else value["title"]
)
def test_every_panel_tells_what_it_shows(board, panel):
    assert panel["title"]
    if panel["type"] == "text":
        assert panel["options"]["content"]
        return
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    legend = panel["options"].get("legend", {})
    assert legend.get("showLegend", legend.get("show", panel["type"] in ("stat", "table")))


@pytest.mark.parametrize(
    ("board", "panel"), PANELS, ids=lambda value: value if isinstance(value, str) else value["title"]
)
def test_legends_name_labels_that_the_series_have(board, panel):
    for target in panel.get("targets", ()):
        kept = {label for labels in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in labels.split(", ")}
        assert set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))) <= kept
        if target["format"] == "time_series":
            assert target["legendFormat"]


@pytest.mark.parametrize("board", BOARDS)
def test_numbers_are_unique_and_the_grid_has_no_holes(board):
    panels = BOARDS[board]["panels"]
    numbers = [panel["id"] for panel in panels]
    assert len(set(numbers)) == len(numbers)
    cells = [
        (grid["x"] + right, grid["y"] + down)
        for grid in (panel["gridPos"] for panel in panels)
        for right in range(grid["w"])
        for down in range(grid["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    height = 1 + max(y for _, y in cells)
    assert set(cells) == {(x, y) for x in range(24) for y in range(height)}


@pytest.mark.parametrize("board", BOARDS)
def test_the_variables_that_are_used_are_defined(board):
    defined = {variable["name"] for variable in BOARDS[board]["templating"]["list"]}
    grafana = {"__rate_interval", "__range", "__url_time_range", "__all_variables", "__field", "__data", "__all"}
    used = {name for found in texts(BOARDS[board]) for name in re.findall(r"\$\{?(\w+)", found)}
    assert used <= defined | grafana
    assert {"datasource", "job", "device"} <= used & defined


@pytest.mark.parametrize("board", BOARDS)
def test_variables_and_annotations_ask_for_what_is_served(board):
    for variable in BOARDS[board]["templating"]["list"][1:]:
        form = r"label_values\(asyncpipe_(\w+)(?:\{job=~\"\$job\"\})?, (\w+)\)"
        metric, label = re.fullmatch(form, variable["query"]["query"]).groups()
        assert label == variable["name"]
        assert label in ("job", *CONTRACT[metric])
    for annotation in BOARDS[board]["annotations"]["list"]:
        promql_parser.parse(substituted(annotation["target"]["expr"]))


def test_every_link_leads_somewhere():
    titles = {panel["id"]: panel["title"] for panel in BOARDS["service"]["panels"] if panel["type"] == "text"}
    linked = set()
    for _, panel in PANELS:
        for link in panel.get("links", ()):
            found = re.match(r"/d/asyncpipe-service\?viewPanel=panel-(\d+)&\$\{__url_time_range\}", link["url"])
            assert link["title"] == f"Runbook: {titles[int(found[1])]}"
            linked.add(titles[int(found[1])])
    # The alerts without a panel of their own are found by their name.
    assert linked >= {title for title in titles.values() if not title.startswith("Asyncpipe")}
    for found in BOARDS.values():
        assert all(re.match(r"/d/asyncpipe-(pipeline|service)\?", url) for url in texts(found) if url.startswith("/d/"))
        assert found["tags"] == found["links"][0]["tags"] == ["asyncpipe"]


def test_the_same_state_has_the_same_colour_everywhere():
    colours = {state.name: state.colour for state in STATES}
    seen = set()
    for _, panel in PANELS:
        for override in panel.get("fieldConfig", {}).get("overrides", ()):
            found = {entry["id"]: entry["value"] for entry in override["properties"]}
            name = found.get("displayName", override["matcher"]["options"]).removesuffix(" ${__field.labels.job}")
            if name in colours:
                seen.add(name)
                assert found["color"]["fixedColor"] == colours[name]
        for mapping in panel.get("fieldConfig", {}).get("defaults", {}).get("mappings", ()):
            assert [(m["text"], m["color"]) for m in mapping["options"].values()] == [*colours.items()]
            assert [int(code) for code in mapping["options"]] == [state.code for state in STATES]
    assert seen == set(colours)
    assert len(set(colours.values())) == len(STATES)


def test_what_is_not_served_cannot_be_asked_for():
    with pytest.raises(OptionError, match="serves no metric asyncpipe_bubbles"):
        series("bubbles")
    with pytest.raises(OptionError, match="asyncpipe_loss has no label stage"):
        series("loss", 'stage="1"')
    with pytest.raises(OptionError, match="asyncpipe_service_ready has no label job; it has none"):
        series("service_ready", 'job="x"')
    with pytest.raises(OptionError, match="asyncpipe_jobs has no label stage; it has state"):
        series("jobs", 'stage="1"')


def counter(name: str, per_minute: float, **labels: str) -> dict[str, str]:
    """A series for promtool, with a sample a minute."""
    inside = ",".join(f'{key}="{value}"' for key, value in {"job": "j", **labels}.items())
    return {"series": f"asyncpipe_{name}{{{inside}}}", "values": f"0+{per_minute}x10"}


def test_states_are_what_devices_spend_most_time_in(promtool, tmp_path):
    """Per minute: d0 computes 40 s, d1 waits 35 s for a copy, d2 30 s for data, d3 has steps for 10 s only."""
    input_series = []
    for device, busy, dependency, copy, drain in (
        ("d0", 40, 2, 4, 4),
        ("d1", 8, 5, 35, 2),
        ("d2", 15, 30, 3, 2),
        ("d3", 4, 1, 1, 4),
    ):
        place = {"stage": device[1:], "device": device}
        input_series.append(counter("stage_busy_seconds_total", busy, **place))
        for reason, seconds in (
            ("dependency", dependency),
            ("copy", copy),
            ("drain", drain),
            ("dispatch", 0),
            ("edge", 0),
            ("shared", 0),
        ):
            input_series.append(counter("stage_idle_seconds_total", seconds, reason=reason, **place))
    whole = " + ".join(f"({share(state)})" for state in STATES)
    [most_idle] = (found.expr for found in EXPRESSIONS if found.panel == "Most idle time")
    codes = dict(zip(("d0", "d1", "d2", "d3"), (1, 4, 2, 8), strict=True))
    wanted = {
        dominating_code(): [(f'{{job="j",device="{device}"}}', code) for device, code in codes.items()],
        whole: [(f'{{job="j",device="{device}"}}', 1) for device in codes],
        # Rounded: series are added in any order.
        f"round({most_idle}, 0.000001)": [('{job="j",reason="copy"}', 43 / 160)],
    }
    tests = [
        {
            "expr": substituted(expression, "5m"),
            "eval_time": "8m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
        }
        for expression, samples in wanted.items()
    ]
    ask(promtool, tmp_path, input_series, tests)


def test_a_job_without_recomputation_has_a_share_of_none(promtool, tmp_path):
    [found] = (found.expr for found in EXPRESSIONS if found.panel == "Recompute share")
    stage = {"stage": "0"}
    input_series = [counter("task_duration_seconds_sum", 30, kind=kind, **stage) for kind in "FB"]
    input_series += [{**made, "series": made["series"].replace('"j"', '"k"')} for made in input_series]
    input_series.append(counter("task_duration_seconds_sum", 20, kind="R", **stage))
    samples = [{"labels": '{job="j"}', "value": 0.25}, {"labels": '{job="k"}', "value": 0}]
    ask(promtool, tmp_path, input_series, [{"expr": substituted(found), "eval_time": "8m", "exp_samples": samples}])


def ask(promtool: str, folder: Path, input_series: list[dict[str, str]], tests: list[dict[str, Any]]) -> None:
    """Let Prometheus's own engine evaluate expressions; promtool prints what came instead of what was expected."""
    case = {"interval": "1m", "input_series": input_series, "promql_expr_test": tests}
    (folder / "case.yml").write_text(yaml.safe_dump({"tests": [case]}))
    done = subprocess.run(
        [promtool, "test", "rules", "case.yml"], cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
