"""The commands of docker/, run from a folder that has only what the image would have, with this interpreter.

Of the repository's own packages nothing else can be found there: a file that the Dockerfile forgets is missing here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

SECONDS = 30.0
"""For what another process takes a few seconds to do."""


class Container:
    """A folder that stands for the root of the image, in which its commands run."""

    def __init__(self, image, folder: Path) -> None:
        self.root = folder / "root"
        self.image = image
        image.lay_out(self.root)
        self.workdir = self.root / image.workdir.lstrip("/")
        programs = folder / "bin"
        programs.mkdir()
        for name, arguments in (("python", ""), ("asyncpipe", "-m asyncpipe")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', encoding="utf-8")
            program.chmod(0o755)
        temporary = folder / "tmp"
        temporary.mkdir()
        self.environment = image.environment | {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(self.workdir),
            "TMPDIR": str(temporary),
            "PYTHONPATH": str(self.root / "opt" / "asyncpipe"),
            "PYTHONSAFEPATH": "1",
        }

    @contextmanager
    def running(self, command: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
        """The process that ``command`` starts, and the port of its metrics, when it serves them."""
        # Any free port on loopback stands for the container's own, of which there is one per container.
        words = [word.replace("/opt/asyncpipe", f"{self.root}/opt/asyncpipe") for word in command]
        words = [word.replace("9400", "0").replace("0.0.0.0", "127.0.0.1") for word in words]
        process = subprocess.Popen(
            words,
            cwd=self.workdir,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"^metrics: http://127.0.0.1:(\d+)/metrics$", line)
            assert found, line + process.stdout.read()
            yield process, int(found[1])
        finally:
            # With all that it has started, should one of them have outlived it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def healthy(self, port: int) -> bool:
        """What the image's health check says, asked as the engine asks."""
        test = [word.replace("9400", str(port)) for word in self.image.healthcheck]
        run = subprocess.run(test, cwd=self.workdir, env=self.environment, check=False, capture_output=True)
        return run.returncode == 0

    def files(self) -> set[str]:
        """Everything in it, but for its working directory."""
        paths = (path for path in self.root.rglob("*") if not path.is_relative_to(self.workdir))
        return {str(path.relative_to(self.root)) for path in paths}


@pytest.fixture
def container(image, tmp_path) -> Container:
    return Container(image("cpu"), tmp_path)


def test_the_image_trains_is_healthy_meanwhile_and_writes_to_its_working_directory_alone(container):
    before = container.files()
    command = [*container.image.entrypoint, *container.image.command, "--steps", "2"]
    with container.running(command) as (process, port):
        assert container.healthy(port)
        printed, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, printed
    assert "charlm: 2 steps in " in printed
    assert "held-out loss" in printed
    assert {path.name for path in (container.workdir / "runs").iterdir()} == {"charlm.json", "charlm.svg"}
    assert container.files() == before
    assert not container.healthy(port)


def test_the_compose_services_work_together(container, compose, mounts, tool, tmp_path):
    prometheus = tool("prometheus", "Debian's package prometheus")
    service = compose["services"]["training"]
    entrypoint = [word.replace("$$", "$") for word in service["entrypoint"]]
    with container.running([*entrypoint, *service["command"]]) as (job, metrics):
        watcher = compose["services"]["prometheus"]
        root = tmp_path / "prometheus"
        mounts("prometheus", root)
        (root / "prometheus").mkdir()
        configuration = root / "etc/prometheus/prometheus.yml"
        text = configuration.read_text(encoding="utf-8").replace("training:9400", f"127.0.0.1:{metrics}")
        # Faster than in a container, so that the test need not wait; and no longer than a scrape may take.
        configuration.write_text(text.replace("5s", "1s").replace("4s", "1s"), encoding="utf-8")
        with prometheus_running(prometheus, watcher["command"], root) as port:
            ready = watcher["healthcheck"]["test"][-1].replace("9090", str(port))
            assert eventually(lambda: answers(ready))
            steps = 'asyncpipe_steps_total{job="charlm",outcome="ok"}'
            assert eventually(lambda: any(float(value) >= 1 for value in query(port, steps)))
            assert query(port, 'up{job="asyncpipe"}') == ["1"]
            assert eventually(lambda: all(rule["health"] == "ok" for rule in rules(port)))
            assert {rule["type"] for rule in rules(port)} == {"alerting", "recording"}
        job.send_signal(signal.SIGTERM)
        printed, _ = job.communicate(timeout=SECONDS)
    assert job.returncode == 128 + signal.SIGTERM, printed
    (folder,) = (container.workdir / "snapshots").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d", folder.name)
    assert [path.name for path in folder.glob("step-*/snapshot.json")] == ["snapshot.json"]


@contextmanager
def prometheus_running(program: str, command: list[str], root: Path) -> Iterator[int]:
    """The port of a Prometheus that runs with the options of the compose file, its paths below ``root``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = [re.sub(r"=/", f"={root}/", word) for word in command]
    log = (root / "log").open("w", encoding="utf-8")
    process = subprocess.Popen(
        [program, *options, f"--web.listen-address=127.0.0.1:{port}"], cwd=root, stdout=log, stderr=log
    )
    try:
        yield port
        assert process.poll() is None, (root / "log").read_text(encoding="utf-8")
    finally:
        process.terminate()
        process.wait()
        log.close()


def answers(address: str) -> bool:
    with urlopen(address, timeout=5) as answer:
        return answer.status == 200


def api(port: int, path: str):
    with urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=5) as answer:
        return json.load(answer)["data"]


def rules(port: int):
    return [rule for group in api(port, "rules")["groups"] for rule in group["rules"]]


def query(port: int, expression: str) -> list[str]:
    return [series["value"][1] for series in api(port, f"query?{urlencode({'query': expression})}")["result"]]


def eventually(condition) -> bool:
    """Whether ``condition()`` becomes true before the deadline; another process is waited for."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            if condition():
                return True
        except URLError:
            pass
        time.sleep(0.1)
    return False


def test_the_container_finds_nothing_that_was_not_copied(container):
    where = "import asyncpipe; print(asyncpipe.__file__)"
    run = subprocess.run(
        ["python", "-c", where], cwd=container.workdir, env=container.environment, check=True, capture_output=True
    )
    assert Path(os.fsdecode(run.stdout).strip()).is_relative_to(container.root)
