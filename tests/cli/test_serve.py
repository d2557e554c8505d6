"""``asyncpipe serve`` as an operator uses it: started, given jobs, told to end, started again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from gated_text import GATED_ENTRY
from killing import SCRIPT, poll, serving
from preloaded import Program

from asyncpipe import cli
from asyncpipe.cli import serve as serve_module
from asyncpipe.service.client import ApiError, JobClient

pytestmark = [
    pytest.mark.timeout(120),  # Each starts a process or two that import torch.
    pytest.mark.skipif(
        find_spec("fastapi") is None or find_spec("pydantic_settings") is None,
        reason="a service needs FastAPI and pydantic-settings: pip install -e '.[service]'",
    ),
]

CHARLM = Path(__file__).parents[2] / "examples" / "charlm"
TOKEN = "correct-horse-battery-staple"
SECONDS = 40.0
"""For another process to get somewhere."""
JOB: dict[str, Any] = {
    "name": "tiny",
    "entry": "charlm:build",
    "parameters": {"width": 8, "blocks": 2, "heads": 2, "context": 16, "sample_length": 4},
    "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 2},
    "training": {"steps": 5, "batch_size": 4, "learning_rate": 1e-2},
    "snapshots": {"every": 2},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, and no settings of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("ASYNCPIPE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    shutil.copy(CHARLM / "charlm.py", tmp_path / "code")
    (tmp_path / "code" / "slow.py").write_text(GATED_ENTRY, encoding="utf-8")
    (tmp_path / "service.toml").write_text(
        'isolation = "thread"\ndevices = ["cpu:0", "cpu:1"]\nentry_path = "code"\nport = 0\nmetrics_port = 0\n'
        '[entries."charlm:build"]\nfixed = { max_bytes = 20_000 }\n[entries."slow:build"]\n',
        encoding="utf-8",
    )
    for name in ("charlm", "slow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("charlm", "slow"):
        sys.modules.pop(name, None)


def test_a_service_trains_what_it_is_given_and_ends_in_peace(folder, capsys, monkeypatch):
    (folder / "token").write_text(TOKEN, encoding="utf-8")
    (folder / "token").chmod(0o600)
    (folder / "tiny.toml").write_text(as_toml(), encoding="utf-8")
    with serving(folder, "--token-file", "token", "--log-format", "json") as served:
        assert served.line("ready: ") == "ready: 0 jobs run, 0 wait"
        assert served.line("entries: ") == "entries: charlm:build, slow:build; devices: cpu:0, cpu:1"
        url, port = re.fullmatch(r"service: (http://127\.0\.0\.1:(\d+))/", served.line("service: ")).groups()
        metrics = re.fullmatch(r"metrics: (http://\S+/metrics)", served.line("metrics: "))[1]
        with pytest.raises(ApiError, match=r"Unauthorized \(401\)"):
            list(JobClient(url).list())
        monkeypatch.setenv("ASYNCPIPE_URL", url)
        monkeypatch.setenv("ASYNCPIPE_TOKEN_FILE", "token")
        assert cli.main(["jobs", "submit", "tiny.toml", "--follow"]) == 0
        out, err = capsys.readouterr()
        job = err.split()[-1]
        assert "step 5/5  loss " in out
        assert out.splitlines()[-1].startswith(f"tiny ({job}) is finished at step 5/5: ")
        client = JobClient(url, TOKEN)
        assert [row["step"] for row in client.losses(job)] == [1, 2, 3, 4, 5]
        assert [row["to"] for row in client.history(job)] == ["queued", "running", "finished"]
        with urlopen(metrics, timeout=10) as answer:
            assert b"asyncpipe_" in answer.read()
        with pytest.raises(ApiError):
            list(JobClient(url, TOKEN[::-1]).list())
        check_taken(port, capsys)
        served.process.terminate()
        assert served.ends() == 0
        assert "SIGTERM: no more jobs are taken; no job runs (once more: end at once)" in served.lines
    assert (folder / "runs" / "service").stat().st_mode & 0o777 == 0o700
    assert list((folder / "runs" / "service" / "jobs" / job / "snapshots").glob("step-*"))
    assert TOKEN not in (folder / "stderr").read_text(encoding="utf-8")
    audit = folder / "runs" / "service"
    changes, refusals = (
        [json.loads(line) for line in (audit / name).read_text().splitlines()]
        for name in ("audit.jsonl", "refused.jsonl")
    )
    assert [(line["what"], line["status"], line["job"], line["token"]) for line in changes] == [
        ("POST /v1/jobs", 201, job, "service")
    ]
    assert [(line["what"], line["status"]) for line in refusals] == [("GET /v1/jobs", 401)] * 2
    lines = [json.loads(line) for line in (folder / "stderr").read_text(encoding="utf-8").splitlines()]
    assert any(line["level"] == "INFO" and line.get("job") == job for line in lines)


def check_taken(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A second service cannot have the same port, and says so."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ASYNCPIPE_URL")
        options = ["--config", "service.toml", "--folder", "other", "--port", port, "--metrics-port", "none"]
        assert cli.main(["serve", *options]) == 2
    assert f"cannot serve the API on 127.0.0.1:{port}" in capsys.readouterr().err
    assert {number: signal.getsignal(number) for number in before} == before


def as_toml() -> str:
    tables = [f'name = "{JOB["name"]}"', "[job]", f'entry = "{JOB["entry"]}"', "[job.parameters]"]
    tables += [f"{key} = {json.dumps(value)}" for key, value in JOB["parameters"].items()]
    for table in ("pipeline", "training"):
        tables += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in JOB[table].items())]
    return "\n".join(tables)


GATED = {
    "name": "slow",
    "entry": "slow:build",
    "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 1},
    "training": {"steps": 1, "batch_size": 2, "learning_rate": 0.1},
}


def test_a_hangup_reads_entries_and_the_token_again(folder):
    def token(text):
        (folder / "token").write_text(text, encoding="utf-8")
        (folder / "token").chmod(0o600)

    def said(text):
        poll(text, lambda: text in (folder / "stderr").read_text(encoding="utf-8"))

    settings = (folder / "service.toml").read_text(encoding="utf-8")
    token(TOKEN)
    with serving(folder, "--token-file", "token") as served:
        url = served.client().url
        before, after = JobClient(url, TOKEN, retries=0), JobClient(url, TOKEN[::-1], retries=0)
        with pytest.raises(ApiError, match="entry: must be a registered entry"):
            before.submit(GATED | {"entry": "again:build"})
        (folder / "service.toml").write_text("port = 'x'", encoding="utf-8")
        served.process.send_signal(signal.SIGHUP)
        said("the settings are wrong, and nothing has changed: ")
        assert list(before.list()) == []
        (folder / "code" / "again.py").write_text(GATED_ENTRY, encoding="utf-8")
        (folder / "service.toml").write_text(settings + '[entries."again:build"]\n', encoding="utf-8")
        token(TOKEN[::-1])
        served.process.send_signal(signal.SIGHUP)
        said("the settings were read again; entries: again:build, charlm:build, slow:build")
        with pytest.raises(ApiError, match=r"Unauthorized \(401\)"):
            list(before.list())
        os.mkfifo(folder / "gate")
        job = after.submit(GATED | {"entry": "again:build"})["id"]
        served.line("in the gate")
        assert after.show(job)["state"] == "running"
        served.process.kill()


# Draining does not begin before the test is over: what is said of the service is true already.
NEVER_DRAINS = (
    "import asyncio; from asyncpipe.service.training_service import TrainingService; "
    "TrainingService.drain = lambda *_: asyncio.Event().wait()"
)


@pytest.mark.parametrize("code", ["pass", NEVER_DRAINS])
def test_a_second_signal_ends_it_at_once(folder, code):
    os.mkfifo(folder / "gate")
    with serving(folder, "--grace-seconds", "1000", code=code) as served:
        client = served.client()
        job = client.submit(GATED)["id"]
        served.line("in the gate")
        served.process.terminate()
        served.line("SIGTERM: no more jobs are taken; 1 running job ends its step")
        with pytest.raises(ApiError, match=r"Service Unavailable \(503\)"):
            JobClient(client.url, retries=0).submit(GATED)
        assert client.show(job)["state"] == "running"
        served.process.send_signal(signal.SIGINT)
        assert served.ends() == 128 + signal.SIGINT


@contextmanager
def nobody_reads(process: Program | subprocess.Popen[str], how: str) -> Iterator[None]:
    """The reader of what it prints has gone, or has stopped, when so much is printed that no more fits."""
    assert process.stdout is not None
    if how == "gone":
        process.stdout.close()
        yield
        return
    pipe = os.open(f"/proc/{process.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    try:
        for size in (4096, 1):
            with suppress(BlockingIOError):
                while True:
                    os.write(pipe, b"." * size)
        yield
    finally:
        os.close(pipe)


READERS = [
    "gone",
    pytest.param("stopped", marks=pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="/proc")),
]


@pytest.mark.parametrize("how", READERS)
def test_it_ends_in_peace_though_nobody_reads(folder, how):
    # Jobs may have printed something that is still on its way.
    code = (
        "serve.READER_SECONDS = 0.1; told = serve.ending_line; sys.stdout.reconfigure(write_through=False); "
        "serve.ending_line = lambda *given: sys.stdout.write('of a job') and told(*given)"
    )
    with (folder / "stderr").open("w") as err:
        process = Program(SCRIPT.format(code=code), "serve", "--config", "service.toml", stderr=err)
    with process:
        try:
            while not process.stdout.readline().startswith("ready"):
                assert process.poll() is None
            with nobody_reads(process, how):
                process.terminate()
                assert process.wait(SECONDS) == 0
        finally:
            process.kill()
    assert "Error" not in (folder / "stderr").read_text(encoding="utf-8")


@pytest.mark.parametrize("how", READERS)
def test_giving_up_waits_for_no_reader(how):
    code = (
        "import threading; from asyncpipe.cli import serve; serve.READER_SECONDS = 0.1; "
        "print('here', flush=True); input(); threading.Timer(0, serve.give_up).start(); threading.Event().wait()"
    )
    arguments = [sys.executable, "-c", code]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()
            with nobody_reads(process, how):
                process.stdin.write("\n")
                process.stdin.close()
                assert process.wait(SECONDS) == serve_module.GRACE_OVER
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ((), ["devices: missing; must be", "entries: missing; must be"]),
        (("--config", "nowhere.toml"), ["nowhere.toml: cannot be read: No such file"]),
        (
            ("--devices", "gpu:0", "--entries", "a:b", "--port", "x"),
            ["devices: must be", "port: where the API listens; must be a port from 0"],
        ),
        (
            ("--devices", "cpu:0", "--entries", "a:b", "--address", "0.0.0.0"),
            ["address: '0.0.0.0', which others can reach"],
        ),
        (
            ("--devices", "cpu:0", "--entries", "a:b", "--max-running", "0"),
            ["max_running: the most jobs that run at once; must be an integer of at least 1"],
        ),
    ],
)
def test_wrong_settings_are_told_before_anything_starts(options, lines, folder, capsys):
    assert cli.main(["serve", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    told = err.removeprefix("asyncpipe: error: ").splitlines()
    assert len(told) == len(lines)
    for line, wanted in zip(told, lines, strict=True):
        assert line.startswith(wanted)
    assert not (folder / "runs").exists()


def test_help_helps_and_a_token_is_no_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    out = " ".join(text.split())
    for part in (
        "a table as KEY=VALUE,KEY=VALUE",
        "--no-resume",
        "must be a port from 0 (any free one) to 65535",
        "asyncpipe serve --config service.toml",
        "SIGTERM or SIGINT",
        "[memory_limit]",
    ):
        assert part in out
    assert cli.main(["serve", "--token", TOKEN]) == 2
    told = capsys.readouterr().err
    assert "set ASYNCPIPE_TOKEN, or a file" in told
    assert TOKEN not in told
    with pytest.raises(SystemExit):
        cli.main(["jobs", "list", "--nothing"])
    assert "unrecognized arguments: --nothing" in capsys.readouterr().err
