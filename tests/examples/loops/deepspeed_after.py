# python loop.py
from functools import partial

import torch
from task import batches, layers
from torch import nn

import asyncpipe

model = nn.Sequential(*layers())
options = {"microbatches": 4, "loss_fn": nn.functional.cross_entropy}
options["optimizer"] = partial(torch.optim.AdamW, lr=1e-2)
with asyncpipe.Pipeline(model, ["cpu:0", "cpu:1"], **options).sync() as pipe:
    for x, target in batches():
        loss = pipe.step(x, target).loss
        print(f"loss {loss:.5f}")
