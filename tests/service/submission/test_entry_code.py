"""Entries are pinned by content: what counts, and what is said of a change."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.entry_code import EntryCode, changed_files
from asyncpipe.train import transformers_entry


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An entry with a module beside it, a package, and one that it does not import."""
    (tmp_path / "pinned_parts").mkdir()
    texts = {"pinned": "import torch\nimport pinned_data\n\ndef build():\n    from pinned_parts.late import x\n"}
    texts |= {"pinned_data": "size = 1\n", "pinned_parts/__init__": "", "pinned_parts/late": "x = 2\n", "other": ""}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("pinned")
    for name in [name for name in sys.modules if name.startswith("pinned")]:
        del sys.modules[name]


def names_of(code: str | None) -> list[str]:
    return sorted(line.split()[1] for line in (code or "").splitlines()[1:])


def test_what_an_entry_imports_from_its_folder_counts_and_nothing_else(tmp_path: Path, module: ModuleType) -> None:
    code = EntryCode(module)
    first = code.now() or ""
    assert names_of(first) == ["pinned.py", "pinned_data.py", "pinned_parts/__init__.py", "pinned_parts/late.py"]
    assert code.imported == first
    (tmp_path / "other.py").write_text("changed")
    os.utime(tmp_path / "pinned.py", ns=(1, 1))
    assert code.now() == first, "a file that was only touched is the same"
    (tmp_path / "pinned_parts" / "late.py").write_text("x = 3\n")
    now = code.now() or ""
    assert changed_files(first, now) == ["pinned_parts/late.py"]
    assert now.splitlines()[0] != first.splitlines()[0]
    assert EntryCode(module).imported == first, "a module that was imported stays as it was, whoever looks later"
    (tmp_path / "pinned_data.py").unlink()
    assert changed_files(now, code.now()) == ["pinned_data.py"]
    (tmp_path / "pinned.py").write_text("def build(:\n")
    assert "pinned.py" in changed_files(now, code.now())


def test_folders_without_an_init_file_are_packages_or_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pinned_space" / "pinned_rows").mkdir(parents=True)
    text = "try:\n    import pinned_rows\nexcept ImportError:\n    pass\nfrom . import beside\nimport flat\n"
    for name, content in {"entry": text, "beside": "", "flat": ""}.items():
        (tmp_path / "pinned_space" / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path / "pinned_space")
    monkeypatch.syspath_prepend(tmp_path)
    code = EntryCode(import_module("pinned_space.entry")).now()
    assert names_of(code) == [f"pinned_space/{name}.py" for name in ("beside", "entry", "flat")]
    for name in ("pinned_space", "pinned_space.entry", "pinned_space.beside", "flat", "pinned_rows"):
        sys.modules.pop(name, None)


def test_of_installed_packages_the_version_counts_and_of_what_has_no_file_nothing() -> None:
    assert (EntryCode(torch.nn).now() or "").splitlines()[1:] == [f"{version('torch')[:12]} torch"]
    assert Entries({"tests:build": lambda: None}).code("tests:build") is None
    assert "py" not in str(EntryCode(transformers_entry).now()), "asyncpipe is not read file by file"
    assert changed_files(None, "a\nb c") == changed_files("a\nb c", None) == []
