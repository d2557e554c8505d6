"""Two replicas of a pipeline, each on a host of its own, as one program that torchrun starts.

On this machine, with an agent in the place of each host::

    torchrun --nproc-per-node 3 examples/replicas_on_hosts/replicas_on_hosts.py
"""

import asyncio
from functools import partial
from typing import Any

import torch
from torch import nn

import asyncpipe

REPLICAS = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
"""A row for each replica. Each agent gets one row; on two hosts write ``[["host-a/cuda:0", …], ["host-b/cuda:0", …]]``
to say which."""


def make_model() -> nn.Sequential:
    """A model with the same values wherever it is made."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Mini-batches of 64 samples, which the replicas share."""
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 64, 16, generator=draws)
    return [(x, x[:, :4].argmax(dim=1)) for x in inputs]


async def main(workers: asyncpipe.Launcher, steps: int = 20) -> list[Any]:
    """The loss of each step."""
    async with asyncpipe.Pipeline(
        make_model(),
        REPLICAS,
        microbatches=4,  # of each replica
        loss_fn=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        shard_optimizer=True,  # each replica updates a half of the weights
        workers=workers,
    ) as pipe:
        losses = [result.loss async for result in pipe.steps(batches(steps))]
        torch.save(pipe.state_dict(), "weights.pt")  # gathered from the hosts, with the unsplit model's names
    return losses


if __name__ == "__main__":
    # In every rank but 0 this call does not return: the process becomes an agent, which starts workers.
    launcher = asyncpipe.TorchrunWorkers()
    for step, loss in enumerate(asyncio.run(main(launcher))):
        print(f"step {step}: loss {loss:.5f}", flush=True)
