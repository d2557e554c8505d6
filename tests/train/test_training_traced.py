"""A run of a traced model: what its entry draws and traces is the same alone and among others.

torch keeps tensors of what it traced, so the fixture that finds leaks is left out here.
"""

from __future__ import annotations

import torch
from resume_helpers import batches
from run_helpers import Told, assert_same_end, beside_others, job_of
from torch import Tensor, nn
from torch.nn import functional

from asyncpipe import Arguments, trace
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Workload


def traced() -> Workload:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.drop, self.two = nn.Linear(3, 16), nn.Dropout(0.4), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.two(self.drop(self.one(x)))
            return result

    model = trace(Chain().double(), Arguments((torch.randn(2, 3, dtype=torch.float64),), {}), ["two"])
    return Workload(model, functional.mse_loss, batches)  # type: ignore[arg-type]


async def test_a_traced_model_among_others_has_the_bits_that_it_has_alone(tmp_path):
    alone, among = Told(), Told()
    one = await TrainingRun(job_of(tmp_path / "alone"), traced, progress=alone).run()
    other = await beside_others(job_of(tmp_path / "among"), traced, among, tmp_path)
    assert among.losses == alone.losses
    assert_same_end(other.snapshot, one.snapshot)
    again = Told()
    await TrainingRun(job_of(tmp_path / "again", seed=4), traced, progress=again).run()
    assert again.losses != alone.losses
