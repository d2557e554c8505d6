"""The seven examples: how large they may be, and that the small ones compute what the unsplit model computes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SEVEN = {
    *("custom_schedule", "deadline_policy", "embedded_service", "finetune"),
    *("first_steps", "replicas_on_hosts", "vision"),
}
TRAINED = "charlm"
"""What ``make train`` trains: a job and its model, which is no example."""


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


def test_there_are_seven_of_at_most_eighty_lines():
    folders = {path.parent.relative_to(EXAMPLES).parts[0] for path in EXAMPLES.rglob("*.py")}
    assert folders == SEVEN | {TRAINED}
    lines = {
        name: sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (EXAMPLES / name).rglob("*.py"))
        for name in SEVEN
    }
    assert {name: count for name, count in lines.items() if count > 80} == {}


def test_the_page_has_all_of_them():
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\[`examples/(\w+)`\]\(\.\./examples/\w+\)$", page, re.MULTILINE)) == SEVEN
    assert {path.split("/")[1] for path in re.findall(r"^<!-- code: (\S+) -->$", page, re.MULTILINE)} == SEVEN


def test_first_steps_train_as_the_unsplit_model_does(monkeypatch, capsys):
    example = loaded("first_steps", monkeypatch)
    losses = example.main(steps=8)
    assert "F forward, R recompute, B backward" in capsys.readouterr().out
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    assert losses == pytest.approx([unsplit_step(model, optimizer, *batch) for batch in example.batches(8)], abs=1e-5)


def unsplit_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, target: torch.Tensor) -> float:
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_the_vision_model_trains_as_the_unsplit_one_does(monkeypatch, tmp_path):
    for needed in ("sklearn", "torchvision"):
        pytest.importorskip(needed)
    example = loaded("vision", monkeypatch)
    monkeypatch.setattr(example, "HELD_OUT", 1597)  # 200 images to train with
    losses, (accuracy,) = example.main(tmp_path, epochs=1)
    images, labels = example.digits()
    model = example.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    wanted = []
    for chosen in torch.randperm(200, generator=torch.Generator().manual_seed(0)).split(64):
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted, abs=1e-4)
    saved = example.make_model()
    saved.load_state_dict(torch.load(tmp_path / "weights.pt"))
    right = (saved.eval()(images[-1597:]).argmax(dim=1) == labels[-1597:]).float().mean().item()
    assert accuracy == pytest.approx(right, abs=2e-3)


@pytest.mark.timeout(120)
def test_replicas_on_hosts_train_as_the_unsplit_model_does(monkeypatch, tmp_path):
    """By torchrun, as a person starts them: a controller and the agents of two hosts, all on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", str(port)]
    script = str(EXAMPLES / "replicas_on_hosts" / "replicas_on_hosts.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    example = loaded("replicas_on_hosts", monkeypatch)
    model = example.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = [unsplit_step(model, optimizer, *batch) for batch in example.batches(20)]
    assert [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)] == pytest.approx(
        wanted, abs=1e-4
    )
    for name, value in torch.load(tmp_path / "weights.pt").items():
        torch.testing.assert_close(value, model.state_dict()[name], atol=1e-4, rtol=0)
