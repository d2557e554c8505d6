"""The files that predictions are made from: profiles as JSON, which ``asyncpipe profile`` writes, topologies as TOML.

A topology's file::

    [link]                              between any two hosts, unless [[links]] says otherwise
    latency = 2e-4                      seconds from the end of a message here to its end there
    bandwidth = 1.25e9                  bytes per second

    [inside]                            between two devices of a host, unless the host says otherwise
    latency = 2e-5
    bandwidth = 8e9

    [[hosts]]
    name = "host-a"
    devices = ["cuda:0", "cuda:1"]      they are called host-a/cuda:0 and host-a/cuda:1
    speeds = [1.0, 0.5]                 the second takes twice as long for the same task; by default 1
    inside = {bandwidth = 2e11}

    [[hosts]]
    name = "host-b"
    devices = ["cuda:0"]

    [[links]]
    hosts = ["host-a", "host-b"]
    latency = 5e-3
    bandwidth = 1e8
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from asyncpipe.core.predict.layer_profile import Profile
from asyncpipe.core.predict.topology import Host, NetworkLink, Topology
from asyncpipe.errors import ProfileError, TopologyError
from asyncpipe.train.validation import read_toml

__all__ = ["profile_document", "read_profile", "read_topology", "write_profile"]

FORMAT, VERSION = "asyncpipe-profile", 3


def profile_document(profile: Profile) -> dict[str, Any]:
    """``profile`` as plain data for ``json.dumps``."""
    document = asdict(profile)
    for row in document["measurements"].values():
        for speed in ("bandwidth", "adding", "host_bandwidth", "updating", "reducing"):  # JSON has no infinity.
            row[speed] = row[speed] if isfinite(row[speed]) else "inf"
    return {"format": FORMAT, "version": VERSION, **document}


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write ``profile`` as JSON; raises ``ProfileError`` if the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(profile_document(profile), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_profile(path: str | Path) -> Profile:
    """The profile in a file that ``write_profile`` wrote; raises ``ProfileError`` for any other file."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ProfileError(f"{path}: is not JSON: {error}") from error
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise ProfileError(f"{path}: is no profile; 'asyncpipe profile JOB.toml --output FILE' writes one")
    if (version := document.pop("version", None)) != VERSION:
        raise ProfileError(
            f"{path}: has version {version!r} of the format, this asyncpipe reads {VERSION}; measure again with "
            "'asyncpipe profile'"
        )
    try:
        return TypeAdapter(Profile).validate_python(document)
    except ValidationError as error:
        raise ProfileError(f"{path}: is damaged: {_told(error)}") from error


class _LinkTable(BaseModel, extra="forbid"):
    latency: float | None = None
    bandwidth: float | None = None

    def over(self, default: NetworkLink) -> NetworkLink:
        """The link that this table describes; what it does not say is that of ``default``."""
        return replace(default, **self.model_dump(include={"latency", "bandwidth"}, exclude_none=True))


class _HostsLinkTable(_LinkTable):
    hosts: tuple[str, str]


class _HostTable(BaseModel, extra="forbid"):
    name: str
    devices: tuple[str, ...]
    speeds: tuple[float, ...] = ()
    inside: _LinkTable | None = None


class _TopologyFile(BaseModel, extra="forbid"):
    hosts: list[_HostTable] = []
    link: _LinkTable = _LinkTable()
    inside: _LinkTable = _LinkTable()
    links: list[_HostsLinkTable] = []

    def topology(self) -> Topology:
        link, inside = self.link.over(NetworkLink()), self.inside.over(NetworkLink())
        links = {frozenset(row.hosts): row.over(link) for row in self.links}
        if len(links) < len(self.links):
            raise TopologyError("two of [[links]] are between the same hosts")
        hosts = [
            Host(row.name, row.devices, row.speeds, None if row.inside is None else row.inside.over(inside))
            for row in self.hosts
        ]
        return Topology(tuple(hosts), link, inside, links)


def read_topology(path: str | Path) -> Topology:
    """The topology in a TOML file; raises ``TopologyError``, which names the file, for any other."""
    tables = read_toml(Path(path), TopologyError)
    try:
        return _TopologyFile.model_validate(tables).topology()
    except ValidationError as error:
        raise TopologyError(f"{path}: {_told(error)}") from error
    except ValueError as error:
        raise TopologyError(f"{path}: {error}") from error


def _told(error: ValidationError) -> str:
    """The first thing that is wrong, and where."""
    wrong = error.errors()[0]
    place = ".".join(map(str, wrong["loc"]))
    return f"{place + ': ' if place else ''}{wrong['msg'].removeprefix('Value error, ')}, got {wrong['input']!r}"
