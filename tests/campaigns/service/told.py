"""Who hears of jobs without asking: alerts, messages to a webhook that was away, lines in the log.

A job's loss is NaN, another one's code raises, two more share their devices. The service is killed before the webhook's
receiver is there, and the next one, which gives a job one attempt, quarantines those that ran. A real Prometheus
watches, with the rules of the repository over short windows.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from asyncpipe.service.client import JobClient
from dashboards.rules import rules_yaml
from tests.campaigns.service import Row
from tests.support.prometheus import Prometheus, poll, running
from tests.support.webhook_receiver import WebhookReceiver, signature

__all__ = ["run"]

SECRET, TOKEN = "a-secret-of-the-campaign", "correct-horse-battery-staple"
ENTRIES = """
import time
import torch
from torch import nn
from asyncpipe.train.workload import Workload

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(0.01)
        return self.inner(x)

def batches(batch_size, generator):
    while True:
        yield torch.randn(batch_size, 8), torch.randn(batch_size, 8)

def raising(output, target):
    raise RuntimeError("the loss of this job always raises")

def made(loss):
    return Workload(nn.Sequential(Slow(), Slow()), loss, batches)

def well(): return made(nn.functional.mse_loss)
def nan(): return made(lambda output, target: output.sum() * float("nan"))
def raises(): return made(raising)
"""
LONG = 60.0
"""Seconds in which anything must have happened."""
REFUSED = 1000


class Served(NamedTuple):
    """A service that runs, and what it is asked by."""

    process: subprocess.Popen[str]
    url: str
    metrics: str

    @property
    def client(self) -> JobClient:
        return JobClient(self.url, TOKEN)


def run(folder: Path) -> list[Row]:
    """The rows; everything has ended behind them."""
    with _nobody() as port:
        _write(folder, port)
        with _served(folder) as served, _watched(folder, served) as prometheus:
            jobs = {name: served.client.submit(_job(name))["id"] for name in ("well", "beside", "nan", "raises")}
            failed = _alert(prometheus, "a job whose loss is NaN, a job whose code raises", "Failed", {"nan", "raises"})
            sharing = _sharing(prometheus)
            refused = _refused(folder, served)
            served.process.kill()
        killed = _lines(folder)
        tried = sum("next try" in line["message"] for line in killed)
    came = time.monotonic()
    with (
        WebhookReceiver(port) as receiver,
        _served(folder, "--max-attempts", "1") as served,
        _watched(folder, served) as prometheus,
    ):
        arrived = poll(lambda: len(receiver.got) >= 4, LONG)
        seconds = time.monotonic() - came
        what = "kill -9 of the service: jobs are quarantined at its next start, before anything is scraped"
        quarantined = _alert(prometheus, what, "Quarantined", {"well", "beside"})
    right = [_is_signed(*each) for each in receiver.got]
    told = Counter((message["data"]["job"], message["type"]) for message in receiver.messages())
    wanted = Counter({(jobs[name], "job.failed"): 1 for name in ("nan", "raises")})
    wanted += Counter({(jobs[name], "job.quarantined"): 1 for name in ("well", "beside")})
    webhook = Row(
        "the webhook's receiver is away, two jobs fail, kill -9 of the service; both come back",
        f"{tried} tries before; {len(receiver.got)} messages of 4, {sum(right)} signed, {seconds:.1f} s with the start",
        arrived and all(right) and told == wanted and tried > 0,
    )
    return [failed, quarantined, webhook, sharing, refused, _log(killed, jobs)]


def _alert(prometheus: Prometheus, what: str, how: str, jobs: set[str]) -> Row:
    begun = time.monotonic()

    def told() -> set[str]:
        return {job for job, alert, _ in prometheus.firing() if alert == f"AsyncpipeJob{how}"}

    poll(lambda: told() >= jobs, LONG)
    names = " and ".join(sorted(told()))
    figure = f"AsyncpipeJob{how} fires for {names} within {time.monotonic() - begun:.1f} s"
    return Row(what, figure, told() == jobs)


def _sharing(prometheus: Prometheus) -> Row:
    """Two jobs that sleep in their stages share both devices."""

    def ratio(reason: str) -> float:
        found = prometheus.query(f'sum by (job) (job:asyncpipe_{reason}:ratio{{job=~"well|beside"}})')
        return max((float(series["value"][1]) for series in found), default=-1.0)

    poll(lambda: ratio("shared") > 0.1, LONG)
    shared, dispatch = ratio("shared"), ratio("dispatch")
    lag = {job for job, alert, _ in prometheus.firing() if alert == "AsyncpipeLoopLag"}
    figure = f"shared {shared:.0%}, dispatch {dispatch:.0%} of their steps; {len(lag)} alerts of loop lag"
    return Row("two jobs share both devices all the time", figure, shared > 0.1 and not lag)


def _refused(folder: Path, served: Served) -> Row:
    before, statuses = len(_lines(folder)), Counter[int]()
    for _ in range(REFUSED):
        request = urllib.request.Request(f"{served.url}v1/jobs", headers={"Authorization": "Bearer wrong"})
        try:
            urllib.request.urlopen(request, timeout=LONG)
        except urllib.error.HTTPError as error:
            statuses[error.code] += 1
    lines = [line for line in _lines(folder)[before:] if line["logger"] == "asyncpipe.audit"]
    on_file = (folder / "state" / "refused.jsonl").read_text().count('"status": 401')
    figure = f"{statuses[401]} answers 401: {len(lines)} lines in the log, {on_file} in refused.jsonl"
    return Row(f"{REFUSED} requests with a wrong token", figure, statuses[401] == REFUSED and len(lines) <= 20)


def _log(lines: list[dict[str, Any]], jobs: dict[str, str]) -> Row:
    """Every line is JSON, and tells of each job by its id."""
    events = {name: [line["event"] for line in lines if line.get("job") == job] for name, job in jobs.items()}
    causes = [line["cause"] for line in lines if line.get("event") == "end"]
    held = all({"submitted", "begin"} <= set(found) for found in events.values())
    held &= "end" in events["nan"] and {"retry", "end"} <= set(events["raises"]) and len(causes) == 2 and all(causes)
    shown = "; ".join(f"{name}: {', '.join(events[name])}" for name in ("nan", "raises"))
    return Row("--log-format json", f"{len(lines)} lines, all JSON; {shown}", held)


# The service and who watches it


def _job(name: str) -> dict[str, Any]:
    entry = name if name in ("nan", "raises") else "well"
    return {
        "name": name,
        "entry": f"told_entries:{entry}",
        "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 4},
        "training": {"steps": 1_000_000, "batch_size": 4, "learning_rate": 1e-3},
        "snapshots": {"every": 100},
        "faults": {"step_retries": 1, "snapshot_retries": 1},
    }


def _write(folder: Path, port: int) -> None:
    (folder / "code").mkdir()
    (folder / "code" / "told_entries.py").write_text(ENTRIES)
    for name, text in (("secret", SECRET), ("token", TOKEN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    (folder / "service.toml").write_text(
        'folder = "state"\nentry_path = "code"\nport = 0\nmetrics_port = 0\ndevices = ["cpu:0", "cpu:1"]\n'
        'entries = ["told_entries:well", "told_entries:nan", "told_entries:raises"]\ntoken_file = "token"\n'
        f"requests_per_second = 1e6\nburst = 1000000\n[webhook]\n"
        f'url = "http://127.0.0.1:{port}/hook"\nsecret_file = "secret"\n'
    )


@contextmanager
def _served(folder: Path, *options: str) -> Iterator[Served]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCPIPE_")}
    command = [sys.executable, "-m", "asyncpipe", "serve", "--config", "service.toml", "--log-format", "json", *options]
    with (
        (folder / "log").open("a") as log,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            said: dict[str, str] = {}
            assert process.stdout is not None
            while "ready" not in said and (line := process.stdout.readline()):
                what, _, rest = line.strip().partition(": ")
                said[what] = rest
            assert "ready" in said, (folder / "log").read_text()
            yield Served(process, said["service"], said["metrics"])
        finally:
            process.kill()


@contextmanager
def _watched(folder: Path, served: Served) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    assert program is not None, "prometheus is not on PATH"
    (folder / "prometheus").mkdir(exist_ok=True)
    target = re.sub(r"^http://|/metrics$", "", served.metrics)
    with running(program, folder / "prometheus", [target], rules_yaml("5s", 0.005)) as prometheus:
        yield prometheus


def _lines(folder: Path) -> list[dict[str, Any]]:
    """The log's lines; raises unless each is JSON."""
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


@contextmanager
def _nobody() -> Iterator[int]:
    """A port at which nobody answers during the block."""
    with socket.socket() as dialled:
        dialled.bind(("127.0.0.1", 0))  # It does not listen: who dials is refused.
        yield dialled.getsockname()[1]


def _is_signed(headers: dict[str, str], body: bytes) -> bool:
    is_fresh = abs(time.time() - int(headers["webhook-timestamp"])) < 300
    return is_fresh and hmac.compare_digest(headers["webhook-signature"], signature(SECRET.encode(), headers, body))
