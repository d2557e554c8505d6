"""First steps: a model on two devices, a training loop, and a picture of where the time of its last step went."""

from typing import Any

import torch
from torch import nn

import asyncpipe
from asyncpipe.observe.pictures.timeline import text_timeline


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points of a plane, and whether they are in a ring around its middle."""
    draws = torch.Generator().manual_seed(0)
    points = torch.rand(count, 64, 2, generator=draws) * 2 - 1
    return [(x, (x.norm(dim=1) - 0.7).abs().lt(0.2).long()) for x in points]


def main(steps: int = 300) -> list[Any]:
    """The loss of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    losses: list[Any] = []
    # Two threads of this machine; with two GPUs write ["cuda:0", "cuda:1"].
    loss_fn = nn.functional.cross_entropy
    with asyncpipe.Pipeline(model, ["cpu:0", "cpu:1"], microbatches=4, loss_fn=loss_fn).sync() as pipe:
        for x, target in batches(steps):
            result = pipe.step(x, target)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(result.loss)
    print(text_timeline(result.record))
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
