"""Offload in worker processes, and what is refused. ``tests/emulated/test_offload.py`` has the rest."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline
from asyncpipe.errors import OptionError, ScheduleError
from tests.support.own_memory import OWN_MEMORY, Layer

X = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def piped(model, offload, **options):
    how = {"microbatches": 8, "schedule": "gpipe", "checkpoint": "never", "loss_fn": nn.functional.mse_loss}
    return Pipeline(
        model,
        ["cpu:0", "cpu:1"],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        offload=offload,
        **(how | options),
    )


@pytest.mark.promise("Bit-identical results", "Gradients with `offload` are bit-identical to those without.")
@pytest.mark.timeout(120)
def test_each_worker_offloads_its_part(monkeypatch):
    """The workers' memory is taken for that of devices: tensors come back elsewhere, and weights are the same bits."""
    monkeypatch.setenv(OWN_MEMORY, "1")
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(4)])
    states = []
    for workers, offload in (("threads", None), ("processes", [1.0, 0.5])):
        with piped(copy.deepcopy(model), offload, workers=workers).sync() as pipe:
            for _ in range(2):
                pipe.step(X, X.flip(0))
            for result in pipe.steps([(X, X.flip(0))] * 2):
                result.wait()
            states.append(pipe.state_dict())
    plain, moved = states
    assert all(torch.equal(plain[name], moved[name]) for name in plain if not name.endswith("moved"))
    # By chance, one may come back to where it was.
    assert all(int(moved[f"{layer}.moved"]) > 0 for layer in range(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": 1.5}, "from 0 to 1"),
        ({"offload": [1.0]}, "a fraction for each of 2 stages"),
        ({"offload": "auto"}, "give a memory_limit and a sample"),
        ({"offload": 1.0, "order": "hint"}, "offload needs an ordered schedule"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises((OptionError, ScheduleError), match=message):
        piped(nn.Sequential(*[Layer() for _ in range(4)]), **options)
