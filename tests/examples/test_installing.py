"""Nothing says to install the index's ``asyncpipe``, another project, and nothing is imported beside it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from asyncpipe.errors import missing_package

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "docker", "dashboards")
PAGES = ["README.md", "CHANGELOG.md", "ARCHITECTURE.md", "Makefile", "pyproject.toml", "constraints.txt", ".ci/run"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

INSTALL = re.compile(r"\bpip3? install((?:[ \t]+[^\s#`;()]+)*)")
EXTRAS = re.compile(r"(?:\.|asyncpipe-torch|\S+\.whl)\[([^{}]+)\].*")
STRANGER = re.compile(r"asyncpipe(\[.*\])?([=<>!~@].*)?")


def texts() -> dict[str, str]:
    """What a reader can see: whole pages, and the strings of the package, with ``{…}`` for what is filled in."""
    files = [ROOT / name for name in PAGES]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    pages = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8", errors="ignore") for path in files}
    for path in (ROOT / "asyncpipe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "{…}" for part in node.values)
                pages[f"{path.relative_to(ROOT)}:{node.lineno}, filled in"] = "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                pages[f"{path.relative_to(ROOT)}:{node.lineno}:{node.col_offset}"] = node.value
    return pages


def installs(text: str) -> list[list[str]]:
    """The arguments of each ``pip install`` in ``text``."""
    lines = text.replace("\\\n", " ")
    return [[word.strip("'\"") for word in found.split()] for found in INSTALL.findall(lines)]


def strangers(text: str) -> list[str]:
    return [word for words in installs(text) for word in words if STRANGER.fullmatch(word)]


def test_no_text_installs_the_stranger():
    pages = texts()
    assert {name: found for name, text in pages.items() if (found := strangers(text))} == {}
    assert sum(len(installs(text)) for text in pages.values()) >= 10


def test_every_extra_that_is_installed_exists():
    named = [
        extra
        for text in texts().values()
        for words in installs(text)
        for word in words
        if (found := EXTRAS.fullmatch(word))
        for extra in found[1].split(",")
    ]
    assert set(named) >= {"cli", "service", "otel", "dev"}
    assert set(named) <= set(PROJECT["optional-dependencies"])


def test_every_extra_that_an_error_names_exists():
    calls = [
        node
        for path in (ROOT / "asyncpipe").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == missing_package.__name__
    ]
    extras = {ast.literal_eval(call.args[1]) for call in calls}
    assert extras == {"cli", "client", "datasets", "mlflow", "service", "tensorboard", "otel", "ray", "transformers"}
    assert extras <= set(PROJECT["optional-dependencies"])
    assert str(missing_package("tables need rich", "cli")) == (
        "tables need rich; to install it, in a checkout of asyncpipe: pip install -e '.[cli]'"
    )


def test_the_page_of_installing_names_every_extra():
    table = (ROOT / "docs" / "start.md").read_text(encoding="utf-8").split("| extra |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`(?=[^|]*\|[^|]*\|$)", table, re.MULTILINE)) == sorted(
        PROJECT["optional-dependencies"]
    )


@pytest.mark.parametrize("path", ["pyproject.toml", "examples/custom_schedule/pyproject.toml"])
def test_no_requirement_is_the_stranger(path):
    project = tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).values()
    required = [*project["dependencies"], *chain.from_iterable(extras)]
    assert PROJECT["name"] == "asyncpipe-torch"
    assert [line for line in (project["name"], *required) if STRANGER.fullmatch(line)] == []


def test_not_imported_beside_the_stranger(tmp_path):
    (tmp_path / "asyncpipe.py").write_text("raise SystemExit('the stranger ran')\n", encoding="utf-8")
    program = f"import sys; sys.path.append({str(tmp_path)!r}); import asyncpipe"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=50)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {tmp_path / 'asyncpipe.py'} is another project's module with the name asyncpipe: remove it "
        "(pip uninstall asyncpipe) to use this one, which pip knows as asyncpipe-torch"
    )
