# python loop.py
from functools import partial

import torch
from task import batches, layers
from torch import nn

import asyncpipe

if __name__ == "__main__":
    options = {"microbatches": 4, "balance": [3, 2], "schedule": "1f1b", "workers": "processes"}
    options |= {"loss_fn": nn.functional.cross_entropy, "optimizer": partial(torch.optim.AdamW, lr=1e-2)}
    with asyncpipe.Pipeline(nn.Sequential(*layers()), ["cpu:0", "cpu:1"], **options).sync() as pipe:
        for x, target in batches():
            loss = pipe.step(x, target).loss
            print(f"loss {loss:.5f}")
