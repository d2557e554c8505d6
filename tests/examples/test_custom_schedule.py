"""The example of a plug-in is installed as a package of its own, found by its entry point, seen and trained with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncpipe.cli import main

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


def test_it_is_listed_shown_and_simulated_within_its_cap(run: Run) -> None:
    listed = run("-m", "asyncpipe", "schedule", "list")
    assert "varuna" in listed
    assert "A rule that runs W before I before F" in listed
    shown = run("-m", "asyncpipe", "schedule", "show", "varuna", "--stages", "3", "--microbatches", "4")
    assert shown.startswith("varuna: 3 stages on 3 devices")
    assert "W0" in shown
    options = "varuna --stages 4 --microbatches 8 --costs F=1,I=1,W=1,C=0 --json"
    figures = json.loads(run("-m", "asyncpipe", "simulate", *options.split()))
    assert max(figures["peak"]) == 4
    assert figures["makespan"] >= 8 * 3 + 3


def test_it_needs_no_entry_point_in_its_own_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLE)
    before = list(sys.path)
    assert main(["schedule", "show", "varuna_schedule:Varuna", "--stages", "2", "--microbatches", "2"]) == 0
    assert "varuna: 2 stages" in capsys.readouterr().out
    assert sys.path == before
    sys.modules.pop("varuna_schedule")


def test_it_trains(run: Run) -> None:
    errors = [float(line) for line in run("-c", TRAIN).splitlines()]
    assert len(errors) == 2
    assert max(errors) < 1e-10


MODULE = """
import torch
from torch import nn
from asyncpipe import RuledSchedule, TaskKind
from asyncpipe.train.workload import Workload

def build():
    def batches(batch_size, generator):
        while True:
            x = torch.randn(batch_size, 4, generator=generator)
            yield x, x
    return Workload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.functional.mse_loss, batches)

class Mine(RuledSchedule):
    name = "mine, next to the job"
    def priority(self, action, shape):
        return action.kind is TaskKind.FORWARD

class Broken(Mine):
    name = "broken"
    def priority(self, action, shape):
        raise KeyError("oh")
"""

JOB = """
name = "next"
[job]
entry = "next_to_it:build"
[pipeline]
devices = ["cpu:0", "cpu:1"]
schedule = "next_to_it:SCHEDULE"
microbatches = 2
[training]
steps = 2
batch_size = 4
learning_rate = 1e-2
"""


@pytest.mark.parametrize(
    ("schedule", "status", "told"),
    [
        ("Mine", 0, "step"),
        ("Broken", 2, "pipeline: schedule 'broken': priority of F(0,0) raised KeyError: 'oh'"),
        ("Missing", 2, "pipeline: schedule 'next_to_it:Missing' cannot be imported: AttributeError"),
    ],
)
def test_a_job_file_takes_a_schedule_from_next_to_it(
    schedule: str, status: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "next_to_it.py").write_text(MODULE, encoding="utf-8")
    job = tmp_path / "job.toml"
    job.write_text(JOB.replace("SCHEDULE", schedule), encoding="utf-8")
    try:
        assert main(["train", str(job)]) == status
    finally:
        sys.modules.pop("next_to_it", None)
    assert told in "".join(capsys.readouterr())
