"""``asyncpipe jobs`` against a service in memory: what it sends, what people and programs read, and its exit status."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from asyncpipe import cli
from asyncpipe.cli.jobs_text import EventPrinter, job_text, jobs_table, loss_line, plain
from asyncpipe.service.client import ServerEvent
from asyncpipe.service.submission.from_job_file import read_submission

CHARLM = Path(__file__).parents[2] / "examples" / "charlm" / "charlm.toml"
TOKEN = "correct-horse-battery-staple"
IDS = [f"01k8zq1m7h9x2v4n6r8t0w3y5{letter}" for letter in "abcdef"]
RECORD = {
    "name": "charlm",
    "entry": "charlm:build",
    "state": "queued",
    "asked": None,
    "cause": "submitted",
    "priority_class": "foreground",
    "weight": 1.0,
    "schedule": "1f1b",
    "submitted": 1.7e9,
    "updated": 1.7e9,
    "attempts": 0,
    "step": 0,
    "steps": 450,
    "snapshot": None,
    "devices": ["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
    "replicas": 2,
}


WORKER = {
    "name": "host-a/cpu:0",
    "host": "host-a",
    "up": True,
    "draining": False,
    "machine": "a.example",
    "pid": 7,
    "heartbeat_seconds": 0.25,
    "round_trip_seconds": None,
    "devices": ["host-a/cpu:0"],
    "jobs": [IDS[0]],
}


@dataclass
class Service:
    """Jobs in a table, as the HTTP API has them."""

    url: str
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    sent: list[tuple[str, str, Any]] = field(default_factory=list)
    events: str = ""
    me: dict[str, Any] = field(default_factory=lambda: {"user": None, "teams": [], "role": "operate"})
    holds: threading.Event | None = None
    """A stream of events waits for this behind its last one, where there is one."""

    def add(self, **more: Any) -> str:
        job = IDS[len(self.jobs)]
        self.jobs[job] = {"id": job, **RECORD, **more}
        return job

    def answer(self, handler: BaseHTTPRequestHandler, body: Any) -> tuple[int, Any]:
        method, path = handler.command, handler.path
        if handler.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"title": "Unauthorized", "detail": "show the token"}
        self.sent.append((method, path, body))
        if path == "/v1/jobs" and method == "POST":
            key = handler.headers["Idempotency-Key"]
            if body["pipeline"]["schedule"] == "a:Wrong":
                problems = [{"key": "pipeline.schedule", "text": "must be one of gpipe"}]
                return 422, {"title": "Unprocessable", "detail": "wrong", "problems": problems}
            if key not in self.keys:
                self.keys[key] = self.add(name=body["name"])
            return 201, {**self.jobs[self.keys[key]], "document": body}
        if path.startswith("/v1/jobs?"):
            return 200, {"jobs": list(self.jobs.values()), "next": None}
        if path == "/v1/me":
            return 200, self.me
        if path.startswith("/v1/workers"):
            host, _, what = path.removeprefix("/v1/workers").strip("/").partition("/")
            found = [{**WORKER, "draining": what == "drain"}] if host in ("", "host-a") else []
            return (200, {"workers": found}) if found else (404, {"title": "Not Found", "detail": "there is no host"})
        _, job, what = re.fullmatch(r"/v1/(jobs)/([^/?]*)/?([^?]*).*", path).groups()
        if job not in self.jobs:
            return 404, {"title": "Not Found", "detail": "there is no job of this id"}
        return self.about(self.jobs[job], what, body)

    def about(self, job: dict[str, Any], what: str, body: Any) -> tuple[int, Any]:
        change = {"pause": "paused", "resume": "queued", "cancel": "cancelled"}.get(what)
        if what == "resume" and job["state"] != "paused":
            return 409, {"title": "Conflict", "detail": f"job {job['id']} is {job['state']}"}
        if change is not None:
            job.update(state=change, cause=f"asked to {what}")
        if what == "schedule":
            job["schedule"] = body["schedule"]
        if what == "history":
            row = {"sequence": 1, "from": None, "to": "queued", "at": 1.7e9, "cause": "submitted"}
            return 200, {"transitions": [row]}
        if what == "losses":
            row = {"step": 1, "loss": 4.5, "learning_rate": 1e-3, "seconds": 0.25, "tokens": 512}
            return 200, {"losses": [row, {**row, "step": 2, "loss": None}], "next": None}
        return 200, {**job, "document": {"training": {"steps": 450}, "parameters": {"width": 8}}}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Tables are cut to the terminal's width."""
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path.endswith("/events"):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(found.events.encode())
                self.wfile.flush()
                if found.holds is not None:
                    found.holds.wait(30)
                return
            status, body = found.answer(self, json.loads(content) if content else None)
            document = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(document)))
            self.end_headers()
            self.wfile.write(document)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Service(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("ASYNCPIPE_URL", found.url)
    monkeypatch.setenv("ASYNCPIPE_TOKEN", TOKEN)
    monkeypatch.delenv("ASYNCPIPE_TOKEN_FILE", raising=False)
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def jobs(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    """What ``asyncpipe jobs`` prints on stdout and stderr."""
    assert cli.main(["jobs", *arguments]) == status
    out, err = capsys.readouterr()
    return out, err


def event(number: int, kind: str, /, **data: Any) -> str:
    document = {"id": number, "at": 1.7e9, "kind": kind, "data": data}
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(document)}\n\n"


END = "event: end\ndata: {}\n\n"
RUN = (
    event(1, "state", number=1, to="queued", cause="submitted", **{"from": None})
    + event(2, "state", number=2, to="running", cause="its turn", **{"from": "queued"})
    + event(2, "step", step=1, loss=4.5, learning_rate=1e-3, seconds=0.5, tokens=1000)
    + event(2, "step", step=2, loss=4.25, learning_rate=1e-3, seconds=0.5, tokens=1000)
    + event(3, "snapshot", step=2, name="step-2")
    + event(4, "note", level=30, text="a step\x1b[2J\nwas tried again")
    + END
)


# Users


def test_whose_jobs_they_are(service, capsys):
    service.add()
    assert "USER" not in jobs(capsys, "list")[0], "where there are no users"
    assert "the service knows no users" in jobs(capsys, "list", "--mine", status=2)[1]
    service.add(owner="alice", teams=["vision"])
    service.me = {"user": "alice", "teams": ["vision"], "role": "submit"}
    head, *rows = jobs(capsys, "list", "--user", "bob")[0].splitlines()
    assert [row[head.index("USER") :].split()[0] for row in rows] == ["queued", "alice"]
    jobs(capsys, "list", "--mine")
    jobs(capsys, "watch", "--mine", "--turns", "2", "--every", "0.01")
    asked = [path for _, path, _ in service.sent if path.startswith("/v1/jobs?")]
    assert [re.findall(r"owner=(\w+)", path) for path in asked] == [[], ["bob"], *([["alice"]] * 3)]
    assert re.search("^user +alice vision$", jobs(capsys, "show", IDS[1])[0], re.MULTILINE)


# Submitting


def test_a_job_file_becomes_a_submission_and_says_what_does_not_apply(service, capsys):
    out, err = jobs(capsys, "submit", str(CHARLM))
    assert out == f"{IDS[0]}\n"
    left_out = "observe.metrics_port, observe.trace, observe.timeline"
    assert err == f"{CHARLM}: left out, as the service has its own: {left_out}\n"
    ((_, _, sent),) = service.sent
    assert sent == {
        "name": "charlm",
        "entry": "charlm:build",
        "parameters": {"width": 144, "blocks": 4, "heads": 4, "context": 64, "prompt": "def "},
        "pipeline": {
            "devices": ["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
            "microbatches": 8,
            "schedule": "1f1b",
            "checkpoint": "except_last",
        },
        "training": {
            "steps": 450,
            "batch_size": 32,
            "learning_rate": 3e-3,
            "warmup_steps": 80,
            "weight_decay": 0.1,
            "seed": 0,
            "overlap": True,
        },
        "faults": {"step_retries": 0},
    }


def test_snapshots_are_the_jobs_choice_but_for_their_place(tmp_path):
    path = tmp_path / "job.toml"
    table = '\n[snapshots]\nfolder = "runs/x"\nevery = 7\nkeep_every = 2\nresume = true\n'
    table += "[faults]\nstep_retries = 0\nsnapshot_retries = 5\n"
    path.write_text(CHARLM.read_text(encoding="utf-8").partition("[observe]")[0] + table, encoding="utf-8")
    submission, ignored = read_submission(path)
    assert submission["snapshots"] == {"every": 7, "keep_every": 2}
    assert submission["faults"] == {"step_retries": 0, "snapshot_retries": 5}
    assert ignored == ["snapshots.folder", "snapshots.resume"]


def test_options_win_over_the_file(service, capsys):
    options = ["--name", "mine", "--steps", "5", "--devices", "cpu:0, cpu:1", "--replicas", "2", "--background"]
    sets = ["pipeline.schedule=interleaved", "service.weight=3", "job.entry=a.b:c", "job.parameters.width=8"]
    jobs(capsys, "submit", str(CHARLM), *options, *(word for each in sets for word in ("--set", each)))
    ((_, _, sent),) = service.sent
    assert (sent["name"], sent["entry"], sent["weight"], sent["priority_class"]) == ("mine", "a.b:c", 3, "background")
    assert sent["parameters"]["width"] == 8
    assert (sent["pipeline"]["devices"], sent["pipeline"]["replicas"]) == (["cpu:0", "cpu:1"], 2)
    assert sent["pipeline"]["schedule"] == "interleaved"
    assert (sent["training"]["steps"], sent["training"]["batch_size"]) == (5, 32)


@pytest.mark.parametrize("devices", [2, {"count": 2, "memory": "20 GiB", "hosts": 1}])
def test_a_file_may_ask_a_service_for_any_devices(service, capsys, tmp_path, devices):
    path = tmp_path / "job.toml"
    written = json.dumps(devices).replace(": ", " = ")
    text = CHARLM.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("devices"))
    path.write_text(text.replace(line, f"devices = {written}"), encoding="utf-8")
    jobs(capsys, "submit", str(path))
    jobs(capsys, "submit", str(CHARLM), "--devices", "3", "--set", "service.priority=7")
    (_, _, first), (_, _, second) = service.sent
    assert (first["pipeline"]["devices"], second["pipeline"]["devices"], second["priority"]) == (devices, 3, 7)
    assert cli.main(["train", str(path)]) == 2
    assert "pipeline.devices: only a service chooses them; name them here" in capsys.readouterr().err


def test_the_same_key_makes_one_job(service, capsys):
    first, _ = jobs(capsys, "submit", str(CHARLM), "--key", "monday")
    again, _ = jobs(capsys, "submit", str(CHARLM), "--key", "monday", "--json")
    assert json.loads(again)["id"] == first.strip()
    other, _ = jobs(capsys, "submit", str(CHARLM))
    assert other != first


def test_what_is_wrong_with_a_job_is_told_by_its_keys(service, capsys):
    out, err = jobs(capsys, "submit", str(CHARLM), "--set", "pipeline.schedule=a:Wrong", status=2)
    assert out == ""
    assert err.splitlines()[-2:] == [
        "asyncpipe: error: Unprocessable (422): wrong",
        "pipeline.schedule: must be one of gpipe",
    ]
    _, err = jobs(capsys, "submit", str(CHARLM), "--set", "service.wieght=2", status=2)
    assert "service.wieght: did you mean 'weight'? [service] may have tags, deadline, priority_class, weight" in err
    _, err = jobs(capsys, "submit", "nowhere.toml", status=2)
    assert "nowhere.toml: cannot be read" in err


# Looking and steering


def test_a_list_is_a_table_or_json(service, capsys):
    assert jobs(capsys, "list")[0] == "no jobs\n"
    service.add()
    service.add(
        name="two\x1b[31m", state="running", asked="paused", step=7, cause="x" * 500, priority_class="background"
    )
    heading, first, second = jobs(capsys, "list")[0].splitlines()
    assert heading.split() == ["ID", "NAME", "STATE", "CLASS", "WEIGHT", "SCHEDULE", "STEP", "UPDATED", "CAUSE"]
    assert first.split()[:7] == [IDS[0], "charlm", "queued", "fore", "1", "1f1b", "0/450"]
    assert "\x1b" not in second
    assert "two\\x1b[31m  running (to be paused)  back" in second
    assert second.endswith(" " + "x" * 500), "what is piped is complete"
    assert json.loads(jobs(capsys, "list", "--json")[0]) == list(service.jobs.values())
    jobs(capsys, "list", "--state", "running", "--state", "queued", "--limit", "5", "--after", IDS[0])
    assert service.sent[-1][1] == f"/v1/jobs?limit=5&state=running&state=queued&after={IDS[0]}"


def test_one_job_is_shown_with_what_was_submitted(service, capsys):
    job = service.add()
    shown = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in jobs(capsys, "show", job)[0].splitlines())
    assert shown["state"] == "queued: submitted"
    assert shown["devices"] == "cpu:0, cpu:1 | cpu:2, cpu:3"
    assert shown["training.steps"] == "450"
    assert shown["parameters.width"] == "8"
    assert json.loads(jobs(capsys, "show", job, "--json")[0])["id"] == job
    _, err = jobs(capsys, "show", IDS[5], status=2)
    assert err == "asyncpipe: error: Not Found (404): there is no job of this id\n"


def test_a_job_is_steered(service, capsys):
    job = service.add()
    assert jobs(capsys, "pause", job)[0] == f"charlm ({job}) is paused at step 0/450: asked to pause\n"
    assert "is queued" in jobs(capsys, "resume", job)[0]
    assert json.loads(jobs(capsys, "schedule", job, "interleaved", "--json")[0])["schedule"] == "interleaved"
    assert "is cancelled" in jobs(capsys, "cancel", job)[0]
    assert "Conflict (409)" in jobs(capsys, "resume", job, status=2)[1]


def test_workers_are_a_table_or_json_and_their_hosts_are_drained(service, capsys):
    heading, row = jobs(capsys, "workers")[0].splitlines()
    assert heading.split() == ["WORKER", "HOST", "STATE", "MACHINE", "PID", "HEARD", "DEVICES", "JOBS"]
    assert row.split() == ["host-a/cpu:0", "host-a", "up", "a.example", "7", "0.2", "s", "host-a/cpu:0", IDS[0]]
    assert json.loads(jobs(capsys, "workers", "--json")[0]) == [WORKER]
    assert "up, draining" in jobs(capsys, "drain", "host-a")[0]
    assert "draining" not in jobs(capsys, "undrain", "host-a")[0]
    assert service.sent[-1] == ("POST", "/v1/workers/host-a/undrain", {})
    assert "there is no host" in jobs(capsys, "drain", "nowhere", status=2)[1]


def test_history_and_losses_are_tables_or_json(service, capsys):
    job = service.add()
    heading, row = jobs(capsys, "history", job)[0].splitlines()
    assert heading.split() == ["AT", "FROM", "TO", "CAUSE"]
    assert row.split()[2:] == ["queued", "submitted"]
    assert json.loads(jobs(capsys, "history", job, "--json")[0])[0]["to"] == "queued"
    heading, first, second = jobs(capsys, "losses", job)[0].splitlines()
    assert heading.split() == ["STEP", "LOSS", "RATE", "SECONDS", "TOKENS"]
    assert first.split() == ["1", "4.500000", "1.000e-03", "0.250", "512"]
    assert "not finite" in second
    assert [json.loads(line)["step"] for line in jobs(capsys, "losses", job, "--json")[0].splitlines()] == [1, 2]


# Watching


@pytest.mark.parametrize(("state", "status"), [("finished", 0), ("failed", 1), ("cancelled", 1)])
def test_following_ends_with_the_job_and_its_status_says_how(state, status, service, capsys):
    service.events = RUN
    job = service.add(state=state, cause="all is said")
    lines = jobs(capsys, "follow", job, status=status)[0].splitlines()
    assert [line.partition("  ")[2] if line.startswith("20") else line for line in lines] == [
        "queued: submitted",
        "running (was queued): its turn",
        "step 1/450  loss 4.5000  rate 1.00e-03  2,000 tokens/s",
        "step 2/450  loss 4.2500  rate 1.00e-03  2,000 tokens/s",
        "snapshot step-2",
        "warning: a step\\x1b[2J was tried again",
        f"charlm ({job}) is {state} at step 0/450: all is said",
    ]


def test_following_for_programs_is_a_json_object_a_line(service, capsys):
    service.events = RUN
    out, _ = jobs(capsys, "follow", service.add(state="finished"), "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["kind"] for row in rows] == ["state", "state", "step", "step", "snapshot", "note"]
    assert rows[2]["data"]["loss"] == 4.5


def test_submit_can_follow(service, capsys):
    service.events = event(1, "state", to="finished", cause="done") + END
    out, err = jobs(capsys, "submit", str(CHARLM), "--follow", status=1)
    assert f"submitted job {IDS[0]}" in err
    assert "finished: done" in out
    assert "is queued" in out, "the table in memory has not changed"


@pytest.mark.parametrize(("state", "status"), [("finished", 0), ("failed", 1), ("cancelled", 1), ("running", 3)])
def test_waiting_says_by_its_status_how_it_ended(state, status, service, capsys):
    out, err = jobs(capsys, "wait", service.add(state=state), "--timeout", "0", status=status)
    assert f"is {state}" in (err if status == 3 else out)


def test_ctrl_c_while_following_leaves_the_job_alone(service):
    """As a process, since it is a signal."""
    service.holds = threading.Event()
    service.events = event(1, "state", to="running", cause="its turn")
    job = service.add(state="running")
    with subprocess.Popen(
        [sys.executable, "-m", "asyncpipe", "jobs", "follow", job],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "running: its turn" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        service.holds.set()
    assert process.returncode == 130
    assert err == f"job {job} goes on; asyncpipe jobs follow {job} shows it again\n"
    assert out == ""
    assert {method for method, _, _ in service.sent} == {"GET"}


def test_steps_are_drawn_over_one_another_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    printer = EventPrinter(out, steps=2)
    step = {"loss": 4.5, "learning_rate": 1e-3, "seconds": 0.5, "tokens": 1000}
    printer.show(ServerEvent(1, "step", 0.0, {"step": 1, **step}))
    printer.show(ServerEvent(1, "step", 0.0, {"step": 2, **step, "loss": None}))
    printer.show(ServerEvent(2, "snapshot", 0.0, {"name": "step-2"}))
    printer.end()
    first, second, rest = out.getvalue().split("\r")[1:]
    assert (first.split()[1], second.split()[1]) == ("1/2", "2/2")
    assert "loss not finite" in second
    assert rest.rstrip().endswith("snapshot step-2")
    assert len(rest.rstrip("\n")) >= len(first), "nothing of the step is left on the line"


# The token and the address


def test_a_token_comes_from_a_file_or_the_environment_and_never_from_the_command_line(
    service, capsys, monkeypatch, tmp_path
):
    job = service.add()
    monkeypatch.delenv("ASYNCPIPE_TOKEN")
    assert "Unauthorized (401)" in jobs(capsys, "show", job, status=2)[1]
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="utf-8")
    path.chmod(0o644)
    _, err = jobs(capsys, "show", job, "--token-file", str(path), status=2)
    assert "--token-file: must be a file that no other user can access" in err
    path.chmod(0o600)
    jobs(capsys, "show", job, "--token-file", str(path))
    monkeypatch.setenv("ASYNCPIPE_TOKEN_FILE", str(path))
    jobs(capsys, "show", job)
    with pytest.raises(SystemExit):
        cli.main(["jobs", "show", job, "--token", TOKEN])


def test_an_address_on_the_command_line_wins(service, capsys, monkeypatch):
    monkeypatch.setenv("ASYNCPIPE_URL", "http://127.0.0.1:1")
    assert "127.0.0.1:1: [Errno" in jobs(capsys, "list", status=2)[1]
    assert jobs(capsys, "list", "--url", service.url)[0] == "no jobs\n"
    assert "url must look like" in jobs(capsys, "list", "--url", "nonsense", status=2)[1]


@pytest.mark.parametrize(
    "command",
    ["", *"submit list show history pause resume cancel schedule workers drain undrain follow losses wait".split()],
)
def test_every_command_helps(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["jobs", *command.split(), "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "--token-file" in out
    assert len(out.splitlines()) > 10


def test_the_command_needs_no_torch(service):
    script = "import sys; from asyncpipe import cli; cli.main(['jobs', 'list']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("no jobs\n", 0), done.stderr


def test_what_a_service_says_cannot_steer_a_terminal():
    assert plain("a\x1b]0;x\x07b\nc\u202e") == "a\\x1b]0;x\\x07b c\\u202e"
    evil = {"id": "1", **RECORD, "name": "\x1b[2J", "cause": "\x1b[2J", "document": {"\x1b[2J": {"\x1b": "\x1b"}}}
    assert "\x1b" not in jobs_table([evil]) + job_text(evil)
    assert "\x1b" not in loss_line({"step": 1, "loss": 1.0, "learning_rate": 1.0, "seconds": 1.0, "tokens": 1})
