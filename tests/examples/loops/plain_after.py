import torch
from task import batches, layers
from torch import nn

import asyncpipe

model = nn.Sequential(*layers())
options = {"microbatches": 4, "loss_fn": nn.functional.cross_entropy}
with asyncpipe.Pipeline(model, ["cpu:0", "cpu:1"], **options).sync() as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for x, target in batches():
        loss = pipe.step(x, target).loss
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss:.5f}")
