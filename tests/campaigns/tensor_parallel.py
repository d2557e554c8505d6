"""A transformer in two stages, each shared by two workers: pipeline times tensor parallelism, from one controller.

Each stage is one transformer block. torch's own ``parallelize_module`` spreads it over the two workers of its group:
attention by heads, the feed-forward part by its hidden units. The workers of a group get the same micro-batches, and
add up what they have by an all-reduce inside the block. What passes from stage to stage is a plain tensor::

    stage 0: cpu:0 ═ cpu:1        stage 1: cpu:2 ═ cpu:3        ═ collectives of torch.distributed, over gloo
                └──────┼─────────────▶ ┘      │                 ▶ edges of the pipeline
                       └────────────────────▶ ┘

``python -m tests.campaigns.tensor_parallel`` trains it, and the same model unsplit, and prints both losses.
"""

from __future__ import annotations

import asyncio
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from asyncpipe import Pipeline, StageFactory

STEPS = 5
WIDTH, HEADS, TOKENS = 32, 4, 6


class Block(nn.Module):
    """A transformer block whose parts are plain linear layers, so that a plan can name them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        # As many heads as this worker has of them.
        query, key, value = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).flatten(2)))
        fed: Tensor = self.dropout(self.down(nn.functional.gelu(self.up(self.feed_norm(x)))))
        return x + fed


def make_stage(stage: int) -> nn.Module:
    """Called in each worker of the stage's group, with draws that are the same in all of them."""
    return Block().double()


def shard(block: nn.Module, mesh: DeviceMesh) -> None:
    """Called in each worker of the stage's group, with the group's mesh."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in ("project", "down")})


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, 8, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return x, target


async def train(pipe: Pipeline) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, and the weights behind them."""
    torch.manual_seed(1)  # Dropout follows from it.
    async with pipe:
        results = [await pipe.step(*batch(step)) for step in range(STEPS)]
        losses = [result.loss.item() for result in results if result.loss is not None]
        return losses, {name: value.clone() for name, value in pipe.state_dict().items()}


def pipeline(factory: StageFactory, devices: list[str], workers: str) -> Pipeline:
    return Pipeline(
        factory,
        devices,
        microbatches=4,
        schedule="1f1b",
        loss_fn=nn.functional.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        workers=workers,
    )


async def main() -> None:
    whole = StageFactory(make_stage, stages=2, seed=0)
    split = StageFactory(make_stage, stages=2, seed=0, group=2, shard=shard)
    wanted, weights = await train(pipeline(whole, ["cpu:0", "cpu:1"], "threads"))
    losses, sharded = await train(pipeline(split, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"], "processes"))
    for step, (ours, theirs) in enumerate(zip(losses, wanted, strict=True)):
        print(f"step {step}  loss {ours:.12f}  unsplit {theirs:.12f}")
    apart = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    weights_apart = max((sharded[name] - weights[name]).abs().max().item() for name in weights)
    print(f"losses are at most {apart:.1e} apart, weights {weights_apart:.1e}")


if __name__ == "__main__":
    asyncio.run(main())
