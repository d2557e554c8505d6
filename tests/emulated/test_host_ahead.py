"""The host runs ahead of a slow device: what memory that takes, by how many tasks may be in flight."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import nn

from asyncpipe.core.engine.events import TaskCompleted, TaskIssued
from asyncpipe.core.predict.memory import StageMemory, peak_memory
from asyncpipe.runtime import driver
from tests.emulated import device as emu
from tests.emulated.helpers import piped
from tests.emulated.test_offload import COLUMNS, PIECE, ROWS, Scaled, _apart  # noqa: F401 - a fixture

DEVICES, PIECES = 4, 16
X = torch.randn(PIECES * ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
SLOW = 2e-3
"""Seconds of a kernel: more than ten times what the host takes to queue it."""


def peaks(in_flight, checkpoint, layers=1):
    """Of each device: the most tasks ahead, the peak of a step and the predicted one, in tensors of a micro-batch."""
    model = nn.Sequential(*[Scaled(k / 8) for k in range(DEVICES * layers)])
    options = {"microbatches": PIECES, "checkpoint": checkpoint, "in_flight": in_flight}
    with piped(model, ["emu:0"] * DEVICES, balance=[layers] * DEVICES, **options) as pipe:
        pipe.step(X, X.flip(0), return_outputs=False).wait()
        emu.forget_peak()
        emu.cost(SLOW)
        record = pipe.step(X, X.flip(0), return_outputs=False).wait().record
        emu.cost(0)
    kept = 2 * layers + 1
    sizes = StageMemory([kept * PIECE] * DEVICES, [PIECE] * DEVICES, [0] * DEVICES)
    found = [emu.peak[name] / PIECE for name in record.graph.devices]
    return ahead(record), found, [each / PIECE for each in peak_memory(record, sizes)]


def ahead(record):
    """By device, the most tasks that were issued and had not ended."""
    most = []
    for device in record.graph.devices:
        here = {task.number for task in record.graph.tasks if task.lane.device == device}
        issued = [(at, 1) for at, e in record.journal if isinstance(e, TaskIssued) and e.task in here]
        ended = [(e.ended, -1) for _, e in record.journal if isinstance(e, TaskCompleted) and e.task in here]
        most.append(max(accumulate(change for _, change in sorted(issued + ended))))
    return most


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_memory_that_other_streams_have_read_stays_within_the_plan(monkeypatch, checkpoint):
    """A few tensors that tasks need while they run are beside it, and one for each task ahead."""
    monkeypatch.setattr(driver, "AHEAD_SECONDS", 0.0)
    tasks, found, predicted = peaks(16, checkpoint)
    assert max(tasks) <= driver.LEAST_AHEAD
    assert sum(found) <= sum(predicted) + 7 * DEVICES, (found, predicted)
