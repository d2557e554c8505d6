"""``asyncpipe jobs`` on a real API: lists, names, several jobs at once, and watching."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_helpers import ENTRY, TOKEN, Api, served

from asyncpipe import cli
from asyncpipe.cli.arguments import moment
from asyncpipe.train.job_file import load_job

JOB_FILE = f"""
name = "charlm"
[job]
entry = "{ENTRY}"
[pipeline]
devices = ["cpu:0", "cpu:1"]
microbatches = 2
[training]
steps = 5
batch_size = 4
learning_rate = 1e-3
[service]
tags = ["night"]
deadline = 2099-12-01T08:00:00Z
"""


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """The API over a store, in a thread."""
    found: list[Api] = []
    loops: list[asyncio.AbstractEventLoop] = []
    begun, over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with served(tmp_path, token=TOKEN) as one:
            found.append(one)
            loops.append(asyncio.get_running_loop())
            begun.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert begun.wait(20)
        monkeypatch.setenv("ASYNCPIPE_URL", found[0].base)
        monkeypatch.setenv("ASYNCPIPE_TOKEN", TOKEN)
        monkeypatch.setenv("COLUMNS", "250")
        monkeypatch.delenv("ASYNCPIPE_TOKEN_FILE", raising=False)
        yield found[0]
    finally:
        loops[0].call_soon_threadsafe(over.set)
        thread.join(20)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str, status: int = 0) -> tuple[list[str], str]:
        assert cli.main(["jobs", *arguments]) == status
        out, err = capsys.readouterr()
        return out.splitlines(), err

    return call


def test_jobs_are_submitted_listed_and_steered_by_names(api, run, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB_FILE)
    ids = [run("submit", str(path), "--name", f"width {n}", "--key", f"{n}", "--tag", f"w{n}")[0][0] for n in range(4)]
    assert run("submit", str(path), "--name", "width 0", "--key", "0", "--tag", "w0")[0] == ids[:1]
    (last,), _ = run("submit", str(path), "--name", "last", "--tag", "late")
    shown = json.loads(run("show", "last", "--json")[0][0])
    assert (shown["id"], shown["tags"], shown["deadline"]) == (last, ["night", "late"], 4099795200.0)
    lines, _ = run("list", "--tag", "w3", "--tag", "night", "--text", "WIDTH")
    assert [line.split()[0] for line in lines[1:]] == [ids[3]]
    lines, _ = run("cancel", "width 0", ids[1])
    assert [line.split(" is ")[1].split()[0] for line in lines] == ["cancelled", "cancelled"]
    lines, err = run("cancel", ids[2], "nobody", status=1)
    assert (len(lines), "nobody: Not Found (404)" in err) == (1, True)
    run("priority", "background", "last", ids[3])
    run("priority", "-5", ids[3])
    run("weight", "2.5", ids[3])
    run("tag", ids[3], "--add", "good", "--remove", "night")
    changed = json.loads(run("show", ids[3], "--json")[0][0])
    assert (changed["priority_class"], changed["weight"], changed["priority"]) == ("background", 2.5, -5)
    assert changed["tags"] == ["w3", "good"]
    assert len(run("list", "--since", "-1h")[0]) > 1
    assert run("list", "--since", "1h")[0] == run("list", "--entry", "none")[0] == ["no jobs"]


def test_what_watching_prints_without_a_terminal_are_changes(api, run, tmp_path, monkeypatch):
    path = tmp_path / "job.toml"
    path.write_text(JOB_FILE)
    run("submit", str(path), "--name", "one")
    pauses = iter([("submit", str(path), "--name", "two"), ("pause", "one"), ("cancel", "two")])
    monkeypatch.setattr("asyncpipe.cli.jobs_watching.time.sleep", lambda _: cli.main(["jobs", *next(pauses)]))
    lines, _ = run("watch", "--turns", "4", "--every", "0.1")
    told = [line for line in lines if " at step " in line or "no more" in line]
    assert [line.split(" (")[0] for line in told] == ["one", "two", "one", "one", "two", "two"]
    assert told[-1].endswith(") is queued no more")


def test_times_are_dates_numbers_or_spans():
    assert moment("2026-12-01T08:00:00+00:00") == 1796112000.0
    assert moment("1796112000.5") == 1796112000.5
    assert abs(moment("-2d") - (time.time() - 172800)) < 60
    assert abs(moment("6h") - (time.time() + 21600)) < 60
    for wrong in ("soon", "", "6 h", "1e400", "2026-13-01"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a time as"):
            moment(wrong)


def test_training_leaves_a_table_for_services_alone(tmp_path, api, run):
    path = tmp_path / "job.toml"
    path.write_text(JOB_FILE)
    assert load_job(path).name == "charlm"
    path.write_text(JOB_FILE.replace("tags =", "tag ="))
    _, err = run("submit", str(path), status=2)
    assert "service.tag: did you mean 'tags'? [service] may have tags, deadline" in err
