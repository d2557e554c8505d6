"""The campaign of tensor parallelism inside a stage computes what the unsplit model computes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "tensor_parallel.py"


@pytest.mark.promise(
    "Right results", "Stages that shard themselves have the numbers of the unsplit stages within 1e-10."
)
@pytest.mark.long
@pytest.mark.timeout(120)
def test_losses_and_weights_are_those_of_the_unsplit_model() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    *steps, apart = done.stdout.splitlines()
    assert len(steps) == 5
    losses, weights = map(float, re.findall(r"\d+\.\de[-+]\d+", apart))
    assert max(losses, weights) < 1e-10
