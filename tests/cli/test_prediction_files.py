"""Files of profiles and topologies: what was written is read back, and what is wrong in one is said with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.cli.prediction_files import profile_document, read_profile, read_topology, write_profile
from asyncpipe.core.predict.layer_profile import (
    CALLER,
    LayerCosts,
    Measurement,
    Profile,
    ProfiledLayer,
    SentTensor,
    TiedTensor,
)
from asyncpipe.core.predict.topology import NetworkLink, Topology
from asyncpipe.errors import ProfileError, TopologyError

LAYERS = tuple(LayerCosts(1.0, 1.0, 1.5, 4.0, 3.0, 2.0, 20) for _ in range(3))
MEASURED = Measurement(LAYERS, {"F": 0.5, "B": 1.0}, step=0.5, latency=0.25, bandwidth=80.0)
PROFILE = Profile(
    layers=tuple(ProfiledLayer(name, 100, 40) for name in "abc"),
    links=((0, 1), (0, 2), (1, 2)),
    measurements={4: replace(MEASURED, sent=(SentTensor(CALLER, (0, 1), 8, (0,), 0),)), 16: replace(MEASURED)},
    devices=("cpu:0", "cpu:1"),
    ties=(TiedTensor((0, 2), 100, trained=True),),
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    endless = replace(PROFILE, measurements={4: replace(MEASURED, bandwidth=inf)})
    for each in (PROFILE, endless):
        write_profile(each, tmp_path / "profile.json")
        assert read_profile(tmp_path / "profile.json") == each
    assert "Infinity" not in json.dumps(profile_document(endless))


def put(document: Any, place: str, value: object) -> None:
    """Set what is at ``place``, words separated by dots; ``None`` removes it."""
    *path, last = [
        int(word) if word.isdigit() and len(word) == 1 and word != "4" else word for word in place.split(".")
    ]
    for word in path:
        document = document[word]
    if value is None:
        del document[last]
    else:
        document[last] = value


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("measurements.4.step", -1.0, "is damaged: measurements.4.step: Input should be greater than or equal to 0"),
        ("measurements.4.layers.0.forward", "fast", "measurements.4.layers.0.forward: Input should be .*, got 'fast'"),
        ("layers.1.trained", None, "is damaged: layers.1.trained: Field required"),
        ("layers.2", None, "is damaged: links must join 2 layers, from earlier to later ones"),
        ("measurements.4.layers.2", None, "is damaged: 2 layers were measured, 3 are listed"),
        ("links", [(1, 0)], r"links must join 3 layers, from earlier to later ones, got \[\(1, 0\)\]"),
        ("measurements.4.sent.0.users", [7], "a tensor travels between 3 layers and the caller"),
        ("ties.0.users", [1], "a tied parameter has several users among 3 layers"),
        ("version", 7, "has version 7 of the format, this asyncpipe reads 3"),
        ("format", "something else", "is no profile; 'asyncpipe profile"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path: Path, place: str, value: object, message: str) -> None:
    path = tmp_path / "profile.json"
    document = json.loads(json.dumps(profile_document(PROFILE)))
    put(document, place, value)
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ProfileError, match=message) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there_or_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        read_profile(tmp_path / "nothing.json")
    with pytest.raises(TopologyError, match=r"none\.toml: cannot be read: No such file"):
        read_topology(tmp_path / "none.toml")
    (tmp_path / "text.json").write_text("F=1", encoding="utf-8")
    with pytest.raises(ProfileError, match="is not JSON"):
        read_profile(tmp_path / "text.json")
    with pytest.raises(ProfileError, match="cannot be written: No such file"):
        write_profile(PROFILE, tmp_path / "nowhere" / "profile.json")


HOSTS = """
[link]
latency = 0.5
bandwidth = 100

[inside]
bandwidth = 1e9

[[hosts]]
name = "a"
devices = ["cpu:0", "cpu:1"]
speeds = [1.0, 0.5]
inside = {latency = 0.25}

[[hosts]]
name = "b"
devices = ["cpu:0"]

[[links]]
hosts = ["b", "a"]
latency = 2
"""


def test_a_file_says_hosts_devices_and_links(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(HOSTS)
    found = read_topology(tmp_path / "hosts.toml")
    assert found.devices == ("a/cpu:0", "a/cpu:1", "b/cpu:0")
    assert [*found.speeds.values()] == [1.0, 0.5, 1.0]
    assert found.route("a/cpu:1", "a/cpu:0") == (("a/cpu:1", "a/cpu:0"), NetworkLink(0.25, 1e9))
    assert found.route("b/cpu:0", "a/cpu:0") == (("b", "a"), NetworkLink(2, 100))
    assert found.ordered(["b"]) == Topology(found.hosts[1:], found.link, found.inside)
    assert found.ordered(["b", "a"]).devices == ("b/cpu:0", "a/cpu:0", "a/cpu:1")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("latency = 0.5", "latency = -1", "latency must be finite seconds, zero or more, got -1"),
        ("bandwidth = 100", "bandwidth = 0", "bandwidth must be more than 0 bytes per second, got 0"),
        ("bandwidth = 100", "width = 7", "link.width: Extra inputs are not permitted, got 7"),
        ("speeds = [1.0, 0.5]", "speeds = [1.0]", "speeds of host 'a' must be one a device, 2, got 1"),
        ("speeds = [1.0, 0.5]", "speeds = [1.0, 0]", "a speed of host 'a' must be finite and more than 0, got 0"),
        ('name = "b"', 'name = "a"', "hosts must be a list of different names"),
        ('name = "b"', 'name = "b/c"', "a host needs a name without '/', got 'b/c'"),
        ('devices = ["cpu:0"]', "devices = []", "devices of host 'b' must be a list of different names"),
        ('devices = ["cpu:0"]', 'devices = "cpu:0"', "hosts.1.devices: Input should be a valid tuple, got 'cpu:0'"),
        ('hosts = ["b", "a"]', 'hosts = ["b", "x"]', "a link joins two of the hosts a, b, got b and x"),
        ("[[hosts]]", "[hosts", "is not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(HOSTS.replace(old, new, 1))
    with pytest.raises(TopologyError, match=r"hosts\.toml: ") as raised:
        read_topology(path)
    assert message in str(raised.value)
