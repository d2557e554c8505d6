# python loop.py
from functools import partial

import torch
from task import batches, layers
from torch import nn

import asyncpipe

model = nn.Sequential(*layers())
replicas = [["cpu:0"], ["cpu:1"]]
options = {"microbatches": 2, "loss_fn": nn.functional.cross_entropy, "optimizer": partial(torch.optim.AdamW, lr=1e-2)}
with asyncpipe.Pipeline(model, replicas, **options).sync() as pipe:
    for x, target in batches():
        loss = pipe.step(x, target).loss
        print(f"loss {loss:.5f}")
