"""A real Prometheus for a test: started on the loopback interface, asked over its HTTP API, stopped at the end.

It takes a free port by itself and says in its log which one, so no other process can take the port meanwhile.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

__all__ = ["Prometheus", "poll", "running"]

INTERVAL = "500ms"
"""Between two scrapes, and between two evaluations of the rules."""
PATIENCE = 20.0
"""Seconds that starting and stopping may take."""


class Prometheus:
    """The HTTP API of a server at ``url``. What it says of errors is part of the ``AssertionError``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series (``metric`` and ``value``) of an expression, now."""
        return self.get("query", query=expression)["result"]

    def query_range(self, expression: str, seconds: float, step: float = 1.0) -> list[dict[str, Any]]:
        """The series (``metric`` and ``values``) of an expression over the last ``seconds``."""
        now = time.time()
        return self.get("query_range", query=expression, start=now - seconds, end=now, step=step)["result"]

    def rules(self) -> list[dict[str, Any]]:
        """Every loaded rule, with its ``health`` and ``lastError``."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def firing(self) -> set[tuple[str, str, str]]:
        """(job, alert, reason or signal) of what fires now."""
        alerts = [alert for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"]
        return {(a.get("job", ""), a["alertname"], a.get("reason", a.get("signal", ""))) for a in map(_labels, alerts)}

    def get(self, path: str, **parameters: object) -> Any:
        """The ``data`` of an answer of the API."""
        try:
            with urlopen(f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=PATIENCE) as answer:
                return json.load(answer)["data"]
        except HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error} {error.read().decode()}") from None


@contextmanager
def running(program: str, folder: Path, targets: Sequence[str], rules: str) -> Iterator[Prometheus]:
    """A server that scrapes ``targets`` (host:port) and evaluates ``rules`` (YAML); its files lie in ``folder``."""
    (folder / "test.rules.yml").write_text(rules, encoding="utf-8")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(_configuration(targets)), encoding="utf-8")
    log = folder / "prometheus.log"
    command = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stdout=output, stderr=output)
    try:
        yield Prometheus(_url_when_ready(process, log))
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE)


def poll(condition: Callable[[], object], seconds: float) -> bool:
    """Whether ``condition()`` becomes true within ``seconds``; asked several times a second."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _configuration(targets: Sequence[str]) -> dict[str, Any]:
    scrape = {"job_name": "asyncpipe", "honor_labels": True, "static_configs": [{"targets": list(targets)}]}
    return {
        "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": ["test.rules.yml"],
        "scrape_configs": [scrape],
    }


def _url_when_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    def ready() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        return "Server is ready to receive web requests" in log.read_text(encoding="utf-8")

    assert poll(ready, PATIENCE), log.read_text(encoding="utf-8")
    listening = re.search(r'"Listening on" address=(\S+)', log.read_text(encoding="utf-8"))
    assert listening is not None, log.read_text(encoding="utf-8")
    return f"http://{listening[1]}"


def _labels(alert: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = alert["labels"]
    return labels
