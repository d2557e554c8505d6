"""What an operator does with a service that runs: other settings, other certificates, another process in its place."""

from __future__ import annotations

import os
import signal
import ssl
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import make_authority, make_certificate
from gated_text import GATED_ENTRY
from killing import curve, make_folder, poll, serving

from asyncpipe import cli
from asyncpipe.service.client import JobClient, UnreachableError
from asyncpipe.service.settings.service_settings import RELOADED
from asyncpipe.service.who_serves import server_of
from asyncpipe.train.snapshots.resume import snapshots_in

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes"),
    pytest.mark.skipif(
        find_spec("fastapi") is None or find_spec("pydantic_settings") is None,
        reason="a service needs FastAPI and pydantic-settings: pip install -e '.[service]'",
    ),
]

JOB: dict[str, Any] = {
    "name": "gated",
    "entry": "gated:build",
    "pipeline": {"devices": ["cpu:0", "cpu:1"], "microbatches": 1},
    "training": {"steps": 3, "batch_size": 2, "learning_rate": 0.1},
    "snapshots": {"every": 1},
}
TAKEOVER_SECONDS = 10.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A service's, whose job waits in each step until somebody opens the gate; the working directory."""
    for name in [name for name in os.environ if name.startswith("ASYNCPIPE_")]:
        monkeypatch.delenv(name)
    make_folder(tmp_path / "service")
    folder = tmp_path / "service"
    (folder / "code" / "gated.py").write_text(GATED_ENTRY, encoding="utf-8")
    write(folder, "max_body = 16384\n")
    os.mkfifo(folder / "gate")
    monkeypatch.chdir(folder)
    return folder


def write(folder: Path, more: str) -> None:
    """Settings with ``more`` at their beginning."""
    settings = folder / "service.toml"
    text = settings.read_text(encoding="utf-8").partition("folder =")[2]
    text = f"{more}folder ={text}"
    settings.write_text(text if "gated:build" in text else f'{text}[entries."gated:build"]\n', encoding="utf-8")


def pass_gate(folder: Path) -> None:
    with (folder / "gate").open("wb"):
        pass


def open_gate(folder: Path) -> None:
    (folder / "gate").rename(folder / "old gate")
    (folder / "gate").touch()
    with (folder / "old gate").open("wb"):
        pass


@pytest.fixture
def reload(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[], tuple[int, str]]:
    """Calls ``service reload``; its status, and what it said."""

    def call() -> tuple[int, str]:
        status = cli.main(["service", "reload", "--config", "service.toml"])
        out, err = capsys.readouterr()
        return status, out or err

    return call


def test_the_page_for_operators_has_what_is_read_again():
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
    section = page.partition("## Changing settings while it runs")[2].partition("\n## ")[0]
    assert [key for key in RELOADED if f"`{key}`" not in section] == []


def test_a_reload_takes_over_what_it_can_and_says_the_rest(folder, reload):
    status, said = reload()
    assert status == 2
    assert "no asyncpipe serve runs with the folder state: start one, or name another\n" in said

    def answer(served: Any) -> int:
        return httpx.get(f"{served.client().url}/v1/counts", headers={"Host": "train.example.org"}).status_code

    with serving(folder) as served:
        served.line("ready: ")
        assert answer(served) == 421
        write(folder, 'hosts = ["train.example.org"]\nmax_body = 20000\nmax_running = 1\n')
        assert reload() == (
            0,
            "the settings were read again; entries: charlm:build, gated:build; for a restart: max_body\n",
        )
        assert answer(served) == 200
        client = served.client()
        first = client.submit(JOB)["id"]
        served.line("in the gate")
        second = client.submit(JOB)
        assert "max_running 1 is reached" in client.show(second["id"])["waits_for"]
        write(folder, "max_running = 0\nhosts = []\n")
        code, said = reload()
        assert code == 1
        assert said.startswith("the settings are wrong, and nothing has changed: service.toml: max_running: ")
        assert answer(served) == 200
        write(folder, "max_queued = 1\n")
        assert reload()[0] == 0
        poll("the second begins", lambda: client.show(second["id"])["state"] == "running")
        assert client.show(first)["state"] == "running"
        served.process.kill()


def test_a_renewed_certificate_is_that_of_new_connections(folder, reload, capsys):
    authority = make_authority(folder)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    make_certificate(authority, certificate, key)
    options = ("--certificate", "certificate.pem", "--key", "key.pem")
    with serving(folder, *options) as served:
        url = served.client().url
        assert url.startswith("https://127.0.0.1:")
        port = int(url.rpartition(":")[2])
        client = JobClient(url, authority=authority, retries=0)
        with pytest.raises(UnreachableError, match="certificate verify failed"):
            list(JobClient(url, retries=0).list())
        job = client.submit(JOB)["id"]
        served.line("in the gate")
        events = client.events(job)
        assert next(events).data["to"] == "queued"
        first = ssl.get_server_certificate(("127.0.0.1", port), ca_certs=str(authority))
        certificate.write_text("half a certificate", encoding="utf-8")
        code, said = reload()
        assert code == 1
        assert "certificate: certificate.pem and its key cannot be used: " in said
        assert ssl.get_server_certificate(("127.0.0.1", port), ca_certs=str(authority)) == first
        make_certificate(authority, certificate, key, "rsa")
        assert reload()[0] == 0
        second = ssl.get_server_certificate(("127.0.0.1", port), ca_certs=str(authority))
        assert second == certificate.read_text(encoding="utf-8")
        assert second != first
        assert cli.main(["jobs", "list", "--url", url, "--authority", str(authority)]) == 0
        assert job in capsys.readouterr().out
        open_gate(folder)
        assert [event.data["to"] for event in events if event.kind == "state"] == ["running", "finished"]
        served.process.kill()


def test_a_standby_takes_over_when_the_service_is_killed(folder):
    with serving(folder) as served:
        client = served.client()
        job = client.submit(JOB)["id"]
        served.line("in the gate")
        pass_gate(folder)
        poll("a snapshot", lambda: snapshots_in(served.state / "jobs" / job / "snapshots"))
        with serving(folder, "--standby") as standby:
            line = standby.line("standby: http://")
            url = line.split()[1].rstrip("/;")
            assert line.endswith(f"waits for the folder state, which {server_of(served.state)} has")
            assert server_of(served.state).pid == served.process.pid
            alive, ready, listed = (httpx.get(f"{url}/{path}") for path in ("livez", "readyz", "v1/jobs"))
            assert (alive.status_code, ready.status_code, listed.status_code) == (200, 503, 503)
            assert ready.json()["detail"].startswith("the service waits for the folder state, which process ")
            with serving(folder, "--standby") as third:
                third.line("standby: ")
                third.process.send_signal(signal.SIGTERM)
                assert third.ends() == 0, third.story()
                assert third.lines[-1] == "SIGTERM: the standby ends"
            served.kill()
            began = time.monotonic()
            standby.line("ready: ")
            assert time.monotonic() - began < TAKEOVER_SECONDS
            standby.line("in the gate")
            open_gate(folder)
            client = standby.client()
            assert client.wait(job, 60)["state"] == "finished"
            assert [row[0] for row in curve(standby.state, job)] == [1, 2, 3]
            assert "the settings were read again" in standby.log.read_text(encoding="utf-8")
            assert server_of(standby.state).pid == standby.process.pid
            standby.process.terminate()
            assert standby.ends() == 0, standby.story()
        assert server_of(served.state) is None
