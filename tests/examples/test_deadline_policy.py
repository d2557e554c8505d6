"""The example of a policy: on virtual time, and with two models that train on one pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import nn

from asyncpipe import Costs, DevicePool, Pipeline, Shape, Share, SimulatedJob, find_schedule, lower, simulate_jobs

EXAMPLE = Path(__file__).parents[2] / "examples" / "deadline_policy"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


def test_the_urgent_job_goes_first_on_every_lane() -> None:
    from deadline_policy import by_deadline

    graph = lower(find_schedule("1f1b"), Shape(2, 8, 2))
    alone = simulate_jobs([SimulatedJob(graph, Costs(1, 2), Share("urgent"), steps=3)])
    jobs = [
        SimulatedJob(graph, Costs(1, 2), Share("nightly"), steps=8),
        SimulatedJob(graph, Costs(1, 2), Share("urgent"), steps=3),
    ]
    ends = {}
    for name, policy in (("fair", None), ("deadline", by_deadline(urgent=1.0, nightly=6.0))):
        ends[name] = simulate_jobs(jobs, policy=policy)[1].records[-1].journal[-1][0]
    undisturbed = alone[0].records[-1].journal[-1][0]
    assert ends["fair"] == pytest.approx(2 * undisturbed, rel=0.1)
    assert ends["deadline"] < 1.4 * undisturbed, "it waits for what the device holds, and for no more"


@pytest.mark.parametrize("schedule", ["1f1b", "backward-first"])
async def test_gradients_are_those_of_the_unsplit_models(schedule: str, no_leaks: None) -> None:
    from deadline_policy import by_deadline

    x, target = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    async with DevicePool(policy=by_deadline(urgent=1.0, nightly=6.0)) as pool:

        async def train(name: str) -> None:
            torch.manual_seed(len(name))
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
            nn.functional.mse_loss(model(x), target).backward()
            wanted = [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
            options = {"microbatches": 4, "schedule": schedule, "loss_fn": nn.functional.mse_loss}
            async with Pipeline(model, ["cpu:0", "cpu:1"], pool=pool, share=Share(name), **options) as pipe:
                for _ in range(3):
                    model.zero_grad()
                    await pipe.step(x, target)
            for parameter, gradient in zip(model.parameters(), wanted, strict=True):
                assert torch.allclose(parameter.grad, gradient, atol=1e-10, rtol=0)

        await asyncio.gather(train("urgent"), train("nightly"))
