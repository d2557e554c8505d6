"""What the operator of a service sets: arguments win over the environment, and that over a TOML file.

::

    arguments, flags       ServiceSettings(port=8080)       --port 8080
        │ over
    environment            ASYNCPIPE_PORT=8080              ASYNCPIPE_DEVICES=cpu:0,cpu:1
        │ over
    TOML file              only the one that config or ASYNCPIPE_CONFIG names

A key is taken whole from the highest that has it: an allow-list in the environment replaces the file's, and adds
nothing to it. A whole file::

    folder = "runs/service"
    devices = ["cpu:0", "cpu:1"]
    entry_path = "examples/charlm"
    token_file = "/etc/asyncpipe/token"

    [entries."charlm:build"]
    fixed = { max_bytes = 200_000 }     # clients cannot set this one

    [memory_limit]
    "cpu:0" = "2 GiB"

Paths are relative to the working directory. Nothing is read at import; making settings reads the environment, the
file and the token's file, and changes nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as _SourceError

from asyncpipe.errors import AsyncpipeError, DeviceError
from asyncpipe.observe.http_hosts import is_loopback
from asyncpipe.service.settings import setting_values as values
from asyncpipe.service.settings.token_file import check_token, read_token
from asyncpipe.train.validation import WrongKey, read_toml, similar, wrong_keys

__all__ = ["EntrySettings", "ServiceSettings", "SettingsError"]

PREFIX = "ASYNCPIPE_"
SECRET = ("token",)
LIKENESS = 0.9
"""How much an unknown variable must be like a known one to be taken for a slip: others may be of other programs."""


class SettingsError(AsyncpipeError, ValueError):
    """The service cannot be set up like this: one line for each wrong key, with where it stands and what is right."""


# What is allowed stands in each field's description, and error messages quote it.

_COUNT = "must be an integer of at least 1"
_PORT = "must be a port from 0 (any free one) to 65535"
_SECONDS = "must be a finite number of seconds greater than 0"
_RATE = "must be a finite number greater than 0"
_FACTOR = "must be a finite number of at least 1"
_BYTES = 'must be a number of bytes of at least 1, such as 131072 or "128 KiB"'

Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(values.texts)]
PositiveInteger = Annotated[int, BeforeValidator(values.no_flag), Field(ge=1, le=10**9, description=_COUNT)]
PortNumber = Annotated[int, BeforeValidator(values.no_flag), Field(ge=0, le=65535)]
Seconds = Annotated[
    float, BeforeValidator(values.no_flag), Field(gt=0, le=1e9, allow_inf_nan=False, description=_SECONDS)
]
Rate = Annotated[float, BeforeValidator(values.no_flag), Field(gt=0, allow_inf_nan=False, description=_RATE)]
Factor = Annotated[float, BeforeValidator(values.no_flag), Field(ge=1, allow_inf_nan=False, description=_FACTOR)]
Bytes = Annotated[ByteSize, BeforeValidator(values.no_flag), Field(ge=1)]


class EntrySettings(BaseModel):
    """What the operator says of one entry that jobs may name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fixed: dict[str, Any] = Field(default_factory=dict, description="must be a table of keyword arguments")
    """Parameters that the operator sets and clients cannot."""


EntryTable = Annotated[
    dict[Annotated[str, AfterValidator(values.entry_name)], EntrySettings],
    NoDecode,
    BeforeValidator(values.entries),
    Field(min_length=1),
]


class ServiceSettings(BaseSettings):
    """The settings of a service, checked and frozen; raises ``SettingsError`` with a line for each wrong key.

    The token is nowhere shown, be it in ``repr`` or in an error.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    config: Path | None = Field(default=None, description="must be the path of a TOML file with settings")
    """The file that was read."""
    folder: Path = Field(default=Path("runs/service"), description="must be the path of a folder")
    """Where all that must outlive the process is; made with the mode 0700."""
    devices: Annotated[Texts, AfterValidator(values.devices)] = Field(description=values.DEVICES)
    """What jobs may name. One that is there twice, a job may name twice, as two logical devices."""
    entries: EntryTable = Field(description=values.ENTRIES)
    """The only code that jobs run: ``module:factory`` and what the operator fixes of its parameters."""
    entry_path: Path | None = Field(default=None, description="must be the path of a folder with modules")
    """Where the entries' modules are looked for before Python's own path."""
    max_running: PositiveInteger = 4
    max_queued: PositiveInteger = 1000
    """More are refused; jobs that ended do not count."""
    memory_limit: Annotated[
        dict[str, Annotated[Bytes, AfterValidator(int)]], NoDecode, BeforeValidator(values.mapping)
    ] = Field(default_factory=dict, description=values.MEMORY_LIMIT)
    """Bytes of a device that all jobs together may take; a device that is not there has no limit."""
    address: str = Field(default="127.0.0.1", min_length=1, description="must be an address to listen on")
    port: PortNumber = Field(default=8080, description=_PORT)
    hosts: Annotated[Texts, AfterValidator(values.hosts)] = Field(default=(), description=values.HOSTS)
    """Other names under which requests may ask for this service, as behind a proxy."""
    metrics_address: str = Field(default="127.0.0.1", min_length=1, description="must be an address to listen on")
    metrics_port: Annotated[PortNumber | None, BeforeValidator(values.or_none)] = Field(
        default=9400, description=f'{_PORT}, or "none"'
    )
    token: SecretStr | None = Field(default=None, description="must be a text")
    """What clients must show; also the content of ``token_file``, once settings are made."""
    token_file: Path | None = Field(default=None, description="must be the path of a file")
    grace_seconds: Seconds = 30.0
    """In which jobs end their step and take a snapshot, when the service is told to end."""
    watchdog_factor: Factor = 20.0
    """A task is taken for hung after so many times what it took before …"""
    watchdog_floor: Seconds = 60.0
    """… and not before so many seconds."""
    max_body: Annotated[Bytes, AfterValidator(int)] = Field(default=ByteSize(128 * 1024), description=_BYTES)
    requests_per_second: Rate = 50.0
    """Of one client address, in the long run."""
    burst: PositiveInteger = 100
    """Of one client address, at once."""
    body_seconds: Seconds = 10.0
    header_seconds: Seconds = 10.0
    max_connections: PositiveInteger = 1000
    loop: Literal["own", "running"] = Field(default="own", description='must be "own" or "running"')
    """Whether training has an event loop of its own, which a handler of the host that blocks cannot delay."""

    def __init__(self, **arguments: Any) -> None:
        given, origin = _layers(type(self), arguments)
        try:
            super().__init__(**given)
        except ValidationError as error:
            problems = wrong_keys(error, ServiceSettings, SECRET)
            raise SettingsError("\n".join(_line(problem, origin) for problem in problems)) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what ``__init__`` was given, which has merged the sources: by default tables would mix."""
        return (init_settings,)

    @field_validator("token")
    @classmethod
    def _checked_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None:
            check_token(token.get_secret_value())
        return token

    @field_validator("token_file")
    @classmethod
    def _checked_file(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None:
            if info.data.get("token") is not None:
                raise ValueError("give either a token or a file with one, and leave the other out")
            read_token(path)
        return path

    @field_validator("entry_path")
    @classmethod
    def _checked_folder(cls, path: Path | None) -> Path | None:
        if path is not None:
            values.check_code_folder(path)
        return path

    @model_validator(mode="after")
    def _consistent(self) -> ServiceSettings:
        if self.token_file is not None:
            object.__setattr__(self, "token", SecretStr(read_token(self.token_file)))
        if self.token is None and not is_loopback(self.address):
            rule = "which others can reach, needs a token: give token_file or ASYNCPIPE_TOKEN, or listen on 127.0.0.1"
            raise ValueError(f"address: {self.address!r}, {rule}")
        if self.port and self.port == self.metrics_port and self.address == self.metrics_address:
            raise ValueError(f"metrics_port: {self.port} is the port of the service; metrics have one of their own")
        if unknown := sorted(self.memory_limit.keys() - set(self.devices)):
            raise ValueError(f"memory_limit: {', '.join(unknown)}: not among the devices {', '.join(self.devices)}")
        return self

    def check_devices(self) -> None:
        """Raise ``SettingsError`` unless this machine has all ``devices``. Imports torch."""
        from asyncpipe.ops.device.devices import resolve_devices

        try:
            resolve_devices(self.devices)
        except DeviceError as error:
            raise SettingsError(f"devices: {error}") from error

    def make_folder(self) -> Path:
        """The service's folder, which now exists and is this user's own: made with the mode 0700 where it was not
        there. Raises ``SettingsError`` where others could write to it. Blocks."""
        try:
            self.folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
            status = self.folder.stat()
        except OSError as error:
            raise SettingsError(f"folder: cannot use {self.folder}: {error.strerror}") from error
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise SettingsError(f"folder: {self.folder} must be this user's, and belongs to user {status.st_uid}")
        if hasattr(os, "getuid") and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(status.st_mode)
            raise SettingsError(
                f"folder: others may write to {self.folder}, mode {mode:04o}: chmod 700 it, or name a new one"
            )
        return self.folder


# Where values come from


def _layers(settings: type[BaseSettings], arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Each key's value from the highest source that has it, and what that source calls it in a message."""
    environment = _environment(settings)
    config = arguments.get("config", environment.get("config"))
    file = {} if config is None else _file(Path(config))
    given, origin = {}, {}
    for name, layer in (
        (lambda key: f"{config}: {key}", file),
        (lambda key: PREFIX + key.upper(), environment),
        (lambda key: key, arguments),
    ):
        for key, value in layer.items():
            given[key], origin[key] = value, name(key)
    return given, origin


def _environment(settings: type[BaseSettings]) -> dict[str, Any]:
    known = {PREFIX + name.upper() for name in settings.model_fields}
    for name in os.environ:
        top = name.partition("__")[0]
        if name.startswith(PREFIX) and top not in known and (hint := similar(name, known, LIKENESS)):
            raise SettingsError(f"{name}: unknown variable; {hint.strip()}")
    if os.environ.get("ASYNCPIPE_PORT", "").startswith("tcp://"):
        raise SettingsError(
            "ASYNCPIPE_PORT: must be a port, and is what Kubernetes sets for a service called asyncpipe; "
            "set enableServiceLinks: false in the pod, or call the service otherwise"
        )
    try:
        return EnvSettingsSource(settings)()
    except _SourceError as error:
        raise SettingsError(f"the environment cannot be read: {error}") from error


def _file(path: Path) -> dict[str, Any]:
    tables = read_toml(path, SettingsError)
    if "token" in tables:
        raise SettingsError(f"{path}: token: has no place in a file of settings; give token_file, or ASYNCPIPE_TOKEN")
    if "config" in tables:
        raise SettingsError(f"{path}: config: a file of settings names no other one")
    return tables


def _line(problem: WrongKey, origin: Mapping[str, str]) -> str:
    """``problem`` with its key as the source calls it that it comes from."""
    if not problem.key:  # Of several keys; the text says which.
        return problem.text
    top = problem.key.partition(".")[0].partition("[")[0]
    return f"{origin.get(top, top)}{problem.key.removeprefix(top)}: {problem.text}"
