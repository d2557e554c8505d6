"""A real Prometheus scrapes a real service that trains: every expression of every panel and every rule has data.

A metric that was renamed, a label that is not there, a rate of something that begins with its first failure: all
leave a panel empty or an alert silent, and nobody would notice.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest
from dashboard_queries import panel_expressions, rule_expressions, substituted
from prometheus import Prometheus, poll, running

from asyncpipe.service.client import JobClient
from asyncpipe.service.token_roles import TokenRole, create_token
from dashboards import rules

pytestmark = pytest.mark.long

CHARLM = Path(__file__).parents[2] / "examples" / "charlm"
WINDOW = "5s"
PATIENCE = 25.0
"""Seconds in which everything must have data: a window, a snapshot, and what a busy machine takes."""

DEVICES = ["cpu:0", "cpu:1"]
JOB = {
    "name": "charlm",
    "entry": "charlm:build",
    "parameters": {"width": 8, "blocks": 4, "heads": 2, "context": 16, "max_bytes": 20_000},
    "pipeline": {"devices": DEVICES, "microbatches": 4},
    "training": {"steps": 1_000_000, "batch_size": 8, "learning_rate": 1e-2, "overlap": True},
    "faults": {"step_retries": 0},
    "snapshots": {"every": 2},
}
SHORT = {**JOB, "name": "short", "training": {**JOB["training"], "steps": 2}}
NAN = {**JOB, "name": "nan", "training": {**JOB["training"], "steps": 100, "learning_rate": 1e30}}
"""Its loss is no number after a step or two, so it fails."""
NOT_IN_SERVICES = ("compilations_total", "compile_seconds_total", "graph_breaks_total", "mfu")
"""Jobs of a service have no compiled stages: compiling one would hold up the tasks of all others. How much a CPU can
compute at most is not known."""


class Served(NamedTuple):
    """Where a service is, and its metrics; and the token of its user."""

    url: str
    metrics: str
    token: str

    def submit(self, job: dict[str, Any]) -> None:
        """Submit ``job`` as the user."""
        JobClient(self.url, token=self.token).submit(job)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, prometheus_program: str) -> Iterator[Served]:
    """A service that trains the example, in workers."""
    folder: Path = tmp_path_factory.mktemp("run")
    token, _ = create_token(folder / "runs" / "service", "ann", TokenRole.SUBMIT)
    command = [sys.executable, "-m", "asyncpipe", "serve", "--devices", ",".join(DEVICES), "--entries", "charlm:build"]
    command += ["--entry-path", str(CHARLM), "--port", "0", "--metrics-port", "0", "--workers", "processes"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCPIPE_")}
    log = folder / "stderr"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            said: dict[str, str] = {}
            while "metrics" not in said and (line := process.stdout.readline()):
                what, _, where = line.strip().partition(": ")
                said[what] = where
            found = Served(said["service"], said["metrics"], token)
            assert found.metrics.endswith("/metrics"), log.read_text(encoding="utf-8")
            found.submit(JOB)
            yield found
            assert process.poll() is None, log.read_text(encoding="utf-8")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def watching(served: Served, prometheus_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """The Prometheus that scrapes it, and sees one more job end, and one fail."""
    target = served.metrics.removeprefix("http://").removesuffix("/metrics")
    text = rules.rules_yaml(WINDOW, hold=0.005)
    with running(prometheus_program, tmp_path_factory.mktemp("prometheus"), [target], text) as prometheus:
        assert poll(lambda: prometheus.query("asyncpipe_job_queue_seconds_count"), PATIENCE)
        served.submit(SHORT)
        served.submit(NAN)
        yield prometheus


def without_data(wanted: dict[str, str], ask: Callable[[str], list[dict[str, Any]]]) -> dict[str, str]:
    """Those of ``wanted``, expressions by name, that have no series with a number in good time."""
    left = dict(wanted)

    def ask_again() -> bool:
        for name, expression in tuple(left.items()):
            values = [value for series in ask(expression) for _, value in series.get("values") or [series["value"]]]
            if not all(math.isnan(float(value)) for value in values):
                del left[name]
        return not left

    poll(ask_again, PATIENCE)
    return left


def of_panels() -> dict[str, str]:
    return {
        f"{found.dashboard} / {found.panel} / {found.ref}": substituted(found.expr, rate_interval=WINDOW, range="1m")
        for found in panel_expressions()
        if not any(metric in found.expr for metric in NOT_IN_SERVICES)
    }


def of_rules() -> dict[str, str]:
    recorded = {f"recorded {name}": name for name in rules.RECORDINGS}
    return rule_expressions(WINDOW) | recorded


def test_every_panel_and_rule_has_data(watching: Prometheus) -> None:
    wanted = of_panels() | of_rules()
    assert len(wanted) > 100
    assert without_data(wanted, watching.query) == {}
    assert without_data(wanted, lambda expression: watching.query_range(expression, seconds=5)) == {}


def test_an_expression_without_data_would_be_noticed(watching: Prometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE", 0.0)
    wanted = {"good": "up", "gone": "asyncpipe_gone_total", "nothing": "up / 0 * 0", "label": 'up{stage="0"}'}
    assert without_data(wanted, watching.query).keys() == {"gone", "nothing", "label"}


def test_the_label_job_is_the_training_jobs(watching: Prometheus) -> None:
    def jobs() -> set[str]:
        return {series["metric"].get("job", "") for series in watching.query("asyncpipe_steps_total")}

    assert poll(lambda: len(jobs()) == 3, PATIENCE)
    assert jobs() == {"charlm", "short", "nan"}
    assert watching.query("asyncpipe_steps_total{exported_job!=''}") == []


@pytest.mark.promise("Reported, not silent", "A job whose loss is NaN raises an alert.")
def test_a_job_whose_loss_is_no_number_is_an_alert(watching: Prometheus) -> None:
    def failed() -> set[str]:
        return {job for job, alert, _ in watching.firing() if alert == "AsyncpipeJobFailed"}

    assert poll(failed, PATIENCE)
    assert failed() == {"nan"}


def test_the_service_itself_is_told_by_its_address(served: Served, watching: Prometheus) -> None:
    [ready] = watching.query("min by (instance) (asyncpipe_service_ready)")
    assert ready["metric"] == {"instance": served.metrics.removeprefix("http://").removesuffix("/metrics")}
    assert ready["value"][1] == "1"


def test_every_rule_is_evaluated_without_an_error(watching: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        return [rule for rule in watching.rules() if rule["health"] != "unknown"]

    assert poll(lambda: len(evaluated()) == len(rules.RECORDINGS) + len(rules.ALERTS), PATIENCE)
    assert [(rule["name"], rule["lastError"]) for rule in evaluated() if rule["health"] != "ok"] == []


def test_promtool_has_nothing_to_say_about_the_metrics(served: Served, promtool: str) -> None:
    with urlopen(served.metrics, timeout=10) as answer:
        text = answer.read()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
