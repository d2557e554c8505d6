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
    devices = ["cuda:0", "cuda:1"]
    isolation = "process"
    entry_path = "examples/charlm"
    token_file = "/etc/asyncpipe/token"

    [entries."charlm:build"]
    fixed = { max_bytes = 200_000 }     # clients cannot set this one

    [memory_limit]
    "cuda:0" = "70 GiB"                 # for the declared memory of all jobs there

    [quotas]
    default = { running_devices = 4, queued = 200, bytes = "200 GiB" }  # of each user
    users.alice = { running_devices = 8 }
    teams.vision = { running_devices = 6 }

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

from asyncpipe.core.checks import similar
from asyncpipe.errors import AsyncpipeError, DeviceError
from asyncpipe.observe.http_hosts import is_loopback
from asyncpipe.service.settings import setting_types as types
from asyncpipe.service.settings.quota_settings import QuotaSettings
from asyncpipe.service.settings.retention_settings import RetentionSettings
from asyncpipe.service.settings.setting_types import EntrySettings
from asyncpipe.service.settings.token_file import read_token
from asyncpipe.train.job_file import RayTable
from asyncpipe.train.validation import WrongKey, read_toml, wrong_keys

__all__ = ["RELOADED", "EntrySettings", "FolderSettings", "ServiceSettings", "SettingsError"]

PREFIX = "ASYNCPIPE_"
SECRET = ("token", "mlflow")
RELOADED = (
    "entries hosts max_queued max_running memory_limit operators others proxy_role quotas retention team_access token"
    " token_file"
).split()
"""Keys that a service that runs reads again; what has them read is in the fields, so nobody keeps a copy."""
SIMILARITY = 0.9
"""How similar to a known variable an unknown one must be to count as a misspelling; others may be other programs'."""


class SettingsError(AsyncpipeError, ValueError):
    """The service cannot be set up like this: one line for each wrong key says where it stands and what is right."""


class FolderSettings(BaseSettings):
    """Where a service is kept, and what of it, for commands that need no other setting. Raises ``SettingsError``."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,  # They are the texts of --help, and of errors.
    )

    config: Path | None = None
    """the file of settings that is read; must be the path of a TOML file"""
    folder: Path = Path("runs/service")
    """what must outlive the process, of mode 0700; must be the path of a folder"""
    retention: RetentionSettings = RetentionSettings()

    def __init__(self, **arguments: Any) -> None:
        try:
            super().__init__(**arguments)
        except ValidationError as error:
            problems = wrong_keys(error, type(self), SECRET)
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


class ServiceSettings(FolderSettings):
    """The settings of a service, checked and frozen; raises ``SettingsError`` with a line for each wrong key.

    The token appears neither in ``repr`` nor in errors.
    """

    model_config = SettingsConfigDict(extra="forbid")

    devices: types.DeviceNames
    entries: types.EntryTable
    entry_path: types.CodeFolder | None = None
    """where entries' modules are looked for first; must be the path of a folder with modules"""

    max_running: types.PositiveInteger = 4
    """the most jobs that run at once; must be an integer of at least 1"""
    max_queued: types.PositiveInteger = 1000
    """the most jobs that wait, beyond which jobs are refused; must be an integer of at least 1"""
    memory_limit: types.MemoryLimit = {}
    """bytes of a device for the declared memory of all its jobs; must be a table of bytes by device, as cuda:0=70GiB"""
    share_devices: bool = True
    """whether jobs share a device at a time, or each waits until its devices are free; must be true or false"""
    half_life: types.Seconds = 7 * 86400.0
    """after how long half of what a user has used of devices is forgotten; must be a number of seconds above 0"""
    shares: types.Shares = {}
    """how much of the devices users may use, 1 by default; must be a table of numbers above 0 by user, as alice=2"""
    isolation: Literal["thread", "process"] | None = None
    """where a job's code runs, by default a process of its own if workers is threads; must be thread or process"""
    job_memory: types.ByteCount | None = None
    """the most memory of a job's process, about 300 MiB of it for torch; must be a number of bytes, as 8GiB"""
    cancel_seconds: types.Seconds = 5.0
    """how long a cancelled job has to end before its process is killed; must be a number of seconds above 0"""
    max_attempts: types.PositiveInteger = 3
    """deaths since a job's last snapshot after which it is quarantined; must be an integer of at least 1"""
    changed_code: Literal["tell", "refuse"] = "tell"
    """whether a job begins whose entry has changed since it was submitted; must be tell or refuse"""
    resume: bool = True
    """whether unfinished jobs resume at the start, or are paused; must be true or false"""
    workers: Literal["threads", "processes", "ray", "torchrun"] = "threads"
    """where devices are, here or on hosts; must be threads, processes, ray or torchrun"""
    ray: RayTable = RayTable()
    standby: bool = False
    """whether to wait for another service that has the folder, and take over when it ends; must be true or false"""
    lost_state: Literal["refuse", "quarantine"] = "refuse"
    """what is done if the store or the folders of jobs are gone; must be refuse or quarantine"""
    grace_seconds: types.Seconds = 30.0
    """how long jobs have to end with a snapshot after a signal; must be a number of seconds above 0"""
    watchdog_factor: float = Field(default=20.0, ge=1, allow_inf_nan=False)
    """how many times longer than before a task runs that counts as hung; must be a number of at least 1"""
    watchdog_floor: types.Seconds = 60.0
    """how long every task may run; must be a number of seconds above 0"""

    address: str = Field(default="127.0.0.1", min_length=1)
    """where the API listens, which others reach only if there is a token; must be an address"""
    port: types.PortNumber = 8080
    """where the API listens; must be a port from 0 (any free one) to 65535"""
    certificate: Path | None = None
    """the certificate (PEM) for the API over TLS; must be the path of a file"""
    key: Path | None = None
    """its key, unless the certificate's file has it; must be the path of a file"""
    hosts: types.HostNames = ()
    trusted_proxies: types.Networks = ()
    token: types.Token | None = None
    """what clients must send, by ASYNCPIPE_TOKEN; must be a text"""
    token_file: Path | None = None
    """the file that has the token; must be the path of a file of mode 0600"""
    user_header: types.HeaderName | None = None
    """the header by which a trusted proxy names the user, as X-Forwarded-User; must be the name of a header"""
    groups_header: types.HeaderName | None = None
    """the header by which it names the user's teams, with commas between them; must be the name of a header"""
    user_proxies: types.Networks = ()
    proxy_role: Literal["read", "submit"] = "submit"
    """what users may whom the proxy names, unless they are operators; must be read or submit"""
    operators: types.UserNames = ()
    team_access: Literal["none", "read", "change"] = "read"
    """what users may do with jobs of their teams; must be none, read or change"""
    others: Literal["none", "read"] = "read"
    """whether users see the jobs of all others; must be none or read"""
    quotas: QuotaSettings = QuotaSettings()

    max_body: types.ByteCount = ByteSize(16 * 1024)
    """the size of a request's body; must be a number of bytes, such as 16384 or 16KiB"""
    max_connections: types.PositiveInteger = 1000
    """connections of the API, beyond which requests are refused; must be an integer of at least 1"""

    metrics_address: str = Field(default="127.0.0.1", min_length=1)
    """where metrics are served; must be an address"""
    metrics_port: types.OptionalPort = 9400
    """where metrics are served; must be a port from 0 (any free one) to 65535, or "none\""""
    metrics_access: Literal["certificate", "open"] = "certificate"
    """whether scrapers of others need a certificate; must be certificate or open"""
    metrics_certificate: Path | None = None
    """the certificate (PEM) for metrics over TLS; must be the path of a file"""
    metrics_key: Path | None = None
    """its key, unless the certificate's file has it; must be the path of a file"""
    metrics_client_authority: Path | None = None
    """who has signed the certificates of scrapers (PEM); must be the path of a file"""
    tensorboard: bool = False
    """whether each job writes its figures for TensorBoard, to jobs/ID/tensorboard; must be true or false"""
    mlflow: SecretStr | None = None
    """the tracking server of MLflow for the same figures, by ASYNCPIPE_MLFLOW; must be a text"""
    mlflow_experiment: str = Field(default="asyncpipe", min_length=1)
    """the experiment of the jobs' runs there; must be a text that is not empty"""

    def __init__(self, **arguments: Any) -> None:  # Values as a file has them, whatever the types of the fields.
        super().__init__(**arguments)

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
        if self.token is None and self.user_header is None and not is_loopback(self.address):
            raise ValueError(f"address: {self.address!r}, {rule}")
        if not self.user_header and (self.groups_header or self.user_proxies or self.operators):
            raise ValueError("user_header: missing; groups_header, user_proxies and operators do nothing without it")
        if self.user_header and not self.user_proxies:
            raise ValueError("user_proxies: missing; user_header is believed from the addresses there alone")
        if {"0.0.0.0/0", "::/0"} & set(self.user_proxies):
            raise ValueError("user_proxies: that is everybody, who could be any user; list the proxies' addresses")
        if self.key is not None and self.certificate is None:
            raise ValueError("key: does nothing alone: give certificate as well")
        is_reached = self.metrics_port is not None and not is_loopback(self.metrics_address)
        if is_reached and self.metrics_access == "certificate" and self.metrics_client_authority is None:
            raise ValueError(
                f"metrics_address: {self.metrics_address!r}, which others can reach, needs metrics_client_authority "
                'and metrics_certificate, or metrics_access = "open" in a network that only the scraper is in'
            )
        if self.port and self.port == self.metrics_port and self.address == self.metrics_address:
            raise ValueError(f"metrics_port: {self.port} is the port of the service; metrics need another one")
        if unknown := sorted(self.memory_limit.keys() - set(self.devices)):
            raise ValueError(f"memory_limit: {', '.join(unknown)}: not among the devices {', '.join(self.devices)}")
        if self.isolation == "process" and self.workers in ("ray", "torchrun"):
            rule = f"of workers = {self.workers!r} has one controller, which is the service: run jobs on threads of it"
            raise ValueError(f'isolation: "process": the cluster {rule}')
        if self.job_memory and not self.is_isolated:
            raise ValueError('job_memory: holds for a process: set isolation = "process", or leave it out')
        return self

    @property
    def hangs(self) -> dict[str, Any]:
        """Options of a device pool: when a task hangs."""
        return {"hang_seconds": self.watchdog_floor, "hang_factor": self.watchdog_factor}

    @property
    def is_isolated(self) -> bool:
        """Whether each job runs in a process of its own."""
        if self.isolation is not None:
            return self.isolation == "process"
        return self.workers == "threads" and os.name == "posix"

    def take(self, new: ServiceSettings) -> list[str]:
        """Have what ``new`` says of the keys in ``RELOADED``; the other keys that differ, which need a restart."""
        for name in RELOADED:
            object.__setattr__(self, name, getattr(new, name))
        return [name for name in type(self).model_fields if getattr(self, name) != getattr(new, name)]

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
        if status.st_uid != os.getuid():
            raise SettingsError(f"folder: {self.folder} must be this user's, and belongs to user {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
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
