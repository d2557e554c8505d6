"""Folders for sockets: private, gone when they are removed, and gone after their maker was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncpipe.runtime.workers.held_folder import HeldFolder

PREFIX = "asyncpipe-held-"
MAKER = f"""
import sys, tempfile
tempfile.tempdir, sys.path[:] = {{place!r}}, {{path!r}}
from asyncpipe.runtime.workers.held_folder import HeldFolder
folder = HeldFolder({PREFIX!r})
open(folder.path + "/socket", "w").close()
print(folder.path, flush=True)
input()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def maker(place: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has made a folder."""
    code = MAKER.format(place=str(place), path=sys.path)
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        yield process
        process.kill()


def test_what_a_killed_process_has_left_is_removed_by_the_next_one(place: Path, maker: subprocess.Popen[str]) -> None:
    assert maker.stdout is not None
    path = maker.stdout.readline().strip()
    first = HeldFolder(PREFIX)
    assert os.stat(first.path).st_mode & 0o777 == 0o700
    assert os.path.exists(f"{path}/socket")  # Its maker lives.
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    second = HeldFolder(PREFIX)
    assert sorted(map(str, place.iterdir())) == sorted([first.path, second.path])
    for each in (first, second, second):
        each.remove()
    assert list(place.iterdir()) == []
