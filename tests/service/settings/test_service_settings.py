"""A service's settings: where values come from, what is refused, and that the token is never shown."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.service.settings.service_settings import EntrySettings, ServiceSettings, SettingsError

TOKEN = "correct-horse-battery-staple"
RIGHT: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"], "entries": ["charlm:build"]}
FILE = """\
folder = "runs/here"
devices = ["cpu:0"]
port = 8181
metrics_port = "none"
isolation = "process"

[entries."charlm:build"]
fixed = { max_bytes = 200_000 }

[memory_limit]
"cpu:0" = "2 GiB"
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("ASYNCPIPE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "service.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def token_file(folder: Path, mode: int = 0o600, content: str = f"{TOKEN}\n") -> Path:
    path = folder / "token"
    path.write_text(content, encoding="utf-8")
    path.chmod(mode)
    return path


# Where values come from


def test_what_is_not_said_has_a_default(monkeypatch):
    monkeypatch.setenv("ASYNCPIPE_SERVICE_PORT", "x")  # Another program's, or Kubernetes'.
    settings = ServiceSettings(**RIGHT)
    assert settings.devices == ("cpu:0", "cpu:1")
    assert settings.entries == {"charlm:build": EntrySettings()}
    assert (settings.address, settings.port, settings.metrics_port) == ("127.0.0.1", 8080, 9400)
    assert (settings.max_running, settings.max_queued, settings.max_body) == (4, 1000, 16384)
    assert settings.memory_limit == {}
    assert settings.token is None


def test_a_file_is_read_where_it_is_named(file, monkeypatch):
    by_argument = ServiceSettings(config=file)
    assert (by_argument.folder, by_argument.port, by_argument.metrics_port) == (Path("runs/here"), 8181, None)
    assert by_argument.entries == {"charlm:build": EntrySettings(fixed={"max_bytes": 200_000})}
    assert by_argument.memory_limit == {"cpu:0": 2 * 1024**3}
    monkeypatch.setenv("ASYNCPIPE_CONFIG", str(file))
    assert ServiceSettings() == by_argument


def test_arguments_win_over_the_environment_and_that_over_the_file(file, monkeypatch):
    monkeypatch.setenv("ASYNCPIPE_PORT", "8282")
    monkeypatch.setenv("ASYNCPIPE_MAX_RUNNING", "7")
    settings = ServiceSettings(config=file, max_running=2)
    assert (settings.max_running, settings.port, settings.devices) == (2, 8282, ("cpu:0",))
    monkeypatch.setenv("ASYNCPIPE_MAX_RUNNING", "")
    assert ServiceSettings(config=file).max_running == 4, "an empty variable says nothing"


def test_an_allow_list_replaces_the_one_below_and_adds_nothing_to_it(file, monkeypatch):
    monkeypatch.setenv("ASYNCPIPE_ENTRIES", "other:build, more.of:them")
    assert set(ServiceSettings(config=file).entries) == {"other:build", "more.of:them"}
    assert set(ServiceSettings(config=file, entries={"third:build": {}}).entries) == {"third:build"}
    monkeypatch.setenv("ASYNCPIPE_MEMORY_LIMIT", "cpu:1=5MB")
    assert ServiceSettings(config=file, devices="cpu:0,cpu:1").memory_limit == {"cpu:1": 5_000_000}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("DEVICES", "cpu:0, cuda:1", ("cpu:0", "cuda:1")),
        ("DEVICES", '["cpu:0"]', ("cpu:0",)),
        ("ENTRIES", '{"a.b:c": {"fixed": {"x": 1}}}', {"a.b:c": EntrySettings(fixed={"x": 1})}),
        ("ENTRIES", '["a:b"]', {"a:b": EntrySettings()}),
        ("MEMORY_LIMIT", '{"cpu:0": 1000}', {"cpu:0": 1000}),
        ("MEMORY_LIMIT", "cpu:0=1KiB,cpu:1=2", {"cpu:0": 1024, "cpu:1": 2}),
        ("HOSTS", "Train.Example.org,[::1]", ("train.example.org", "[::1]")),
        ("METRICS_PORT", "none", None),
        ("METRICS_PORT", "0", 0),
        ("MAX_BODY", "1 MiB", 1024**2),
        ("GRACE_SECONDS", "2.5", 2.5),
    ],
)
def test_the_environment_says_lists_and_tables_as_text_or_json(key, text, value, monkeypatch):
    monkeypatch.setenv(f"ASYNCPIPE_{key}", text)
    base = {name: given for name, given in RIGHT.items() if name != key.lower()} | {"isolation": "process"}
    assert getattr(ServiceSettings(**base), key.lower()) == value


def test_importing_reads_nothing_and_brings_no_torch(tmp_path):
    code = (
        "import os, sys; os.environ['ASYNCPIPE_PORT'] = 'nonsense'\n"
        "import asyncpipe.service.settings.service_settings\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# What is refused

# (key, value, parts of the message)
WRONG: list[tuple[str, Any, list[str]]] = [
    ("devices", [], ["devices: must be a list of device names"]),
    ("devices", ["gpu:0"], ["devices: must be a list of device names", '"gpu:0"']),
    ("devices", ["cpu:01"], ["devices: must be"]),
    ("devices", ["cuda:256"], ["devices: must be"]),
    ("entries", [], ["entries: must be a list of entries"]),
    ("entries", ["os:system; rm"], ["package.module:factory"]),
    ("entries", {"a:b": {"fixd": {}}}, ["entries.a:b.fixd: unknown key; did you mean 'fixed'?"]),
    ("trusted_proxies", ["10.0.0.5/8"], ["trusted_proxies: must be a list of addresses or networks", "host bits set"]),
    (
        "metrics_address",
        "0.0.0.0",
        ["metrics_address: '0.0.0.0', which others can reach, needs metrics_client_authority"],
    ),
    ("port", 65536, ["port: where the API listens; must be a port from 0 (any free one) to 65535, got 65536"]),
    ("port", "http", ["must be a port", '"http"']),
    ("metrics_port", -1, ["must be a port", '"none"']),
    ("metrics_port", 8080, ["metrics_port: 8080 is the port of the service"]),
    ("max_running", 0, ["must be an integer of at least 1, got 0"]),
    ("grace_seconds", float("nan"), ["must be a number of seconds above 0"]),
    ("watchdog_factor", 0.5, ["must be a number of at least 1"]),
    ("max_body", "lots", ["must be a number of bytes"]),
    ("workers", "other", ['must be threads, processes, ray or torchrun, got "other"']),
    ("hosts", ["http://a"], ["hosts: must be a list of host names without scheme"]),
    ("address", "", ["must be an address"]),
    ("memory_limit", {"cpu:7": 1}, ["memory_limit: cpu:7: not among the devices cpu:0, cpu:1"]),
    ("memory_limit", "cpu:0", ["memory_limit: must be key=value"]),
    ("entry_path", "nowhere", ["entry_path: must be the path of a folder", "nowhere"]),
    ("prot", 1, ["prot: unknown key; did you mean 'port'?"]),
]


@pytest.mark.parametrize(("key", "value", "parts"), WRONG, ids=[f"{key}={value!r}" for key, value, _ in WRONG])
def test_each_wrong_key_is_told(key, value, parts):
    with pytest.raises(SettingsError) as told:
        ServiceSettings(**{**RIGHT, key: value})
    for part in parts:
        assert part in str(told.value)
    assert len(str(told.value).splitlines()) == 1


def test_a_message_says_where_each_value_stands(file, monkeypatch):
    file.write_text(FILE.replace("8181", "99999"), encoding="utf-8")
    monkeypatch.setenv("ASYNCPIPE_MAX_QUEUED", "many")
    with pytest.raises(SettingsError) as told:
        ServiceSettings(config=file, max_running=-1)
    lines = str(told.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["max_running", "ASYNCPIPE_MAX_QUEUED", str(file)]
    assert f"{file}: port: " in lines[2]
    assert lines[2].endswith("to 65535, got 99999")
    assert isinstance(told.value, ValueError)


def test_what_is_missing_is_told_at_once():
    with pytest.raises(SettingsError, match=r"devices: missing; must be .*\nentries: missing; must be"):
        ServiceSettings()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "cannot be read: No such file"),
        ("port = ", "is not valid TOML"),
        (b"\xff", "is not UTF-8"),
        (f'token = "{TOKEN}"', "token: has no place in a file of settings"),
        ('config = "x.toml"', "config: a file of settings cannot name another file"),
        ("[port]", "must be a port"),
        ("prot = 1", "prot: unknown key; did you mean 'port'?"),
    ],
)
def test_a_wrong_file_is_told_by_its_name(content, part, tmp_path):
    path = tmp_path / "wrong.toml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingsError, match=r"wrong\.toml: ") as told:
        ServiceSettings(config=path, **RIGHT)
    assert part in str(told.value)
    assert TOKEN not in str(told.value)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("ASYNCPIPE_MAX_RUNING", "3", "did you mean 'ASYNCPIPE_MAX_RUNNING'?"),
        ("ASYNCPIPE_PORT", "tcp://10.0.0.1:8080", "must be a port"),
        ("ASYNCPIPE_ENTRIES", "{", "ASYNCPIPE_ENTRIES: starts like JSON, and cannot be read as JSON"),
    ],
)
def test_a_slip_in_the_environment_is_told(name, value, part, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as told:
        ServiceSettings(**{key: given for key, given in RIGHT.items() if f"ASYNCPIPE_{key.upper()}" != name})
    assert part in str(told.value)


# The token


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "localhost.example.org", "127.0.0.1.nip.io"])
def test_an_address_that_others_can_reach_needs_a_token(address, tmp_path):
    with pytest.raises(SettingsError, match="needs a token"):
        ServiceSettings(**RIGHT, address=address)
    assert ServiceSettings(**RIGHT, address="127.8.9.10").token is None
    assert ServiceSettings(**RIGHT, address=address, token_file=token_file(tmp_path)).address == address


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o601])
def test_a_token_file_of_others_is_refused(mode, tmp_path):
    with pytest.raises(SettingsError, match=rf"mode {mode:04o}: chmod 600") as told:
        ServiceSettings(**RIGHT, token_file=token_file(tmp_path, mode))
    assert str(told.value).startswith("token_file: ")


def test_a_token_file_must_be_a_regular_file_of_this_user(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path, part in ((fifo, "regular file"), (tmp_path, "regular file"), (tmp_path / "none", "No such file")):
        with pytest.raises(SettingsError, match=part):
            ServiceSettings(**RIGHT, token_file=path)


BAD_TOKENS = [
    "short",
    "with a space in the middle",
    "ünïcödé-is-no-header",
    "a" * 2000,
]


@pytest.mark.parametrize("token", BAD_TOKENS)
def test_a_token_that_can_be_guessed_or_is_no_header_is_refused_and_not_shown(token, tmp_path, monkeypatch):
    for give in ("argument", "environment", "file"):
        arguments = dict(RIGHT)
        if give == "argument":
            arguments["token"] = token
        elif give == "environment":
            monkeypatch.setenv("ASYNCPIPE_TOKEN", token)
        else:
            monkeypatch.delenv("ASYNCPIPE_TOKEN")
            arguments["token_file"] = token_file(tmp_path, content=token)
        with pytest.raises(SettingsError, match="printable ASCII characters without spaces") as told:
            ServiceSettings(**arguments)
        assert token not in "".join(traceback.format_exception(told.value))
        assert token not in str(told.value.__context__), "which reporters of errors look at, too"


def test_a_token_and_a_file_with_one_are_too_much(tmp_path):
    with pytest.raises(SettingsError, match="token_file: give either a token or a file"):
        ServiceSettings(**RIGHT, token=TOKEN, token_file=token_file(tmp_path))


def test_the_token_is_shown_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNCPIPE_TOKEN", TOKEN)
    settings = ServiceSettings(**RIGHT)
    assert settings.token is not None
    assert settings.token.get_secret_value() == TOKEN
    for text in (repr(settings), str(settings), repr(settings.model_dump()), settings.model_dump_json()):
        assert TOKEN not in text
    for wrong in ({"address": ""}, {"port": -1}, {"metrics_port": 8080}, {"memory_limit": {"cpu:9": 1}}):
        with pytest.raises(SettingsError) as told:
            ServiceSettings(**RIGHT, **wrong)
        assert TOKEN not in "".join(traceback.format_exception(told.value))


# Devices and folders


def test_devices_that_are_not_there_are_told_when_they_are_looked_for():
    ServiceSettings(**RIGHT).check_devices()
    settings = ServiceSettings(**{**RIGHT, "devices": ["cpu:0", "cuda:127"]})
    with pytest.raises(SettingsError, match="devices: 'cuda:127' is not there; this machine has"):
        settings.check_devices()


def test_devices_of_hosts_are_looked_for_there():
    devices = ["host-a/cuda:127", "10.0.0.1/cpu:0"]
    settings = ServiceSettings(**{**RIGHT, "devices": devices}, workers="ray", ray={"address": "10.0.0.1:6379"})
    settings.check_devices()
    assert settings.ray.address == "10.0.0.1:6379"
    with pytest.raises(SettingsError, match="devices: 'host-a/cuda:127' names a host"):
        ServiceSettings(**{**RIGHT, "devices": devices}).check_devices()


def test_the_folder_is_made_for_this_user_alone(tmp_path):
    settings = ServiceSettings(**RIGHT, folder=tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists(), "settings change nothing by being made"
    assert settings.make_folder() == tmp_path / "a" / "b"
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert settings.make_folder().is_dir(), "it may be there"


def test_a_folder_that_others_write_to_is_refused(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with pytest.raises(SettingsError, match=r"folder: others may write to .*, mode 0777: chmod 700"):
        ServiceSettings(**RIGHT, folder=open_folder).make_folder()
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"folder: cannot use .*file"):
        ServiceSettings(**RIGHT, folder=tmp_path / "file").make_folder()


def test_code_that_anybody_could_replace_is_not_run(tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    assert ServiceSettings(**RIGHT, entry_path=code).entry_path == code
    code.chmod(0o777)
    with pytest.raises(SettingsError, match=r"entry_path: .* holds code that is run, and everybody may write to it"):
        ServiceSettings(**RIGHT, entry_path=code)
