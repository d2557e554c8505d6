"""How the values of a service's settings may be written, and what they must be. Every function raises ``ValueError``.

In the environment a list is a text with commas, a table is ``key=value`` with commas, and either may be JSON.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "check_code_folder",
    "devices",
    "entries",
    "entry_name",
    "hosts",
    "mapping",
    "no_flag",
    "or_none",
    "texts",
]

DEVICES = 'must be a list of device names, cpu, cpu:N, cuda or cuda:N, such as ["cpu:0", "cpu:1"]'
ENTRIES = 'must be a list of entries that jobs may name, or a table of them, as ["package.module:factory"]'
HOSTS = 'must be a list of host names without scheme and port, such as ["train.example.org"]'
MEMORY_LIMIT = 'must be a table of bytes by device, each at least 1, such as {"cuda:0" = "20 GiB"}'
ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
DEVICE = re.compile(r"(cpu|cuda)(:(\d|[1-9]\d|1[01]\d|12[0-7]))?", re.ASCII)
"""Above 127, torch takes an index for another one, without a word."""
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]", re.ASCII)


def no_flag(value: object) -> object:
    """``value``, unless it is true or false, which Python takes for a number."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def or_none(value: object) -> object:
    """``None`` for the text that stands for it, as TOML and the environment have no other; else ``no_flag``."""
    return None if value == "none" else no_flag(value)


def texts(value: object) -> object:
    """The list that a text of the environment stands for; anything else as it is."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return _json(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def mapping(value: object) -> object:
    """The table that a text of the environment stands for; anything else as it is."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        return _json(value)
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("must be key=value, with commas between them, or a JSON object")
    return {key.strip(): text.strip() for key, _, text in pairs}


def entries(value: object) -> object:
    """A table of entries; a list of names is one of empty tables."""
    if isinstance(value, str):
        value = _json(value) if value.lstrip().startswith(("[", "{")) else texts(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return {name: {} for name in value}
    raise ValueError(ENTRIES)


def entry_name(name: str) -> str:
    """``name``, if it has the form ``package.module:factory``."""
    if ENTRY.fullmatch(name):
        return name
    raise ValueError('must have the form "package.module:factory"')


def devices(names: tuple[str, ...]) -> tuple[str, ...]:
    """``names``, if each can be a device and there is one at least."""
    if names and all(DEVICE.fullmatch(name) for name in names):
        return names
    raise ValueError(DEVICES)


def hosts(names: tuple[str, ...]) -> tuple[str, ...]:
    """``names`` in lower case, if each is a bare host name or address."""
    if all(HOST.fullmatch(name) for name in names):
        return tuple(name.lower() for name in names)
    raise ValueError(HOSTS)


def check_code_folder(path: Path) -> None:
    """Refuse what is no folder, or one whose code anybody could replace."""
    if not path.is_dir():
        raise ValueError(f"must be the path of a folder with modules, and {path} is none")
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH:
        raise ValueError(f"{path} holds code that is run, and everybody may write to it: chmod o-w it")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not the JSON that it looks like: {error}") from None
