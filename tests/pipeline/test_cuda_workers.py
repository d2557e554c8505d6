"""Stages on CUDA devices in worker processes: two workers on one GPU, by its memory and the host's; NCCL on two."""

from __future__ import annotations

import asyncio
import copy
import os
import signal

import pytest
import torch
from torch import nn

from asyncpipe import DevicePool, Pipeline, TaskError
from asyncpipe.errors import OptionError, WorkerLostError

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(120)]
TWO_ON_ONE = {"cuda:0": "a", "cuda:0#1": "b"}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each worker")


class Tied(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return x.mean(1) @ self.weight.T


class Spread(nn.Module):
    """Its output has gaps."""

    def forward(self, x):
        return torch.cat([x, x], -1)[..., ::2]


class Dies(nn.Module):
    """In its third call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def make_model(width=8):
    torch.manual_seed(0)
    embedding = nn.Embedding(11, width)
    middle = [nn.Linear(width, width), nn.Tanh(), Spread(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(embedding, *middle, Tied(embedding)).double()


async def train(devices, model, pool=None, **options):
    """The losses of some steps, and the state behind them; ``pool`` and ``options`` say where."""
    torch.manual_seed(5)
    batches = [(torch.randint(11, (16, 5)), torch.randint(11, (16,))) for _ in range(4)]
    options = {"loss_fn": nn.functional.cross_entropy, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} | options
    async with Pipeline(model, devices, microbatches=4, balance=[4, 3], pool=pool, **options) as pipe:
        losses = [(await pipe.step(*batch)).loss.cpu() for batch in batches]
        state = {name: value.cpu() for name, value in pipe.state_dict().items()}
    return losses, state


async def same_as_on_threads(devices, pool, width, **options):
    model = make_model(width)
    here = await train(devices, copy.deepcopy(model), **options)
    there = await train(devices, model, pool, **options)
    for ours, theirs in zip(here, there, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("transport", ["shared_memory", "host_memory", "connection"])
def test_two_workers_on_one_gpu(transport):
    """The wider model's messages take the transport's own way."""

    async def run():
        async with DevicePool(workers=TWO_ON_ONE, transport=transport) as pool:
            await same_as_on_threads(["cuda:0", "cuda:0"], pool, 8)
            await same_as_on_threads(["cuda:0", "cuda:0"], pool, 16_000, schedule="zb-h1")

    asyncio.run(run())


def test_nccl_takes_no_two_workers_on_one_gpu():
    with pytest.raises(OptionError, match="NCCL takes no two workers on one device, and 'a' and 'b' share cuda:0"):
        Pipeline(make_model(), ["cuda:0", "cuda:0"], microbatches=2, workers=TWO_ON_ONE, transport="nccl")


@two_gpus
def test_by_nccl():
    async def run():
        async with DevicePool(workers="processes", transport="nccl") as pool:
            await same_as_on_threads(["cuda:0", "cuda:1"], pool, 8)
            await same_as_on_threads(["cuda:0", "cuda:1"], pool, 16_000, schedule="zb-h1")

    asyncio.run(run())


@two_gpus
def test_a_worker_that_dies_leaves_no_peer_in_nccl():
    async def run():
        devices = ["cuda:0", "cuda:1"]
        async with DevicePool(workers="processes", transport="nccl") as pool:
            model = make_model()
            model.insert(5, Dies())
            with pytest.raises((WorkerLostError, TaskError)):
                await train(devices, model, pool, balance=[4, 4])
            # The other worker is free again, and has a new peer.
            await same_as_on_threads(devices, pool, 8)

    asyncio.run(asyncio.wait_for(run(), 60))
