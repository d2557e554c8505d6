"""What ``asyncpipe serve`` does when it is told to end, while a job is in the middle of a step.

The job's model has a stage that waits in a step until somebody opens the gate, a named pipe in the service's folder::

    SIGTERM ─▶ /readyz 503, submit 503 ─▶ gate opens ─▶ the step ends ─▶ snapshot ─▶ exit 0
        │
        ├─ again ─▶ exit 128 + 15, at once (``tests/cli/test_serve.py``)
        └─ the gate stays shut ─▶ exit 1, when the grace period is over
"""

from __future__ import annotations

import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from gated_text import GATED_ENTRY
from killing import Served, curve, make_folder, poll, serving

from asyncpipe.service.client import ApiError, JobClient
from asyncpipe.train.snapshots.resume import snapshots_in

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes"),
    pytest.mark.skipif(
        find_spec("fastapi") is None or find_spec("pydantic_settings") is None,
        reason="a service needs FastAPI and pydantic-settings: pip install -e '.[service]'",
    ),
]

STEPS = 4
JOB = {
    "name": "gated",
    "entry": "gated:build",
    "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 1},
    "training": {"steps": STEPS, "batch_size": 2, "learning_rate": 0.1},
}
END_SECONDS = 20.0
"""For a process to be gone that ends at once, on a machine that is busy."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A service's, whose job waits in its first step."""
    make_folder(tmp_path / "service")
    folder = tmp_path / "service"
    (folder / "code" / "gated.py").write_text(GATED_ENTRY, encoding="utf-8")
    with (folder / "service.toml").open("a", encoding="utf-8") as file:
        file.write('[entries."gated:build"]\n')
    os.mkfifo(folder / "gate")
    return folder


def open_gate(folder: Path) -> None:
    """Let the step go on that waits, and all that follow."""
    (folder / "gate").rename(folder / "old gate")
    (folder / "gate").touch()
    with (folder / "old gate").open("wb"):  # Opens when there is a reader.
        pass


def in_the_gate(served: Served) -> tuple[JobClient, str]:
    """A client, and the job, which is in its first step."""
    client = served.client()
    job = client.submit(JOB, "the job")["id"]
    served.line("in the gate")
    return client, job


def status(client: JobClient, path: str) -> int:
    try:
        with urlopen(f"{client.url}/{path}", timeout=10) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def goes_on(folder: Path, job: str) -> dict[str, Any]:
    """The job after the service was started again and it has ended; its events as ``notes``."""
    with serving(folder) as served:
        client = served.client()
        assert client.submit(JOB, "the job")["id"] == job
        found = client.wait(job, 60)
        assert found["state"] == "finished", served.story()
        assert [row[0] for row in curve(served.state, job)] == list(range(1, STEPS + 1))
        found["history"] = [(row["to"], row["cause"]) for row in client.history(job)]
        found["notes"] = [event.data["text"] for event in client.events(job) if event.kind == "note"]
        served.process.send_signal(signal.SIGTERM)
        assert served.ends() == 0, served.story()
    return found


def test_the_step_ends_and_the_next_process_goes_on_behind_it(folder):
    grace = 60.0
    with serving(folder, "--grace-seconds", str(grace)) as served:
        client, job = in_the_gate(served)
        assert status(client, "readyz") == 200
        served.process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        farewell = served.line("SIGTERM")
        assert farewell.startswith("SIGTERM: no more jobs are taken; 1 running job ends its step and takes a snapshot")
        poll("not ready", lambda: status(client, "readyz") == 503)
        assert status(client, "livez") == 200, "a restart would help nobody"
        with pytest.raises(ApiError) as refused:
            client.submit(JOB)
        assert refused.value.status == 503
        assert client.show(job)["state"] == "running", "it is still at its step"
        assert served.process.poll() is None
        open_gate(folder)
        assert served.ends() == 0, served.story()
        assert time.monotonic() - asked < grace
        assert served.lines[-1] == "ended; jobs go on at the next start"
    assert [path.name for path in snapshots_in(served.state / "jobs" / job / "snapshots")] == ["step-1"]
    assert [row[0] for row in curve(served.state, job)] == [1]
    found = goes_on(folder, job)
    states = [state for state, _ in found["history"]]
    assert states == ["queued", "running", "queued", "running", "finished"]
    assert "SIGTERM" in found["history"][2][1]
    assert any(note.startswith("going on after step 1") for note in found["notes"]), found["notes"]


def test_a_step_that_does_not_end_is_left_when_the_grace_period_is_over(folder):
    grace = slack = 0.5
    with serving(folder, "--grace-seconds", str(grace), code=f"serve.SLACK_SECONDS = {slack}") as served:
        _, job = in_the_gate(served)
        asked = time.monotonic()
        served.process.send_signal(signal.SIGINT)
        assert served.ends() == 1, served.story()
        assert grace <= time.monotonic() - asked < grace + slack + END_SECONDS
        assert served.lines[-1] == "the grace period is over; jobs go on from their last snapshots at the next start"
    (folder / "gate").unlink()
    (folder / "gate").touch()
    states = [state for state, _ in goes_on(folder, job)["history"]]
    assert states == ["queued", "running", "queued", "running", "finished"]
