"""The loops of ``docs/training-loop.md``: each runs, all have the same losses, and the page shows how they differ."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOPS = Path(__file__).parent / "loops"
PAGE = ROOT / "docs" / "training-loop.md"
NAMES = ["plain", "accelerate", "torchgpipe", "pipelining", "deepspeed"]


def losses(text: str) -> list[str]:
    return re.findall(r"^loss (.*)$", text, flags=re.MULTILINE)


def ran(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.syspath_prepend(str(LOOPS))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(LOOPS / f"{name}.py"), run_name="__main__")
    return losses(said.getvalue())


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_how_a_loop_changes(name: str) -> None:
    before, after = ((LOOPS / f"{name}_{each}.py").read_text().splitlines() for each in ("before", "after"))
    lines = list(difflib.unified_diff(before, after, n=99, lineterm=""))[3:]
    assert "```diff\n" + "\n".join(line.rstrip() for line in lines) + "\n```" in PAGE.read_text()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "pipelining"])
def test_a_changed_loop_has_the_losses_of_the_plain_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ran(f"{name}_after", monkeypatch)
    assert len(found) == 4
    assert found == ran("plain_before", monkeypatch)


def test_accelerates_loop_has_them_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    assert ran("accelerate_before", monkeypatch) == ran("plain_before", monkeypatch)


@pytest.mark.long
def test_loops_in_two_processes_have_them_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = (["-m", "torch.distributed.run", "--nproc-per-node", "2", "pipelining_before.py"], ["pipelining_after.py"])
    for way in ways:
        ended = subprocess.run([sys.executable, *way], cwd=LOOPS, capture_output=True, text=True, check=True)
        assert losses(ended.stdout) == ran("plain_before", monkeypatch)


def test_torchgpipes_loop_runs_where_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchgpipe")
    assert ran("torchgpipe_before", monkeypatch) == ran("plain_before", monkeypatch)
