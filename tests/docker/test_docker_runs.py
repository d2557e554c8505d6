"""The commands of docker/, run from a folder that has only what the image would have, with this interpreter.

Of the repository's own packages nothing else can be found there: a file that the Dockerfile forgets is missing here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError, URLError
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

    def here(self, text: str) -> str:
        """``text`` with paths of the image as they are here, and free ports on loopback for the container's own."""
        for path in ("/opt/asyncpipe", self.image.workdir):
            text = re.sub(rf"(?<![\w/]){path}\b", f"{self.root}{path}", text)
        return re.sub(r"\b(9400|8080)\b", "0", text).replace("0.0.0.0", "127.0.0.1")

    @contextmanager
    def running(self, command: list[str], **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
        """The process that ``command`` starts, and its ports, once it has told that of its metrics."""
        process = subprocess.Popen(
            [self.here(word) for word in command],
            cwd=self.workdir,
            env=self.environment | {name: self.here(value) for name, value in environment.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        ports: dict[str, int] = {}
        try:
            assert process.stdout is not None
            printed = ""
            while "metrics" not in ports:
                line = process.stdout.readline()
                printed += line
                assert line, printed
                if found := re.match(r"(service|metrics): http://127.0.0.1:(\d+)", line):
                    ports[found[1]] = int(found[2])
            yield process, ports
        finally:
            # With all that it has started, should one of them have outlived it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def run(self, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        """What ``command`` came to. Its environment is taken as it is, with paths as they are here."""
        return subprocess.run(
            [self.here(word) for word in command],
            cwd=self.workdir,
            env=self.environment | environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def healthy(self, test: list[str], ports: dict[str, int]) -> bool:
        """What a health check says, asked as the engine asks."""
        named = {"9400": ports["metrics"], "8080": ports.get("service", 0)}
        words = [re.sub(r"\b(9400|8080)\b", lambda found: str(named[found[0]]), word) for word in test]
        return subprocess.run(words, cwd=self.workdir, env=self.environment, capture_output=True).returncode == 0

    def files(self) -> set[str]:
        """Everything in it, but for its working directory."""
        paths = (path for path in self.root.rglob("*") if not path.is_relative_to(self.workdir))
        return {str(path.relative_to(self.root)) for path in paths}


@pytest.fixture
def container(image, tmp_path) -> Container:
    return Container(image("cpu"), tmp_path)


@pytest.mark.long
def test_the_image_trains_is_healthy_meanwhile_and_writes_to_its_working_directory_alone(container):
    before = container.files()
    command = [*container.image.entrypoint, *container.image.command, "--steps", "2"]
    with container.running(command) as (process, ports):
        assert container.healthy(container.image.healthcheck, ports)
        printed, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, printed
    assert "charlm: 2 steps in " in printed
    assert "held-out loss" in printed
    assert {path.name for path in (container.workdir / "runs").iterdir()} == {"charlm.json", "charlm.svg"}
    assert container.files() == before
    assert not container.healthy(container.image.healthcheck, ports)


@contextmanager
def serving(container: Container, service) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """The compose file's service that trains."""
    entrypoint = [word.replace("$$", "$") for word in service["entrypoint"]]
    with container.running([*entrypoint, *service["command"]], **service["environment"]) as found:
        yield found


def submitted(container: Container, service, ports: dict[str, int]) -> str:
    """The id of the job that the compose file's ``submit`` has submitted."""
    entrypoint = [word.replace("$$", "$") for word in service["entrypoint"]]
    environment = {name: container.here(value) for name, value in service["environment"].items()}
    environment["ASYNCPIPE_URL"] = f"http://127.0.0.1:{ports['service']}"
    done = container.run([*entrypoint, *service["command"]], **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.timeout(150)
def test_the_compose_services_work_together(container, compose, mounts, tool, tmp_path):
    """A fresh ``up`` trains the example and Prometheus sees it; after a stop, the next one goes on with it."""
    prometheus = tool("prometheus", "Debian's package prometheus")
    before = container.files()
    training, submit = compose["services"]["training"], compose["services"]["submit"]
    with serving(container, training) as (service, ports):
        assert eventually(lambda: container.healthy(training["healthcheck"]["test"][1:], ports))
        assert stat.S_IMODE((container.workdir / "token").stat().st_mode) == 0o600
        token = (container.workdir / "token").read_text()
        assert refused(ports["service"])
        job = submitted(container, submit, ports)
        watcher = compose["services"]["prometheus"]
        root = tmp_path / "prometheus"
        mounts("prometheus", root)
        (root / "prometheus").mkdir()
        configuration = root / "etc/prometheus/prometheus.yml"
        text = configuration.read_text(encoding="utf-8").replace("training:9400", f"127.0.0.1:{ports['metrics']}")
        # Faster than in a container, so that the test need not wait; and no longer than a scrape may take.
        configuration.write_text(text.replace("5s", "1s").replace("4s", "1s"), encoding="utf-8")
        with prometheus_running(prometheus, watcher["command"], root) as port:
            ready = watcher["healthcheck"]["test"][-1].replace("9090", str(port))
            assert eventually(lambda: answers(ready))
            steps = 'asyncpipe_steps_total{job="charlm",outcome="ok"}'
            assert eventually(lambda: any(float(value) >= 1 for value in query(port, steps)))
            assert query(port, 'up{job="asyncpipe"}') == ["1"]
            assert query(port, 'asyncpipe_jobs{state="running"}') == ["1"]
            assert eventually(lambda: all(rule["health"] == "ok" for rule in rules(port)))
            assert {rule["type"] for rule in rules(port)} == {"alerting", "recording"}
        service.send_signal(signal.SIGTERM)
        printed, _ = service.communicate(timeout=SECONDS)
        assert service.returncode == 0, printed
    assert list((container.workdir / "service" / "jobs" / job / "snapshots").glob("step-*/snapshot.json"))
    with serving(container, training) as (_, ports):
        assert (container.workdir / "token").read_text() == token
        assert eventually(lambda: container.healthy(training["healthcheck"]["test"][1:], ports))
        assert submitted(container, submit, ports) == job
        found = tells(container, ports, "show", job)
        assert (found["state"], found["attempts"]) == ("running", 2)
        assert [each["id"] for each in tells(container, ports, "list")] == [job]
    assert container.files() == before


def refused(port: int) -> bool:
    """Whether the service wants a token."""
    with pytest.raises(HTTPError) as error:
        urlopen(f"http://127.0.0.1:{port}/v1/jobs", timeout=5)
    error.value.close()
    return error.value.code == 401


def tells(container: Container, ports: dict[str, int], *command: str):
    """What ``docker compose exec training asyncpipe jobs …`` shows, as JSON."""
    environment = {"ASYNCPIPE_TOKEN_FILE": str(container.workdir / "token")}
    url = f"http://127.0.0.1:{ports['service']}"
    done = container.run(["asyncpipe", "jobs", *command, "--json", "--url", url], **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
