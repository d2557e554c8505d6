"""The example of a plug-in is installed as a package of its own, found by its entry point, seen and trained with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_schedule"
Run = Callable[..., str]

TRAIN = """
import torch
from torch import nn
from asyncpipe import Pipeline

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

x, target = torch.randn(8, 6, dtype=torch.double), torch.randn(8, 4, dtype=torch.double)
bare, ours, mse = model(), model(), nn.functional.mse_loss
mse(bare(x), target).backward()
for schedule in ("varuna", "varuna_schedule:Varuna"):
    with Pipeline(ours, ["cpu:0", "cpu:1", "cpu:2"], microbatches=4, schedule=schedule, loss_fn=mse).sync() as pipe:
        kinds = {time.task.kind for time in pipe.step(x, target).wait().report.tasks}
    assert {"I", "W"} <= kinds and "B" not in kinds, kinds
    print(max((a.grad - b.grad).abs().max().item() for a, b in zip(ours.parameters(), bare.parameters())))
    ours.zero_grad()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run Python in an environment that has the package; give back what it prints."""
    folder = tmp_path_factory.mktemp("installed")
    # A copy: the build writes into the folder.
    source = folder / "source"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)
    target = folder / "site"
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, *pip, "--target", str(target), str(source)], check=True, timeout=50)

    def call(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(target)}
        done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_it_is_listed_and_shown(run: Run) -> None:
    listed = run("-m", "asyncpipe", "schedule", "list")
    assert "varuna" in listed
    assert "Finish before you begin" in listed
    shown = run("-m", "asyncpipe", "schedule", "show", "varuna", "--stages", "3", "--microbatches", "4")
    assert shown.startswith("varuna: 3 stages on 3 devices")
    assert "W0" in shown


def test_it_is_simulated_within_its_cap(run: Run) -> None:
    options = "varuna --stages 4 --microbatches 8 --costs F=1,I=1,W=1,C=0 --json"
    figures = json.loads(run("-m", "asyncpipe", "simulate", *options.split()))
    assert max(figures["peak"]) == 4
    assert figures["makespan"] >= 8 * 3 + 3


def test_it_trains(run: Run) -> None:
    errors = [float(line) for line in run("-c", TRAIN).splitlines()]
    assert len(errors) == 2
    assert max(errors) < 1e-10
