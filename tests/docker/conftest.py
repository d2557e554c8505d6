"""Dockerfile, .dockerignore and compose files as data, and a folder that has what an image would have.

There is no engine here. What an engine would do with the files is done by hand as far as tests need it: stages are
followed to their base, copies are laid out in a folder that stands for the image's root, and mounts likewise.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@dataclass
class Image:
    """What the instructions of a Dockerfile come to, from the base to one target."""

    base: str
    workdir: str = "/"
    user: str = "root"
    environment: dict[str, str] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)
    """Source in the repository, destination in the image."""
    order: list[str] = field(default_factory=list)
    """Each ``RUN`` and ``COPY`` in its order, as it stands in the file."""

    def lay_out(self, folder: Path) -> None:
        """Make ``folder`` the image's root, with what is copied into it and nothing else."""
        for source, destination in self.copies:
            target = folder / destination.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=_ignored_in_copies)
            else:
                shutil.copy(ROOT / source, target)
        (folder / self.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)


def _ignored_in_copies(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if is_ignored((Path(folder) / name).relative_to(ROOT).as_posix())}


# The Dockerfile


def parse_dockerfile(text: str) -> list[tuple[str, str]]:
    """Instructions and what follows them, continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    instructions = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(keyword.upper(), rest.strip()) for keyword, _, rest in instructions]


def read_image(target: str) -> Image:
    """The image that ``--target target`` builds."""
    defaults: dict[str, str] = {}
    images: dict[str, Image] = {}
    image: Image | None = None
    for keyword, value in parse_dockerfile((ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")):
        if keyword == "FROM":
            base, _, name = Template(value).substitute(defaults).partition(" AS ")
            known = images.get(base)
            image = Image(base) if known is None else _copy_of(known)
            images[name] = image
        elif image is None:
            name, _, default = value.partition("=")
            defaults[name] = default
        else:
            _apply(image, keyword, value)
    return images[target]


def _copy_of(image: Image) -> Image:
    return Image(**json.loads(json.dumps(image.__dict__)))


def _apply(image: Image, keyword: str, value: str) -> None:
    match keyword:
        case "WORKDIR":
            image.workdir = value
        case "USER":
            image.user = value
        case "EXPOSE":
            image.ports.append(int(value))
        case "ENV":
            image.environment |= dict(pair.split("=", 1) for pair in shlex.split(value))
        case "HEALTHCHECK":
            image.healthcheck = json.loads(value.partition(" CMD ")[2] or value.removeprefix("CMD "))
        case "ENTRYPOINT":
            image.entrypoint = json.loads(value)
        case "CMD":
            image.command = json.loads(value)
        case "COPY":
            image.order.append(f"COPY {value}")
            *sources, destination = [word for word in value.split() if not word.startswith("--")]
            for source in sources:
                # Into a folder when the destination ends with a slash, else under its own name.
                name = PurePosixPath(source).name if destination.endswith("/") else ""
                image.copies.append((source, str(PurePosixPath(image.workdir, destination, name))))
        case "RUN":
            image.order.append(f"RUN {value}")
        case "ARG":
            pass
        case _:
            raise AssertionError(f"the tests do not know {keyword}")


# .dockerignore


def is_ignored(path: str) -> bool:
    """Whether the builder never sees ``path`` (relative to the root): the last pattern that fits decides."""
    ignored = False
    for pattern in _ignore_patterns():
        if _fits(path, pattern.lstrip("!")):
            ignored = not pattern.startswith("!")
    return ignored


def _ignore_patterns() -> Iterator[str]:
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            yield line.strip()


def _fits(path: str, pattern: str) -> bool:
    """Whether ``pattern`` is ``path`` or a folder above it; ``*`` stays in a folder, ``**`` is any number of them."""
    expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    return re.fullmatch(f"{expression}(/.*)?", path) is not None


# Compose files


def merged(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``override`` laid over it as Compose does it for what these files have: lists replace lists."""
    result = dict(base)
    for key, value in override.items():
        known = result.get(key)
        result[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


def read_yaml(path: str) -> Any:
    """The YAML file at ``path`` in the folder ``docker``."""
    return yaml.safe_load((ROOT / "docker" / path).read_text(encoding="utf-8"))


def find_tool(name: str) -> str | None:
    """The command ``name``, next to the running interpreter or on ``PATH``."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@pytest.fixture(scope="session")
def image() -> Callable[[str], Image]:
    return read_image


@pytest.fixture(scope="session")
def ignored() -> Callable[[str], bool]:
    return is_ignored


@pytest.fixture(scope="session")
def compose() -> Any:
    return read_yaml("compose.yaml")


@pytest.fixture(scope="session")
def compose_cuda() -> Any:
    return merged(read_yaml("compose.yaml"), read_yaml("compose.cuda.yaml"))


@pytest.fixture(scope="session")
def in_docker() -> Callable[[str], Any]:
    """Reads a YAML file of the folder ``docker``."""
    return read_yaml


@pytest.fixture
def tool() -> Callable[[str, str], str]:
    """The path of a command; skips the test where it is not installed, saying what to install."""

    def find(name: str, package: str) -> str:
        found = find_tool(name)
        if found is None:
            pytest.skip(f"needs {name}: {package}")
        return found

    return find


@pytest.fixture
def mounts(compose: Any) -> Callable[[str, Path], None]:
    """Lays the bind mounts of a service out in a folder that stands for its container's root."""

    def lay_out(service: str, folder: Path) -> None:
        for volume in compose["services"][service]["volumes"]:
            if isinstance(volume, dict):
                source, target = ROOT / "docker" / volume["source"], folder / volume["target"].lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)

    return lay_out
