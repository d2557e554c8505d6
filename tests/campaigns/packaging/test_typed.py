"""The public names have types that a program can rely on: ``typed_program.py`` passes mypy's strict mode, and runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

PROGRAM = Path(__file__).parent / "typed_program.py"
ROOT = PROGRAM.parents[3]


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("by", [["-m", "mypy", "--strict"], []], ids=["mypy", "run"])
def test_a_program_that_uses_the_public_names(by: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *by, str(PROGRAM)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
