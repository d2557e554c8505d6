"""The types of a service's settings: how a value may be written, and what it must be.

In an environment variable and on the command line a list is written with commas and a table as ``key=value`` with
commas; either may be JSON. The validators raise ``ValueError``.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, SecretStr
from pydantic_settings import NoDecode

from asyncpipe.service.settings.token_file import check_token
from asyncpipe.service.token_roles import NAME_RULE, is_name

__all__ = [
    "ByteCount",
    "CodeFolder",
    "DeviceNames",
    "EntrySettings",
    "EntryTable",
    "HeaderName",
    "HostNames",
    "MemoryLimit",
    "Networks",
    "OptionalPort",
    "PortNumber",
    "PositiveInteger",
    "Seconds",
    "Shares",
    "Token",
    "UserNames",
]

_DEVICES = 'must be a list of device names, cpu, cpu:N, cuda or cuda:N, such as ["cpu:0", "cpu:1"] or ["host/cuda:0"]'
_ENTRIES = 'must be a list of entries that jobs may name, or a table of them, as ["package.module:factory"]'
_HOSTS = 'must be a list of host names without scheme and port, such as ["train.example.org"]'
_NETWORKS = 'must be a list of addresses or networks, such as ["10.0.0.7", "10.1.0.0/16"]'

_HEADER = "must be the name of a header, such as X-Forwarded-User"
_USERS = 'must be a list of users, such as ["carol"]; each '

_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
_DEVICE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/)?(cpu|cuda)(:(\d|[1-9]\d|1[01]\d|12[0-7]))?", re.ASCII)
"""Indices end at 127: torch keeps an index in 8 bits and wraps larger ones silently."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]", re.ASCII)


# Numbers

PositiveInteger = Annotated[int, Field(ge=1, le=10**9)]
PortNumber = Annotated[int, Field(ge=0, le=65535)]
OptionalPort = Annotated[PortNumber | None, BeforeValidator(lambda value: None if value == "none" else value)]
"""TOML and environment variables have no null; the text ``none`` stands for it."""
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
ByteCount = Annotated[ByteSize, Field(ge=1), AfterValidator(int)]


# Lists and tables


def _read(value: object) -> object:
    """The JSON in a text that begins like it, or the parts between commas; any other value as it is."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"starts like JSON, and cannot be read as JSON: {error}") from None
    return [part.strip() for part in value.split(",") if part.strip()]


def _table(value: object) -> object:
    if isinstance(parts := _read(value), list) and isinstance(value, str):
        pairs = [part.partition("=") for part in parts]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError("must be key=value, with commas between them, or a JSON object")
        return {key.strip(): text.strip() for key, _, text in pairs}
    return parts


def _entries(value: object) -> object:
    """A table of entries; a list of names becomes a table of empty tables."""
    match _read(value):
        case Mapping() as table:
            return dict(table)
        case list() | tuple() as names if all(isinstance(name, str) for name in names):
            return {name: {} for name in names}
    raise ValueError(_ENTRIES)


def _check_entry(name: str) -> str:
    if _ENTRY.fullmatch(name):
        return name
    raise ValueError('must have the form "package.module:factory"')


def _check_devices(names: tuple[str, ...]) -> tuple[str, ...]:
    if names and all(_DEVICE.fullmatch(name) for name in names):
        return names
    raise ValueError(_DEVICES)


def _check_hosts(names: tuple[str, ...]) -> tuple[str, ...]:
    if all(_HOST.fullmatch(name) for name in names):
        return tuple(name.lower() for name in names)
    raise ValueError(_HOSTS)


def _check_networks(names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(str(ip_network(name)) for name in names)
    except ValueError as error:
        raise ValueError(f"{_NETWORKS}; {error}") from None


def _check_users(names: tuple[str, ...]) -> tuple[str, ...]:
    if all(map(is_name, names)):
        return names
    raise ValueError(_USERS + NAME_RULE)


class EntrySettings(BaseModel):
    """What the operator says about one entry that jobs may name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fixed: dict[str, Any] = Field(default_factory=dict, description="must be a table of keyword arguments")
    """Parameters that the operator sets and clients cannot."""


_Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_read)]
DeviceNames = Annotated[_Texts, AfterValidator(_check_devices), Field(description=_DEVICES)]
HostNames = Annotated[_Texts, AfterValidator(_check_hosts), Field(description=_HOSTS)]
Networks = Annotated[_Texts, AfterValidator(_check_networks), Field(description=_NETWORKS)]
UserNames = Annotated[_Texts, AfterValidator(_check_users), Field(description=_USERS + NAME_RULE)]
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9-]{0,99}$", description=_HEADER)]
EntryTable = Annotated[
    dict[Annotated[str, AfterValidator(_check_entry)], EntrySettings],
    NoDecode,
    BeforeValidator(_entries),
    Field(min_length=1, description=_ENTRIES),
]
MemoryLimit = Annotated[dict[str, ByteCount], NoDecode, BeforeValidator(_table)]
Shares = Annotated[
    dict[str, Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]], NoDecode, BeforeValidator(_table)
]


# Texts and paths


def _check_secret(token: SecretStr) -> SecretStr:
    check_token(token.get_secret_value())
    return token


def _check_code_folder(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"must be the path of a folder with modules, and {path} is not a folder")
    if path.stat().st_mode & stat.S_IWOTH:
        raise ValueError(f"{path} holds code that is run, and everybody may write to it: chmod o-w it")
    return path


Token = Annotated[SecretStr, AfterValidator(_check_secret)]
CodeFolder = Annotated[Path, AfterValidator(_check_code_folder)]
