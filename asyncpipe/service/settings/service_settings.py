"""What the operator of a service sets: arguments win over environment variables, and those over a TOML file.

::

    arguments, flags         ServiceSettings(port=8080)       --port 8080
        │ before
    environment variables    ASYNCPIPE_PORT=8080              ASYNCPIPE_DEVICES=cpu:0,cpu:1
        │ before
    TOML file                only the file that config or ASYNCPIPE_CONFIG names

The highest source that has a key gives its whole value: an allow-list in the environment replaces that of the file.
A complete file::

    folder = "runs/service"
    devices = ["cpu:0", "cpu:1"]
    entry_path = "examples/charlm"
    token_file = "/etc/asyncpipe/token"

    [entries."charlm:build"]
    fixed = { max_bytes = 200_000 }     # clients cannot set this one

    [memory_limit]
    "cpu:0" = "2 GiB"

Paths are relative to the working directory. Importing this module reads nothing; constructing ``ServiceSettings`` reads
the environment, the file and the token's file, and changes nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from asyncpipe.errors import AsyncpipeError, DeviceError
from asyncpipe.observe.http_hosts import is_loopback
from asyncpipe.service.settings import setting_types as types
from asyncpipe.service.settings.retention_settings import RetentionSettings
from asyncpipe.service.settings.setting_types import EntrySettings
from asyncpipe.service.settings.token_file import read_token
from asyncpipe.train.job_file import RayTable
from asyncpipe.train.validation import WrongKey, read_toml, similar, wrong_keys

__all__ = ["EntrySettings", "ServiceSettings", "SettingsError"]

PREFIX = "ASYNCPIPE_"
SECRET = ("token",)
SIMILARITY = 0.9
"""How similar to a known variable an unknown one must be to count as a misspelling; others may be other programs'."""


class SettingsError(AsyncpipeError, ValueError):
    """The service cannot be set up like this: one line for each wrong key says where it stands and what is right."""


class ServiceSettings(BaseSettings):
    """The settings of a service, checked and frozen; raises ``SettingsError`` with a line for each wrong key.

    The token appears neither in ``repr`` nor in errors.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    config: Path | None = Field(default=None, description="must be the path of a TOML file with settings")
    """The file that was read."""
    folder: Path = Field(default=Path("runs/service"), description="must be the path of a folder")
    """Holds everything that must outlive the process; created with the mode 0700."""
    devices: types.DeviceNames
    """What jobs may name. A name that is given twice can be used twice by one job, as two logical devices."""
    entries: types.EntryTable
    """The only code that jobs run: ``module:factory``, and the parameters that the operator fixes."""
    entry_path: types.CodeFolder | None = Field(default=None, description="must be the path of a folder with modules")
    """Where the entries' modules are looked for before ``sys.path``."""
    max_running: types.PositiveInteger = 4
    max_queued: types.PositiveInteger = 1000
    """More jobs are refused; jobs that have ended do not count."""
    memory_limit: types.MemoryLimit = Field(default_factory=dict)
    """Bytes of a device that all running jobs together may use; a device that is not listed has no limit."""
    share_devices: bool = Field(default=True, description="must be true or false")
    """Whether several jobs may run on a device at a time. If not, a job waits until all its devices are free."""
    isolation: Literal["thread", "process"] | None = Field(default=None, description='must be "thread" or "process"')
    """Where a job's code runs: on threads of the service, or in a process of its own. Unless it is given, a process
    where jobs share no device (``share_devices = false`` or ``max_running = 1``) and devices are threads; see
    ``is_isolated``."""
    job_memory: types.ByteCount | None = Field(default=None, description='must be a number of bytes, as "8 GiB"')
    """The most memory that a job's process may have, also while the job is measured; Python and torch take about
    300 MiB of it."""
    cancel_seconds: types.Seconds = 5.0
    """How long a job that is cancelled has to end between two tasks, before its process is terminated."""
    max_attempts: types.PositiveInteger = 3
    """A job is quarantined when its process, or the service while it ran, has died so often since its last snapshot."""
    resume: bool = Field(default=True, description="must be true or false")
    """Whether jobs go on by themselves that the last process has left; if not, all of these are paused."""
    address: types.Address = "127.0.0.1"
    port: types.PortNumber = 8080
    probe_port: types.ProbePort = None
    """One more on ``address``, which answers ``/livez`` and ``/readyz`` alone: a flood of ``port`` cannot delay it."""
    hosts: types.HostNames = ()
    """Other host names under which requests may address this service, as behind a proxy."""
    trusted_proxies: types.Networks = ()
    """Addresses of proxies whose word about a client's address is taken; from others it is ignored."""
    proxy_header: Literal["forwarded", "x-forwarded-for"] = Field(
        default="forwarded", description='must be "forwarded" or "x-forwarded-for"'
    )
    """The header in which these proxies say it. It must be the one that they write: clients may send the other."""
    metrics_address: types.Address = "127.0.0.1"
    metrics_access: Literal["certificate", "open"] = Field(
        default="certificate", description='must be "certificate" or "open"'
    )
    """Whether scrapers need a certificate where others can reach that address; on loopback they need none."""
    metrics_port: types.OptionalPort = 9400
    metrics_certificate: Path | None = Field(default=None, description="must be the path of a file")
    """The certificate (PEM) with which metrics are served over TLS; plain HTTP without."""
    metrics_key: Path | None = Field(default=None, description="must be the path of a file")
    """Its key, unless the certificate's file has it."""
    metrics_client_authority: Path | None = Field(default=None, description="must be the path of a file")
    """Only scrapers whose certificate this authority (PEM) has signed are answered."""
    token: types.Token | None = Field(default=None, description="must be a text")
    """What clients must send; after construction also the content of ``token_file``."""
    token_file: Path | None = Field(default=None, description="must be the path of a file")
    grace_seconds: types.Seconds = 30.0
    """How long jobs have, when the service is told to end, to finish their step and take a snapshot."""
    watchdog_factor: types.Factor = 20.0
    """A task counts as hung once it runs this many times longer than it did before …"""
    watchdog_floor: types.Seconds = 60.0
    """… but never before this many seconds."""
    max_body: types.ByteCount = ByteSize(128 * 1024)
    requests_per_second: types.Rate = 50.0
    """Of one client address, on average; only requests without a token that is right, if tokens are needed."""
    burst: types.PositiveInteger = 100
    """Of one client address, at once."""
    token_requests_per_second: types.Rate = 100.0
    """With one token, on average, from whatever addresses."""
    token_burst: types.PositiveInteger = 200
    """With one token, at once."""
    body_seconds: types.Seconds = 10.0
    """How long a request may take to send its body."""
    header_seconds: types.Seconds = 10.0
    """How long a connection may take to send the head of a request, or be idle before it."""
    max_connections: types.PositiveInteger = 1000
    """Of the API. Unless it is set, there are fewer where the process may not open so many files."""
    workers: Literal["threads", "processes", "ray", "torchrun"] = Field(
        default="threads", description='must be "threads", "processes", "ray" or "torchrun"'
    )
    """Where the devices' threads are: in this process, or in worker processes, one for each accelerator and each CPU
    device, here or on hosts (``ray``, ``torchrun``). With workers, jobs must have ``training.overlap = true``."""
    ray: RayTable = RayTable()
    """As ``[ray]`` in a job file, for ``workers = "ray"``."""
    lost_state: Literal["refuse", "quarantine"] = Field(
        default="refuse", description='must be "refuse" or "quarantine"'
    )
    """What a service does that finds its store without the folders of its jobs, or these without the store."""
    retention: RetentionSettings = RetentionSettings()
    """What of jobs that have ended is deleted, and when; nothing without rules."""
    tensorboard: bool = Field(default=False, description="must be true or false")
    """Whether each job writes figures of its steps for TensorBoard, to ``jobs/ID/tensorboard`` in the folder."""
    mlflow: SecretStr | None = None
    """MLflow's tracking server, to which each job logs the same; secret, since it may have a password."""
    mlflow_experiment: str = Field(default="asyncpipe", min_length=1, description="must be a text that is not empty")
    """The experiment of the jobs' runs there."""
    loop: Literal["own", "running"] = Field(default="own", description='must be "own" or "running"')
    """Whether training has an event loop of its own, which a blocking handler of the host cannot delay."""

    def __init__(self, **arguments: Any) -> None:
        try:
            super().__init__(**arguments)
        except ValidationError as error:
            problems = wrong_keys(error, ServiceSettings, SECRET)
            raise SettingsError("\n".join(_line(problem, arguments) for problem in problems)) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources, the highest first."""
        return init_settings, _EnvironmentSource(settings_cls), _FileSource(settings_cls, {})

    @field_validator("token_file")
    @classmethod
    def _check_token_file(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None:
            if info.data.get("token") is not None:
                raise ValueError("give either a token or a file with one, and leave the other out")
            read_token(path)
        return path

    @model_validator(mode="after")
    def _check_combination(self) -> ServiceSettings:
        if self.token_file is not None:
            object.__setattr__(self, "token", SecretStr(read_token(self.token_file)))
        rule = "which others can reach, needs a token: give token_file or ASYNCPIPE_TOKEN, or listen on 127.0.0.1"
        if self.token is None and not is_loopback(self.address):
            raise ValueError(f"address: {self.address!r}, {rule}")
        is_reached = self.metrics_port is not None and not is_loopback(self.metrics_address)
        if is_reached and self.metrics_access == "certificate" and self.metrics_client_authority is None:
            raise ValueError(
                f"metrics_address: {self.metrics_address!r}, which others can reach, needs metrics_client_authority "
                'and metrics_certificate, or metrics_access = "open" in a network that only the scraper is in'
            )
        if self.probe_port is not None and self.probe_port in (self.port, self.metrics_port):
            raise ValueError(f"probe_port: {self.probe_port} is taken by the service itself; probes need another one")
        if self.port and self.port == self.metrics_port and self.address == self.metrics_address:
            raise ValueError(f"metrics_port: {self.port} is the port of the service; metrics need another one")
        if unknown := sorted(self.memory_limit.keys() - set(self.devices)):
            raise ValueError(f"memory_limit: {', '.join(unknown)}: not among the devices {', '.join(self.devices)}")
        if self.isolation == "process" and self.workers in ("ray", "torchrun"):
            rule = f"of workers = {self.workers!r} has one controller, which is the service: run jobs on threads of it"
            raise ValueError(f'isolation: "process": the cluster {rule}')
        if self.job_memory is not None and not self.is_isolated:
            rule = 'holds for a process: set isolation = "process", or leave it out'
            raise ValueError(f"job_memory: {rule}")
        return self

    @property
    def is_isolated(self) -> bool:
        """Whether each job runs in a process of its own."""
        if self.isolation is not None:
            return self.isolation == "process"
        return self.workers == "threads" and os.name == "posix" and (not self.share_devices or self.max_running == 1)

    def check_devices(self) -> None:
        """Raise ``SettingsError`` unless this machine has all ``devices``. Imports torch."""
        from asyncpipe.ops.device.devices import resolve_devices

        try:
            resolve_devices(self.devices, on_hosts=self.workers in ("ray", "torchrun"))
        except DeviceError as error:
            raise SettingsError(f"devices: {error}") from error

    def make_folder(self) -> Path:
        """The service's folder, created with the mode 0700 if it does not exist. Blocks.

        Raises ``SettingsError`` where it belongs to another user or others may write to it.
        """
        try:
            self.folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
            status = self.folder.stat()
        except OSError as error:
            raise SettingsError(f"folder: cannot use {self.folder}: {error.strerror}") from error
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise SettingsError(f"folder: {self.folder} must be this user's, and belongs to user {status.st_uid}")
        if hasattr(os, "getuid") and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(status.st_mode)
            advice = "chmod 700 it, or name a new one"
            raise SettingsError(f"folder: others may write to {self.folder}, mode {mode:04o}: {advice}")
        return self.folder


# Sources. Pydantic merges the tables of several sources; a source therefore leaves out keys that a higher one has.


class _EnvironmentSource(EnvSettingsSource):
    def __call__(self) -> dict[str, Any]:
        known = {PREFIX + name.upper() for name in self.settings_cls.model_fields}
        for name in os.environ:
            if name.startswith(PREFIX) and name not in known and (hint := similar(name, known, SIMILARITY)):
                raise SettingsError(f"{name}: unknown variable; {hint.strip()}")
        if os.environ.get("ASYNCPIPE_PORT", "").startswith("tcp://"):
            raise SettingsError(
                "ASYNCPIPE_PORT: must be a port; Kubernetes sets this variable for a service that is called asyncpipe: "
                "set enableServiceLinks: false in the pod, or give the service another name"
            )
        return _without(super().__call__(), self.current_state)


class _FileSource(InitSettingsSource):
    """The TOML file that ``config``, of a higher source, names."""

    def __call__(self) -> dict[str, Any]:
        config = self.current_state.get("config")
        return {} if config is None else _without(_read_file(Path(config)), self.current_state)


def _without(values: Mapping[str, Any], higher: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in higher}


def _read_file(path: Path) -> dict[str, Any]:
    tables = read_toml(path, SettingsError)
    if "token" in tables:
        raise SettingsError(f"{path}: token: has no place in a file of settings; give token_file, or ASYNCPIPE_TOKEN")
    if "config" in tables:
        raise SettingsError(f"{path}: config: a file of settings cannot name another file")
    return tables


def _line(problem: WrongKey, arguments: Mapping[str, Any]) -> str:
    """``problem`` with its key as the source spells it that gave the value."""
    if not problem.key:  # Of several keys; the text says which.
        return problem.text
    top = problem.key.partition(".")[0].partition("[")[0]
    variable = PREFIX + top.upper()
    config = arguments.get("config", os.environ.get(f"{PREFIX}CONFIG"))
    if top in arguments or problem.text.startswith("missing"):
        origin = top
    elif os.environ.get(variable):
        origin = variable
    else:
        origin = f"{config}: {top}"
    return f"{origin}{problem.key.removeprefix(top)}: {problem.text}"
