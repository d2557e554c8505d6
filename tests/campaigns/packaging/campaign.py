"""The steps of the campaign. Each raises ``AssertionError`` or ``CalledProcessError`` where something is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from tests.campaigns.harness import Campaign, Run

__all__ = ["CAMPAIGN", "PROJECT", "ROOT", "package_files"]

ROOT = Path(__file__).parents[3]
EXTRAS = ("cli", "service")
LEFT_OUT = ("__pycache__", ".pyc")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


class Built:
    """The files of a folder ``dist``: one wheel and one sdist."""

    def __init__(self, folder: Path) -> None:
        (self.wheel,) = folder.glob("*.whl")
        (self.sdist,) = folder.glob("*.tar.gz")

    def in_wheel(self) -> set[str]:
        """The paths of the wheel's files."""
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def in_sdist(self) -> set[str]:
        """The paths of the sdist's files, below its one folder."""
        with tarfile.open(self.sdist) as archive:
            return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}

    def metadata(self) -> Message:
        """The wheel's METADATA."""
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
            return message_from_bytes(archive.read(name))


def package_files() -> set[str]:
    """What the package consists of: every file below ``asyncpipe/``."""
    every = (path.relative_to(ROOT).as_posix() for path in (ROOT / "asyncpipe").rglob("*") if path.is_file())
    return {path for path in every if not any(word in path for word in LEFT_OUT)}


def build(folder: Path) -> Built:
    """Build sdist and wheel of a copy of the working tree in ``folder``, by ``build`` in an environment of its own."""
    source, environment = folder / "source", folder / "builder"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, stdout=-1
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    python = _environment(environment)
    _run(python, "-m", "pip", "install", "--quiet", "build")
    _run(python, "-m", "build", "--outdir", str(folder / "dist"), str(source))
    return Built(folder / "dist")


def check_files(built: Built) -> None:
    """The wheel has the package, its licence and nothing else; the sdist has what builds, tests and explains it."""
    wheel, package = built.in_wheel(), package_files()
    assert package <= wheel, sorted(package - wheel)
    others = wheel - package
    assert all(".dist-info/" in name for name in others), sorted(others)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in others)
    sdist = built.in_sdist()
    wanted = package | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "docs/start.md", "tests/conftest.py"}
    assert wanted <= sdist, sorted(wanted - sdist)
    assert not [name for name in sdist if "__pycache__" in name or "node_modules" in name]


def check_metadata(metadata: Message) -> None:
    """The name, version, licence, extras and Python are those of ``pyproject.toml``."""
    assert (metadata["Name"], metadata["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert metadata["License-Expression"] == PROJECT["license"]
    assert metadata.get_all("License-File") == PROJECT["license-files"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert metadata.get_all("Classifier") == sorted(PROJECT["classifiers"])
    assert metadata["Description-Content-Type"] == "text/markdown"


def installed(folder: Path, torch: str) -> tuple[Path, str]:
    """The Python of an empty environment with ``torch``, a requirement such as ``torch==2.14.1``; and its version."""
    python = _environment(folder)
    _run(python, "-m", "pip", "install", "--quiet", torch)
    return python, _run(python, "-c", "import torch; print(torch.__version__)").strip()


def smoke(python: Path, wheel: Path, folder: Path, torch: str) -> str:
    """Install ``wheel`` where ``python`` is, bare and with extras, and use both from ``folder``; what was printed."""
    folder.mkdir()
    script = folder / "smoke.py"
    script.write_bytes((Path(__file__).parent / "smoke.py").read_bytes())
    printed = ""
    optional = [line for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra]]
    names = [re.split(r"[<>=]", requirement)[0] for requirement in optional]
    _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *names)  # an environment may be used again
    for extras in ("", ",".join(EXTRAS)):
        wanted = f"{wheel}[{extras}]" if extras else str(wheel)
        _run(python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel))
        _run(python, "-m", "pip", "install", "--quiet", wanted)
        printed += _run(python, "-I", "-W", "error::DeprecationWarning:asyncpipe", str(script), extras, cwd=folder)
        assert f"torch {torch}\n" in printed, "the installation has changed torch"
    return printed


def _environment(folder: Path) -> Path:
    """The Python of an environment in ``folder``, which is made where it does not exist."""
    python = folder / "bin" / "python"
    if not python.exists():
        _run(Path(sys.executable), "-m", "venv", str(folder))
    return python


def _run(python: Path, *arguments: str, cwd: Path | None = None) -> str:
    """What a command prints; its errors are shown."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    return subprocess.run([python, *arguments], check=True, stdout=-1, text=True, cwd=cwd, env=environment).stdout


def _work(run: Run) -> None:
    """Build, check, install, use."""
    options, folder = run.options, Path(tempfile.mkdtemp())
    built = build(folder)
    check_files(built)
    check_metadata(built.metadata())
    run.tell(f"{built.sdist.name} and {built.wheel.name}: {len(built.in_sdist())} and {len(built.in_wheel())} files")
    if options.dist:
        Path(options.dist).mkdir(parents=True, exist_ok=True)
        for file in (built.sdist, built.wheel):
            Path(options.dist, file.name).write_bytes(file.read_bytes())
    environment = Path(options.environment) if options.environment else folder / "environment"
    python, version = installed(environment, options.torch)
    run.tell(smoke(python, built.wheel, folder / "empty", version))


CAMPAIGN = Campaign(
    "packaging",
    _work,
    {
        "torch": ("torch", "the requirement of the other torch; by default the newest"),
        "environment": ("", "make, or use again, this environment"),
        "dist": ("", "keep what is built in this folder, which is empty"),
    },
)
